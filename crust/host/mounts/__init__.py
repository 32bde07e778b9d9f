"""Mounts: the mount API, mountinfo, mount parameters, propagation, and the users of a mount."""
