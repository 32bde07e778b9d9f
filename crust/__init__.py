"""crust, Container RUntime STorage: a CSI volume's block device, handed to a microVM runtime."""

__version__ = "0.1.0"
