"""Independent branches of a step that groups of devices compute side by side."""
