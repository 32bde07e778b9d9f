"""Finds, proves, settles and prints the publishes that a kubelet forgot, and the trials of killed `crust try`.

Exit code 1: a publish remains, for lack of a complete proof or because a step was refused. Each step can be repeated
after a kill. The file of the kubelet's bind is removed last: with it the next `crust gc` finds the publish again.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from crust.cli import trial
from crust.cli.gc import forgotten, proof
from crust.cli.gc.forgotten import ForgottenPublish
from crust.cli.gc.kernel import Kernel
from crust.core import errors
from crust.core.printable import printable
from crust.host.files import listing
from crust.host.process import workers
from crust.inspection import daemon_calls, output, show
from crust.rpc.port import stub
from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc

TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one publish. `outcome`: "proven" (dry run), "undone", "kept" (a check failed) or "refused"."""

    publish: ForgottenPublish
    checks: tuple[proof.ProofCheck, ...]
    steps: tuple[str, ...]
    outcome: str
    message: str


@dataclass(frozen=True, slots=True)
class Options:
    run_dir: str
    kubelet_root: str
    grace_s: float
    dry_run: bool


async def collect(options: Options, kernel: Kernel) -> tuple[Result, ...]:
    """Find every forgotten publish of this node, and undo it, if not a dry run.

    Raises as `daemon_calls.inspecting`.
    """
    async with daemon_calls.inspecting(options.run_dir) as inspect:
        results, entries = [], await show.volumes_of(inspect)
        for publish in await workers.run(forgotten.find, options.kubelet_root, entries):
            # asked again: the last step may have taken minutes
            sockets = {driver.name: driver.socket for driver in await daemon_calls.drivers(inspect)}
            entries = await show.volumes_of(inspect)
            evidence = proof.Evidence(sockets, entries, options.grace_s)
            results.append(await _result(publish, evidence, options, kernel))
        for note in await workers.run(trial.killed_trials, options.kubelet_root):
            results.append(await _trial(note, inspect, options))
    return tuple(results)


async def _trial(note: Path, inspect: daemon_calls.Stub, options: Options) -> Result:
    """Undo a killed `crust try`: the free lock of its note proves the kill."""
    publish = ForgottenPublish(
        kind="trial",
        driver=note.parent.parent.name,
        volume_id="",
        pod_uid="",
        pods=f"{options.kubelet_root}/pods",
        target=str(note),
    )
    steps = ("unpublish, unstage, detach and delete the volume of the trial",)
    try:
        if options.dry_run:
            with trial.locked(note):
                return Result(publish, (), steps, "proven", "")
        remaining = await trial.undo(note, inspect)
    except errors.CrustError as error:
        return Result(publish, (), steps, "kept", error.shown())
    return Result(publish, (), steps, "refused" if remaining else "undone", "; ".join(remaining))


async def _result(
    publish: ForgottenPublish, evidence: proof.Evidence, options: Options, kernel: Kernel
) -> Result:
    checks: tuple[proof.ProofCheck, ...] = ()
    steps: tuple[str, ...] = ()
    try:
        checks = await workers.run(proof.checks, publish, evidence, kernel)
        if failed := ", ".join(check.name for check in checks if not check.proven):
            message = f"nothing is touched: the check {failed} failed"
            return Result(publish, checks, (), "kept", message)
        why_staged = await workers.run(proof.why_staged, publish, options.grace_s)
        steps = tuple(await workers.run(_steps, publish, why_staged, kernel))
        if not options.dry_run:
            await _settle(publish, evidence, why_staged, kernel)
    except (errors.CrustError, OSError) as err:
        if checks:
            return Result(publish, checks, steps, "refused", daemon_calls.reason(err))
        message = f"nothing is touched, because a check could not look: {daemon_calls.reason(err)}"
        return Result(publish, (), (), "kept", message)
    return Result(publish, checks, steps, "proven" if options.dry_run else "undone", "")


