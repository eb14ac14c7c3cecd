"""Tests that compile no step: `make quick` runs them."""
