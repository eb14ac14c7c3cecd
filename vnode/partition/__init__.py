"""Splitting any factor of any operator: what a plan would take."""
