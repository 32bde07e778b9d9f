"""Volumes as sparse files of one directory, attached by loop devices."""
