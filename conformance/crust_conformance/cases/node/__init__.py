"""Cases of the Node service."""
