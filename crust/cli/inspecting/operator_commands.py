"""The commands for operators, and their options."""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import click

if TYPE_CHECKING:  # it imports rich, which would slow down each start of a daemon
    from crust.cli.inspecting.show import Question
    from crust.cli.output import Format

Command = Callable[..., None]
Shell = Literal["bash", "zsh", "fish"]

RUN_DIR = click.option(
    "--run-dir", default="/run/crust", show_default=True, help="The proxy's run directory."
)
FORMAT = click.option(
    "-o",
    "--output",
    "form",
    type=click.Choice(["table", "wide", "json", "yaml", "name"]),
    default="table",
    show_default=True,
)
_WATCH = click.option("-w", "--watch", is_flag=True, help="Show every change, until Ctrl-C.")
_CODES = """\b
    Exit codes: 0 healthy, 1 a problem is shown, 2 the command cannot be understood,
    3 the proxy does not answer, 130 interrupted."""


def _shows(ask: Callable[..., "Question | None"]) -> Command:
    """A command that prints the answer to its question, once or at each change; for None it prints nothing."""

    @functools.wraps(ask)
    def command(run_dir: str, form: "Format", *, watch: bool, **options: Any) -> None:
        if (question := ask(**options)) is not None:
            from crust.cli.inspecting import watching

            sys.exit(watching.print_answers(run_dir, question, form, watch=watch))

    command.__doc__ = f"{ask.__doc__}\n\n    {_CODES}"
    return RUN_DIR(FORMAT(_WATCH(command)))


@click.command()
@_shows
def status() -> "Question":
    """Show whether this node is ready: the proxy, its drivers (each is asked by Probe), handlers, volumes."""
    from crust.cli.inspecting import show

    return show.status


@click.command()
@_shows
@click.option("--driver", default="", help="Only volumes of this driver.")
@click.option("--handler", default="", help="Only volumes for this runtime handler.")
@click.option("--state", default="", help="published, claimed, mounted, error or unreadable.")
@click.option("--target", default="", help="Only volumes at or below this path.")
@click.option("--pod", default="", help="Of a pod: NAMESPACE/NAME, NAME, or the start of its UID.")
def volumes(**filters: str) -> "Question":
    """List the deferred volumes of this node."""
    from crust.cli.inspecting import show

    return show.volumes(**filters)


@click.command()
@_shows
@click.option("--handler", default="", help="Only this handler.")
def handlers(handler: str) -> "Question":
    """List the registered runtime handlers of this node."""
    from crust.cli.inspecting import show

    return show.handlers(handler)


@click.command()
@_shows
@click.option("--driver", default="", help="Only this driver.")
@click.option("--state", type=click.Choice(["", "ready", "not-ready"]), default="")
def drivers(driver: str, state: str) -> "Question":
    """List the CSI drivers of this node; each is asked by Probe, within five seconds."""
    from crust.cli.inspecting import show

    return show.drivers(driver, state)


@click.group(invoke_without_command=True)
@_shows
@click.option("--driver", default="", help="Only the pool of this driver.")
@click.pass_context
def pool(context: click.Context, driver: str) -> "Question | None":
    """Show the pools of this node's drivers: their space, and each volume, used or unused."""
    if context.invoked_subcommand is not None:
        return None
    from crust.cli.inspecting import pool

    return pool.pools(driver)


@pool.command()
@click.argument("volume")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_context
def delete(context: click.Context, volume: str, *, yes: bool) -> None:
    """Delete VOLUME, by its id or its PersistentVolume, with its data, if it is unused: for one that a CO forgot.

    Exit codes: 0 deleted, 1 refused or not confirmed, 2 the command cannot be understood, 3 the proxy does not
    answer.
    """
    import asyncio

    from crust.cli.inspecting import pool

    assert context.parent is not None
    asyncio.run(pool.delete(context.parent.params["run_dir"], volume, is_confirmed=yes))


@click.command()
@_shows
@click.argument("volume")
def describe(volume: str) -> "Question":
    """Show a deferred volume, by its PersistentVolume, its pod, its id, its target path or the name of its entry."""
    from crust.cli.inspecting import show

    return show.describe(volume)


