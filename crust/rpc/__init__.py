"""gRPC as a room: sockets, channels, status codes, what is logged of a call and what is not.

Rooms above raise errors of `crust.errors` and never name a status code; rooms below never import grpc.
"""
