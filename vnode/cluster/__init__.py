"""A cluster that jobs share: policies, a simulator, and a scheduler."""
