"""Rematerialization and offload of residuals: less memory for the backward pass, more work or transfers."""
