"""Files: durable writes, sparse images, locks, and the target paths that a CO names."""
