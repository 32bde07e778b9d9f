"""Cases of snapshots, groups of them, copies and changed blocks."""