def _steps(publish: ForgottenPublish, why_staged: str, kernel: Kernel) -> list[str]:
    """The steps for a proven publish, in words. Blocks."""
    loops = kernel.loops_of(publish.mapped) if publish.mapped else ()
    steps = [f"detach the kubelet's loop device {loop}" for loop in loops]
    if publish.mapped and listing.exists(publish.mapped):
        steps.append(f"unmount the kubelet's bind {publish.mapped}")
    steps.append(f"NodeUnpublishVolume {publish.volume_id} {publish.target}")
    if why_staged:
        steps.append(f"no NodeUnstageVolume: {why_staged}, whose kubelet will call it")
    elif publish.staging:
        steps.append(f"NodeUnstageVolume {publish.volume_id} {publish.staging}")
    return steps


async def _settle(
    publish: ForgottenPublish, evidence: proof.Evidence, why_staged: str, kernel: Kernel
) -> None:
    """Make the steps. Raises the refusal of the kernel, the proxy or the driver; the next run continues."""
    if publish.mapped:
        for device in await workers.run(kernel.loops_of, publish.mapped):
            await workers.run(kernel.detach, device, publish.mapped)
        await workers.run(kernel.unmount, publish.mapped)
    daemon, socket = f"driver {publish.driver}", evidence.sockets[publish.driver]
    async with daemon_calls.connected(daemon, socket) as port:
        node = stub(csi_pb2_grpc.NodeStub, port)
        unpublish = csi_pb2.NodeUnpublishVolumeRequest(
            volume_id=publish.volume_id, target_path=publish.target
        )
        await node.NodeUnpublishVolume(unpublish, timeout=TIMEOUT_S)
        if publish.staging and not why_staged:
            # during an unpublish, which may take minutes, a kubelet can stage the volume for a new pod
            if reason := await workers.run(proof.why_staged, publish, evidence.grace_s):
                raise errors.NotReady.named(
                    "VolumeInUseAgain",
                    f"volume {publish.volume_id} stays staged at {publish.staging}",
                    why=f"{reason}, since the proof",
                )
            unstage = csi_pb2.NodeUnstageVolumeRequest(
                volume_id=publish.volume_id, staging_target_path=publish.staging
            )
            await node.NodeUnstageVolume(unstage, timeout=TIMEOUT_S)
    if publish.mapped:
        with suppress(FileNotFoundError):
            await workers.run(os.unlink, publish.mapped)


def shown(results: tuple[Result, ...], kubelet_root: str) -> show.Shown:
    """The results in every format; healthy if all are undone or proven."""

    def table(_: bool) -> Text:  # noqa: FBT001 - there is one width, and its caller is `Shown`
        if not results:
            return Text(
                f"no kubelet has forgotten a publish below {kubelet_root}, and no `crust try` was killed"
            )
        return Text("\n\n").join(Text("\n").join(_described(result)) for result in results)

    unsettled = [result for result in results if result.outcome in ("kept", "refused")]
    names = tuple(result.publish.volume_id or result.publish.target for result in results)
    return show.Shown({"forgotten": results}, names, table, healthy=not unsettled)


def _described(result: Result) -> Iterator[Text]:
    publish = result.publish
    styles = {"undone": output.GOOD, "proven": output.GOOD}
    title = f"{publish.kind} {publish.volume_id or '?'} of {publish.driver or '?'}: "
    yield Text.assemble(title, (result.outcome, styles.get(result.outcome, output.BAD)))
    yield Text(f"  target    {printable(publish.target)}")
    for check in result.checks:
        word, style = ("proven", output.GOOD) if check.proven else ("failed", output.BAD)
        text = f"  {check.name}: {printable(check.text)}"
        yield Text.assemble("  ", (f"{word:<8}", style), text)
    verb = "done" if result.outcome == "undone" else "step"
    for step in result.steps:
        yield Text(f"  {verb:<10}{printable(step)}")
    if result.message:
        yield Text(f"  {'why':<10}{printable(result.message)}")
