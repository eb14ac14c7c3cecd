"""Tests that take long, or need the compiler for TPUs or the tools of pages and notebooks: `make test-thorough`."""
