"""`python -m examples.kata`: serve, run, ps, logs, stop, conformance."""

import asyncio
import contextlib
import logging
import os
import resource
import signal
import sys
import uuid
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import click

from crust.core import errors, logs, volumes
from examples.kata.runtime import messages
from examples.kata.runtime.client import Client
from examples.kata.vm import spec

RUN_DIR = "/run/crust/example"
"""Below the proxy's, which its pod has too: the proxy calls the handler's socket there."""
CACHE = Path(".cache/guest")

Answer = TypeVar("Answer")

_RUN_DIR = click.option("--run-dir", default=RUN_DIR, show_default=True)
_CLAIMS = click.option(
    "--claims",
    type=click.Choice(["hypervisor", "keeper"]),
    default="hypervisor",
    show_default=True,
    help="What holds the claims of a new VM: QEMU, or a process beside it.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """A Kata-style runtime: commands in microVMs, with deferred volumes."""


@main.command()
@_RUN_DIR
@click.option("--handlers-socket", default="/run/crust/handlers.sock", show_default=True)
@click.option("--volumes-root", default="", help="Default: `volumes` beside the handlers socket.")
@click.option("--name", default="kata", show_default=True, help="The runtime handler's name.")
@click.option("--cache", type=click.Path(path_type=Path), default=CACHE, show_default=True)
@_CLAIMS
@click.option(
    "--node", default="", help="This node's name, as the driver has it. Default: the host's name."
)
@click.option("--log-format", type=click.Choice(["json", "console"]), default="console")
@click.option("--traces/--no-traces", default=False, help="As the setting of crust's daemons.")
def serve(  # noqa: PLR0913 - one per option
    run_dir: str,
    handlers_socket: str,
    volumes_root: str,
    name: str,
    cache: Path,
    claims: spec.ClaimHolder,
    node: str,
    log_format: logs.Format,
    *,
    traces: bool,
) -> None:
    """Run the daemon: sandboxes, and crust's runtime handler of this node."""
    from crust.rpc import tracing
    from examples.kata.runtime import daemon

    logs.configure(fmt=log_format)
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # also of QEMU: it would have a guest's memory
    options = daemon.Options(
        run_dir=Path(run_dir),
        handlers_socket=handlers_socket,
        name=volumes.HandlerName(name),
        volumes_root=volumes_root or str(Path(handlers_socket).parent / "volumes"),
        cache=cache,
        claims=claims,
        node=node,
    )
    try:
        with tracing.exporting("kata-example", is_on=traces):
            asyncio.run(_until_signal(options))
    except errors.CrustError as error:
        logging.getLogger(__name__).error("cannot serve", extra={"error": error})
        sys.exit(1)


@main.command("conformance")
@_RUN_DIR
@click.option("--handlers-socket", required=True)
@click.option("--volumes-root", required=True)
@click.option("--cache", type=click.Path(path_type=Path), default=CACHE, show_default=True)
@_CLAIMS
@click.option(
    "--boot-timeout-s", type=float, default=60.0, show_default=True, help="Of each guest."
)
def conformance(
    run_dir: str,
    handlers_socket: str,
    volumes_root: str,
    cache: Path,
    claims: spec.ClaimHolder,
    boot_timeout_s: float,
) -> None:
    """Serve, and start and stop sandboxes as lines of standard input say: for crust-conformance --runtime."""
    from examples.kata.runtime import daemon

    logs.configure()
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # also of QEMU: it would have a guest's memory
    name = volumes.HandlerName("kata")
    places = (Path(run_dir), handlers_socket, name, volumes_root, cache)
    options = daemon.Options(*places, claims=claims, boot_timeout_s=boot_timeout_s)
    asyncio.run(daemon.answer_lines(options))


async def _until_signal(options: object) -> None:
    from examples.kata.runtime import daemon

    assert isinstance(options, daemon.Options)
    task = asyncio.ensure_future(daemon.run(options))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


# All words after the command's name are the command's own, also words that look like an option.
@main.command(context_settings={"allow_interspersed_args": False})
@_RUN_DIR
@click.option(
    "--sandbox", help="Use or create this sandbox, and keep it. Default: a temporary one."
)
@click.option(
    "--mount",
    "mounts",
    multiple=True,
    metavar="source=PATH,destination=PATH[,readonly]",
    help="A deferred volume's target path, and the path of its mount in the container.",
)
@click.option("--env", "environment", multiple=True, metavar="NAME=VALUE")
@click.argument("argv", nargs=-1, required=True, metavar="COMMAND [ARGUMENT]...")
def run(
    run_dir: str,
    sandbox: str | None,
    mounts: tuple[str, ...],
    environment: tuple[str, ...],
    argv: tuple[str, ...],
) -> None:
    """Run a command in a microVM; exits with its code. The options of this command come first."""
    request = messages.Run(
        sandbox=sandbox or f"run-{uuid.uuid4().hex[:8]}",
        argv=argv,
        mounts=tuple(map(_mount, mounts)),
        env=dict(_pair(variable) for variable in environment),
        keep=sandbox is not None,
    )
    client = Client(f"{run_dir}/control.sock")
    ended = _ask(client.run(request, _print))
    sys.exit(ended.code)


@main.command()
@_RUN_DIR
def ps(run_dir: str) -> None:
    """List sandboxes and their volumes."""
    client = Client(f"{run_dir}/control.sock")
    for row in _ask(client.list()):
        click.echo(f"{row['sandbox']}  pid {row['pid']}  {row['accelerator']}")
        for target in row["volumes"]:
            limits = (
                f"{name}={most}" for name, most in row["limits"].get(target, {}).items() if most
            )
            click.echo(" ".join((f"    {target}", *limits)))
    for sandbox in _ask(client.not_adopted()):
        click.echo(f"{sandbox}  not adopted; can only be stopped")


@main.command("logs")
@_RUN_DIR
@click.option("-f", "--follow", is_flag=True, help="Go on until the sandbox ends, or Ctrl-C.")
@click.argument("sandbox")
def show_logs(run_dir: str, sandbox: str, *, follow: bool) -> None:
    """Print a guest's console: the last 64 KiB of it."""
    try:
        _ask(Client(f"{run_dir}/control.sock").logs(sandbox, _print_console, follow=follow))
    except KeyboardInterrupt:
        sys.exit(130)


@main.command()
@_RUN_DIR
@click.argument("sandbox")
def stop(run_dir: str, sandbox: str) -> None:
    """Stop a sandbox: unmount its volumes, power the VM off."""
    _ask(Client(f"{run_dir}/control.sock").stop(sandbox))


def _ask(question: Coroutine[Any, Any, Answer]) -> Answer:
    try:
        return asyncio.run(question)
    except errors.CrustError as error:
        click.echo(error.shown(), err=True)
        sys.exit(1)


def _print(stream: str, data: bytes) -> None:
    out = sys.stdout.buffer if stream == "stdout" else sys.stderr.buffer
    out.write(data)
    out.flush()


def _print_console(data: bytes) -> None:
    """The guest's text without control characters: it could write to the operator's terminal otherwise."""
    text = data.decode(errors="replace").replace("\r\n", "\n")
    click.echo("".join(c for c in text if c.isprintable() or c in "\n\t"), nl=False)


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise click.BadParameter(f"{text!r} is not NAME=VALUE")
    return name, value


def _mount(text: str) -> messages.Mount:
    items = text.split(",")
    fields = dict(_pair(item) for item in items if item not in ("readonly", "ro"))
    if set(fields) != {"source", "destination"}:
        raise click.BadParameter(f"{text!r} is not source=PATH,destination=PATH[,readonly]")
    readonly = len(items) > len(fields)
    return messages.Mount(
        source=fields["source"], destination=fields["destination"], readonly=readonly
    )


if __name__ == "__main__":
    main(prog_name="python -m examples.kata")
