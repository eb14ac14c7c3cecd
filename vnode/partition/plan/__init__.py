"""Plans: found for a step and a machine, printed, saved, and turned into a step."""
