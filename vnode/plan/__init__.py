"""How many virtual nodes a step should have, and how many of them each device."""
