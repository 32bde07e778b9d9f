"""Three nodes and a controller on one machine, each node in a network namespace of its own."""
