"""Deferral around a driver that knows nothing of it, which publishes raw block volumes at private paths."""
