"""The records of volumes, contents, snapshots and of this node, and what follows from them."""
