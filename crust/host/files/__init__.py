"""Files: durable writes, sparse images, copies and extents, locks, and paths that a CO names."""
