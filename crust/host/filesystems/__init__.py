"""Filesystems: mkfs, superblocks, and the decision to format."""
