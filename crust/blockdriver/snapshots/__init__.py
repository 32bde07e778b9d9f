"""Snapshots, groups, restores and clones, and the quiescing that they need."""
