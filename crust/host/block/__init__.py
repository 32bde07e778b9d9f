"""Block devices: size, identity, exclusive opens, loop devices, holders, signatures and zeroing."""
