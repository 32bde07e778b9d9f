"""The usual way to run crust on a node: proxy, shims and block drivers in one process.

It adds no work to the three programs; the parts call one another without a socket.
"""
