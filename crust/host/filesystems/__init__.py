"""Filesystems: make, check, grow, freeze and measure."""
