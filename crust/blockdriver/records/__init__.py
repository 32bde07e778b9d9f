"""The records of volumes, contents, snapshots and of this node, and the rules that follow from them."""
