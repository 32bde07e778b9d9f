"""Snapshots, group snapshots, restores, clones and changed blocks, and the quiescing that copies need."""
