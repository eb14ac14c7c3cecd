"""Devices of different kinds -> the numbers of nodes that make a step shortest."""
