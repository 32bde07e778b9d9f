"""gRPC: sockets, channels, status codes, codecs, and what is logged of a call.

The packages above raise errors of `crust.core.errors` and never name a status code. The packages
below do not import grpc.
"""
