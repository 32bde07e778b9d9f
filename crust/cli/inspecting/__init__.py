"""The commands that show the state of a node: status, volumes, handlers, drivers, pool, describe."""
