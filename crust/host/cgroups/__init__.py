"""I/O limits held by control groups."""
