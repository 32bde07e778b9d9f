"""`crust`: the commands, each a few lines over one package.

Packages are imported when their command runs: `crust status` should not pay for the driver.
"""

import sys
from typing import Any

import click

import crust
from crust.cli import refusals
from crust.cli.ceph.command import ceph
from crust.cli.checking import check_commands as checking
from crust.cli.inspecting import operator_commands as inspecting
from crust.cli.programs import daemon_commands as programs
from crust.core import errors

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


_CHECKS = (checking.config, checking.try_publish)
_OTHERS = (*_CHECKS, ceph)
for _command in (*programs.COMMANDS, *inspecting.COMMANDS, *_OTHERS):
    main.add_command(_command)


@main.command()
@click.argument("name", required=False)
@click.option("--volume", help="Why this volume is deferred, by its id, and where it is.")
@click.option("--target", help="Why the volume at this target path is deferred.")
@inspecting.RUN_DIR
def explain(name: str | None, volume: str | None, target: str | None, run_dir: str) -> None:
    """Explain an error: its meaning, its retries and its remedy: `crust explain MountFailed`.

    With --volume or --target: the rule that decided that a volume is deferred.
    """
    if [name, volume, target].count(None) != 2:
        raise click.UsageError("give the name of an error, or --volume, or --target")
    if name is not None:
        from crust.cli import explain

        explain.print_page(name)
        return
    import asyncio

    from crust.cli.inspecting import decisions

    asyncio.run(decisions.volume(run_dir, volume=volume or "", target=target or ""))


@main.group()
def policy() -> None:
    """The rules by which the proxy decides whether a publish is deferred."""


@policy.command("explain")
@click.option("--driver", required=True, help="The driver's name.")
@click.option(
    "--context", "pairs", multiple=True, metavar="KEY=VALUE", help="A pair of the volume context."
)
@click.option("--pod", metavar="NAMESPACE/NAME/UID", help="The pod that the volume is for.")
@click.option("--flag", is_flag=True, help="The CO's flag defer_fs_ops is set.")
@click.option("--block", is_flag=True, help="The volume is published as a raw block device.")
@inspecting.RUN_DIR
def policy_explain(run_dir: str, **question: Any) -> None:
    """Show whether a publish would be deferred, to which handler, and by which rule.

    Exit codes: 0 it was decided, 1 it is refused, 2 the command cannot be understood, 3 the proxy does not answer.
    """
    import asyncio

    from crust.cli.inspecting import decisions

    asyncio.run(decisions.policy(run_dir, **question))


@main.command()
@click.option("--systemd", is_flag=True, required=True, help="Install units of systemd.")
def install(*, systemd: bool) -> None:
    """Install this environment's crust on the node: units, a udev rule, settings in /etc/crust, the command, its
    man pages and completion.

    Run it again after an upgrade. Your settings are kept. Exit codes: 0 installed, 1 refused or failed.
    """
    from crust.cli import install

    install.run_install()


@main.command()
def uninstall() -> None:
    """Remove the files of `crust install`, but no settings and no volumes. Stop the units before.

    Exit codes: 0 removed, 1 refused or failed.
    """
    from crust.cli import install

    install.run_uninstall()
