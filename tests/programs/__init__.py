"""Programs that tests run in processes of their own, one a file; `tests.ahead` starts them."""
