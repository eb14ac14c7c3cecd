"""A step -> its number of virtual nodes, their placement, a comparison of devices, and a check of its results."""
