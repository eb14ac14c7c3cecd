"""How many nodes devices of different kinds should hold."""
