"""What the driver remembers of volumes and snapshots: formats, stores, and the index over them."""
