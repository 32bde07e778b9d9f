"""The records of volumes, contents and snapshots: formats, stores, and the index over them."""
