"""`crust shim`."""

from crust.cli.programs.flags import daemon

command = daemon("shim")
