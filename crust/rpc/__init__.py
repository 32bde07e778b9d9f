"""gRPC: sockets, channels, status codes, codecs, and the log lines of calls.

The packages above raise errors of `crust.core.errors` and never name a status code. The packages below do not import
grpc.
"""
