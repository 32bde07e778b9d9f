"""`crust kata`."""

from crust.cli.programs.flags import daemon

command = daemon("kata")
