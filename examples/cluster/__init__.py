"""Three nodes on one machine, each in a network namespace of its own."""
