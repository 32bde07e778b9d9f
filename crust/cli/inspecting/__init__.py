"""The commands that show what a node has: status, volumes, handlers, drivers, describe, events."""
