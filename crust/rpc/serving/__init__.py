"""Serving on a socket: ownership, admission of calls, errors as status codes, health."""
