"""`crust end-orphan`: ends a virtual machine that has a volume and is lost to its runtime.

The runtime reports that its sandbox is lost (claim.json, `SandboxOrphaned`). The kernel proves which process is the
claim's: it has the lock, or a process that has the lock watches it by a pidfd, as a keeper does. Only then is it
killed, by a pidfd that was opened before the proof, so that no other process can be hit.
"""

import select
import signal
import time

import click

from crust.core import errors
from crust.core.printable import printable
from crust.handoff import claims, layout
from crust.host import answers
from crust.host.process import arguments, open_files, processes, workers
from crust.inspection import daemon_calls, show, views
from crust.kata import keeper_watch

_END_S = 30.0
_FREE_S = 10.0
_AGAIN_S = 0.05


async def end(run_dir: str, name: str, *, is_confirmed: bool) -> None:
    """End the orphaned virtual machine that has the volume `name`, after daemon_calls.

    Raises `VolumeNotDeferred`, `NotOrphaned`, `OrphanNotProven`, `OrphanLives`.
    """
    async with daemon_calls.inspecting(run_dir) as proxy:
        rows = await show.find(proxy, name)
    orphans = [row for row in rows if row.is_orphaned]
    if not orphans:
        row = rows[0]
        state = f"it is {row.state}" + (f" for sandbox {row.sandbox_id}" if row.sandbox_id else "")
        raise errors.NotReady.named(
            "NotOrphaned",
            f"nothing is ended: the volume {row.volume_id} has no virtual machine that is lost to its runtime",
            why=f"{state}, and the runtime {row.handler} has not said that this sandbox is lost",
        )
    for row in orphans:
        await workers.run(_end, run_dir, row, is_confirmed)


def question(row: views.VolumeRow, command: str) -> str:
    return (
        f"Process {row.claimed_by_pid} ({command}) is the virtual machine of sandbox {row.sandbox_id} of "
        f"{row.handler}. It is lost to its runtime, and has the volume {row.volume_id}. Data that its guest has "
        "not written is lost. End it?"
    )


def ended(row: views.VolumeRow) -> str:
    return f"ended process {row.claimed_by_pid}, sandbox {row.sandbox_id}: the volume {row.volume_id} is free"


def _end(run_dir: str, row: views.VolumeRow, is_confirmed: bool) -> None:  # noqa: FBT001 - of a thread
    paths = layout.Layout(f"{run_dir}/volumes").entry(row.entry)
    claim, pid = claims.read(paths), row.claimed_by_pid
    named = claim.process if claim is not None else None
    # as claim.json names it, else the one that has its number now, which `_prove` looks at
    process = named or answers.seen(processes.of(pid))
    if process is None or process.pid != pid:
        raise _ended(row)
    with processes.holding(process) as pidfd:
        if pidfd is None:
            raise _ended(row)
        _prove(paths, row)
        if not is_confirmed:
            click.confirm(question(row, arguments.command_of(pid)), abort=True)
            _prove(paths, row)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        has_ended = bool(select.select([pidfd], [], [], _END_S)[0])
    is_held, until_s = True, time.monotonic() + _FREE_S  # the time that a keeper needs
    while has_ended and (is_held := claims.is_held(paths)) and time.monotonic() < until_s:
        time.sleep(_AGAIN_S)
    if is_held:
        raise errors.PeerUnavailable.named(
            "OrphanLives",
            f"process {pid} was killed, and the volume {row.volume_id} is not free",
            why="its claim is held still" if has_ended else "the kernel has not ended it yet",
        )
    click.echo(printable(ended(row)))


def _ended(row: views.VolumeRow) -> errors.CrustError:
    return errors.NotFound(
        f"process {row.claimed_by_pid} is not ended for the volume {row.volume_id}",
        why="there is no such process any more",
        hint="`crust describe VOLUME` shows who has the volume now",
    )


def _prove(paths: layout.EntryPaths, row: views.VolumeRow) -> None:
    """Raise `OrphanNotProven` unless the process is the claim's, and the sandbox has no shim."""
    claim, pid, why = claims.read(paths), row.claimed_by_pid, ""
    is_same = claim is not None and claim.live and claim.is_orphaned
    if claim is None or not is_same or (claim.sandbox_id, claim.pid) != (row.sandbox_id, pid):
        why = "the claim has changed meanwhile"
    elif shim := next(keeper_watch.shims_of(row.sandbox_id), None):
        why = f"process {shim} is Kata's shim for that sandbox"
    else:
        holders = open_files.holders(paths.claim_lock)
        if pid not in holders and not any(pid in open_files.watched(holder) for holder in holders):
            why = f"process {pid} has not the claim's lock, and no process that has it watches that process"
    if why:
        raise errors.NotReady.named(
            "OrphanNotProven", f"process {pid} is not ended for the volume {row.volume_id}", why=why
        )
