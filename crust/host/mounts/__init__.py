"""Mounts: the mount API, mountinfo, options, and what a mount carries."""
