"""Unequal devices -> unequal shares of a dimension for each: AccPar's search, and plans whose state has such shares."""
