"""crust, Container RUntime STorage: hands the block device of a CSI volume to a microVM runtime."""

__version__ = "0.1.0"
