"""The usual way to run crust on a node: proxy, shims and block drivers in one process.

Nothing is done here that the three programs do not do; the parts call one another without a socket.
"""
