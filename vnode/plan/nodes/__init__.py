"""A step and a memory limit -> the smallest number of virtual nodes that fits."""
