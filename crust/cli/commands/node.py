"""`crust node`."""

from crust.cli.programs.flags import daemon

command = daemon("node")
