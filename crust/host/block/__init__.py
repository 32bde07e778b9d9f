"""Block devices: loop devices, who holds a device, and what is on it."""