@click.command("end-orphan")
@RUN_DIR
@click.argument("volume")
@click.option("--yes", is_flag=True, help="Do not ask.")
def end_orphan(run_dir: str, volume: str, *, yes: bool) -> None:
    """End the virtual machine that has VOLUME and is lost to its runtime, after a check.

    VOLUME is named as for describe. The check: the runtime has reported that the sandbox is lost, no shim of it runs,
    and the claim ends with that process.

    Exit codes: 0 ended, and the volume is free; 1 refused or not confirmed; 2 the command cannot be understood;
    3 the proxy does not answer.
    """
    import asyncio

    from crust.cli.inspecting import end_orphan

    asyncio.run(end_orphan.end(run_dir, volume, is_confirmed=yes))


@click.command()
@RUN_DIR
@FORMAT
@click.option("--check", "only", multiple=True, metavar="NAME", help="Run only this check.")
def doctor(run_dir: str, form: "Format", only: tuple[str, ...]) -> None:
    """Check this node: kernel, programs, settings, the kubelet's directories, sockets, versions.

    Exit codes: 0 no error was found (warnings may be), 1 an error, 2 the command cannot be understood.
    """
    from crust.cli.doctor import examine
    from crust.cli.doctor.finding import CHECKS

    unknown = [name for name in only if name not in CHECKS]
    if unknown:
        raise click.UsageError(f"no check is called {unknown[0]!r}: there are {', '.join(CHECKS)}")
    sys.exit(examine.print_findings(run_dir, form, only))


@click.command()
@RUN_DIR
@FORMAT
@click.option(
    "--dry-run",
    is_flag=True,
    help="Show the forgotten publishes, the proof and the steps; change nothing.",
)
@click.option("--kubelet-root", default="/var/lib/kubelet", show_default=True)
@click.option(
    "--grace-s",
    type=click.FloatRange(min=60),
    default=600.0,
    show_default=True,
    help="The age that a publish must have.",
)
def gc(run_dir: str, form: "Format", *, dry_run: bool, kubelet_root: str, grace_s: float) -> None:
    """Settle publishes that a kubelet forgot: their pod is gone, and a proof shows that no process uses them.

    Without complete proof no publish is touched, and the output names the failed check. Run it as root in the host's
    namespaces.

    Exit codes: 0 all publishes are settled (with --dry-run: proven), 1 a publish remains,
    2 the command cannot be understood, 3 the proxy does not answer.
    """
    from crust.cli.gc import collect

    sys.exit(
        collect.print_settled(
            collect.Options(run_dir, kubelet_root.rstrip("/"), grace_s, dry_run), form
        )
    )


@click.command()
@RUN_DIR
@click.option("--state-dir", default="/var/lib/crust/block", show_default=True, help="The pool.")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def bundle(run_dir: str, state_dir: str, file: Path) -> None:
    """Write a support archive, FILE.tar.gz, without secrets.

    Status, doctor's findings, settings, records, claims, mounts, versions and the last log lines. An existing FILE is
    not overwritten.

    Exit codes: 0 written, 1 it cannot be written, 2 the command cannot be understood.
    """
    from crust.cli import bundle

    bundle.write_bundle(file, bundle.NodeFiles(run_dir, state_dir))


@click.command()
@click.argument("shell", type=click.Choice(get_args(Shell)))
def completion(shell: Shell) -> None:
    """Print the completion script of a shell: eval "$(crust completion bash)"."""
    click.echo(completion_script(shell))


def completion_script(shell: Shell) -> str:
    """The script. It asks the `crust` of the PATH at each completion, so it need not change with the commands."""
    from click import shell_completion  # for this command only

    completion_class = shell_completion.get_completion_class(shell)
    assert completion_class is not None
    of_crust = completion_class(click.Command("crust"), {}, "crust", "_CRUST_COMPLETE")
    # click's `source` for bash starts this machine's bash, for its version; another machine may use the script.
    return shell_completion.ShellComplete.source(of_crust)


COMMANDS: tuple[click.Command, ...] = (
    status,
    volumes,
    handlers,
    drivers,
    pool,
    describe,
    end_orphan,
    doctor,
    gc,
    bundle,
    completion,
)
