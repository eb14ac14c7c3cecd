"""How many virtual nodes a step should have, where they go, what other devices would change; whether it is right."""
