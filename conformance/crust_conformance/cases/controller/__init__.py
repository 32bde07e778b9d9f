"""Cases of the Controller service."""
