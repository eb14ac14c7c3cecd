"""Splitting a program over mesh axes: layouts of values, splits of equations, explicit collectives.

Knows descriptions and programs. Must not know virtual nodes, placements, nor plans.
"""
