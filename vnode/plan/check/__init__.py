"""Whether a step gives what the plain one gives."""
