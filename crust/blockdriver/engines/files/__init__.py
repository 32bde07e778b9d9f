"""The engine for sparse files in one directory, attached by loop devices."""
