"""Mounts: the mount API, mountinfo, mount parameters, group ownership, and how many mounts a node can have."""
