"""`crust proxy`."""

from crust.cli.programs.flags import daemon

command = daemon("proxy")
