"""`crust`: the commands, each a few lines over one package.

Packages are imported when their command runs: `crust status` should not pay for the driver.
"""

import importlib
import pkgutil
import sys
from typing import Any

import click

import crust
from crust.blockdriver.commands import ceph, pool
from crust.cli import commands
from crust.core import errors
from crust.inspection import refusals

_NO_ANSWER = 3
"""The exit code when the daemon that was asked does not answer."""


class _Commands(click.Group):
    """Prints the error of a refused command. click suggests the nearest command, this class the nearest option."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. An error of crust is its sentence, and the exit code of its branch."""
        try:
            return super().invoke(ctx)
        except errors.CrustError as error:
            refusals.tell(error)
            if error.error_name == "DaemonNotResponding":
                sys.exit(_NO_ANSWER)
            sys.exit(2 if isinstance(error, errors.InvalidRequest) else 1)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in ("help", "version"):
            ctx.fail(f"No such command {args[0]!r}. Did you mean '--{args[0]}'?")
        return super().resolve_command(ctx, args)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(crust.__version__, prog_name="crust")
def main() -> None:
    """Hand CSI volumes to unpatched microVM runtimes."""


for _found in pkgutil.iter_modules(commands.__path__, f"{commands.__name__}."):
    main.add_command(importlib.import_module(_found.name).command)
for _module in (ceph, pool):
    main.add_command(_module.command)
main.commands = dict(sorted(main.commands.items()))  # the order of its man page
