"""Calls between the parts of one process: the interfaces of grpc.aio, without a socket."""
