"""The node part: stage, publish and grow what this host has. It writes the node state and the content records."""
