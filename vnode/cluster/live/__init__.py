"""Live: a scheduler that shares this machine's devices among jobs that run."""
