"""Workers that come and go: a supervisor without arrays starts processes, and decides which of them train together."""
