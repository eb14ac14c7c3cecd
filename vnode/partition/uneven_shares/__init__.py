"""Dimensions that unequal devices share in unequal pieces: AccPar's search, and plans whose state lies so."""
