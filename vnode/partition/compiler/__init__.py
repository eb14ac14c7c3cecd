"""A machine and programs -> its compiler's figures for them, for many programs within a time limit."""
