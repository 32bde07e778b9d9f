"""`crust try`, `crust config check` and `crust conformance`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from crust.cli.inspecting.operator_commands import FORMAT, RUN_DIR
from crust.cli.programs import PROGRAMS

if TYPE_CHECKING:  # it imports rich, which would slow down each start of a daemon
    from crust.cli.output import Format


_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_NEW_FILE = click.Path(dir_okay=False, resolve_path=True, path_type=Path)


@click.command("try")
@click.option("--driver", default="", help="The driver's name. Default: the only one.")
@click.option("--handler", required=True, help="The runtime handler: `crust handlers`.")
@click.option("--size-mib", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--fs-type", default="ext4", show_default=True)
@click.option(
    "--parameter", "parameters", multiple=True, metavar="KEY=VALUE", help="StorageClass parameter."
)
@click.option("--target-root", default="/var/lib/kubelet", show_default=True)
@click.option(
    "--wait-s",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Wait so long for a sandbox that claims the volume, and for its end. 0: do not wait.",
)
@RUN_DIR
def try_publish(run_dir: str, size_mib: int, parameters: tuple[str, ...], **fields: Any) -> None:
    """Create a volume, publish it deferred as a kubelet does, then undo all steps.

    No other volume is touched. Exit codes: 0 it worked and all steps are undone, 1 a step was refused or could not be
    undone, 2 the command cannot be understood, 3 the proxy does not answer, 130 interrupted, with the steps undone.
    """
    pairs = [parameter.partition("=") for parameter in parameters]
    if bad := [key for key, separator, _ in pairs if not (key and separator)]:
        raise click.BadParameter(f"{bad[0]!r} is not KEY=VALUE")
    import asyncio

    from crust.cli.checking import trial

    request = trial.TrialRequest(
        size_bytes=size_mib << 20, parameters={key: value for key, _, value in pairs}, **fields
    )
    try:
        sys.exit(asyncio.run(trial.try_publish(run_dir, request)))
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(130)


@click.group()
def config() -> None:
    """The settings of the daemons."""


@config.command("check")
@click.argument("programs", nargs=-1, type=click.Choice(list(PROGRAMS)))
@click.option(
    "--config",
    "path",
    type=_FILE,
    help="The settings file. Default: /etc/crust/<program>.toml.",
)
@FORMAT
def config_check(programs: tuple[str, ...], path: Path | None, form: "Format") -> None:
    """Show the settings that daemons would use, with their sources. Default: all programs with a file in /etc/crust.

    No daemon is started. Exit codes: 0 the settings are good, 1 some are refused, 2 the command cannot be understood.
    """
    from crust.cli.checking import config_check

    sys.exit(config_check.print_settings(programs, path, form))


@click.command()
@click.option("--endpoint", help="The driver's socket, unix:///…/csi.sock.")
@click.option(
    "--controller-endpoint",
    help="The socket of a separate controller part; --endpoint is then the node part's.",
)
@click.option(
    "--profile",
    type=click.Choice(["1.12", "1.13"]),
    help="The driver's version of CSI. Default: by its capabilities.",
)
@click.option(
    "--target-root",
    type=click.Path(file_okay=False, resolve_path=True, path_type=Path),
    default="/var/lib/kubelet",
    help="The directory for staging and target paths. Default: /var/lib/kubelet.",
)
@click.option(
    "--junit",
    type=_NEW_FILE,
    help="The file for a report (JUnit XML).",
)
@click.option(
    "--json",
    type=_NEW_FILE,
    help="The file for a report (JSON: every case, clause, request and answer).",
)
@click.option(
    "--parameters",
    type=_FILE,
    help="A TOML file with the parameters, secrets and sizes of the driver's volumes.",
)
@click.option(
    "--log",
    type=_FILE,
    help="The driver's log, which is searched for planted secrets.",
)
@click.option("--restart-command", default="", help="A command that restarts the driver.")
@click.option("--only", multiple=True, metavar="C-101", help="Run these: C-101, C-100..C-199.")
@click.option("--skip", multiple=True, metavar="C-101", help="Run all but these cases.")
@click.option(
    "--strict", is_flag=True, help="Fail also on a broken SHOULD, and beyond the specification."
)
@click.option("--list", "list_cases", is_flag=True, help="List the cases, and do not run them.")
@click.option(
    "--timeout-s",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="The deadline of each call.",
)
@click.option(
    "--runtime",
    metavar="COMMAND",
    is_flag=False,
    flag_value="",
    help="Check a runtime against the contract of the handoff directory instead, with --only, --skip, --list, "
    "--strict, --junit, --json and --timeout-s. Default of --timeout-s then: 120.",
)
@click.pass_context
def conformance(context: click.Context, /, runtime: str | None, **flags: Any) -> None:
    """Check any CSI driver against the rules of the specification.

    Run it as root where the driver's mounts are visible. Exit codes: 0 no MUST is broken, 1 a MUST is broken, 2 the
    command cannot be understood or was interrupted, 3 the driver does not answer.
    """
    from crust.cli.checking import conformance

    if runtime is None:
        sys.exit(conformance.of_driver(**flags))
    chosen = {
        name: value
        for name, value in flags.items()
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT
    }
    if misplaced := sorted(chosen.keys() - _OF_BOTH):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in misplaced)
        raise click.UsageError(f"{names}: not with --runtime, but for drivers")
    sys.exit(conformance.of_runtime(runtime, **chosen))


_OF_BOTH = {"only", "skip", "list_cases", "timeout_s", "strict", "junit", "json"}
