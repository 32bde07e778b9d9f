"""Serving on a socket: taking it over, letting calls in, errors as status codes, health."""
