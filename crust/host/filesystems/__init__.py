"""Filesystems: mkfs, fsck, superblocks, growth, freeze and usage."""
