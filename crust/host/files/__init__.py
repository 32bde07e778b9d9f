"""Files: durable writes, sparse images, copies, extents, locks, writers, and the target paths that a CO names."""
