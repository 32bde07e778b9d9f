"""The drivers of this node: their sockets, the settings file of each, and how the kubelet is told of them."""
