"""An operator, a collective or a split program -> its time, bytes and memory."""
