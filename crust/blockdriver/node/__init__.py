"""The node part stages, publishes and grows volumes on this host, and writes the node state and content records."""
