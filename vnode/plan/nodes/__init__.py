"""How many virtual nodes fit."""
