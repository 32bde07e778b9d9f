"""Cases of snapshots, group snapshots, copies and changed blocks."""
