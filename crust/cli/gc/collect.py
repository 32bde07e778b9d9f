"""Finds, proves, settles, prints: orphans of a kubelet, and what a killed `crust try` left.

Exit code 1: an orphan is left, without a complete proof or by a refused step.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from crust.cli import asking, output
from crust.cli.checking import trial
from crust.cli.gc import forgotten, proof, settle
from crust.cli.gc.kernel import Kernel
from crust.cli.inspecting import show, views, watching
from crust.core import errors
from crust.host.process import workers
from crust.wire.v1 import inspect_pb2


@dataclass(frozen=True, slots=True)
class Result:
    """One orphan. `outcome`: "proven" (dry run), "settled", "kept" (a check failed) or "refused"."""

    orphan: forgotten.Orphan
    checks: tuple[proof.Check, ...]
    steps: tuple[str, ...]
    outcome: str
    message: str


@dataclass(frozen=True, slots=True)
class Options:
    """How the command was called."""

    run_dir: str
    kubelet_root: str
    grace_s: float
    dry_run: bool


def print_settled(options: Options, form: output.Format) -> int:
    """Run the command; returns the exit code."""
    results = asyncio.run(collect(options, Kernel()))
    return watching.print_once(shown(results, options.kubelet_root), form)


async def collect(options: Options, kernel: Kernel) -> tuple[Result, ...]:
    """Every orphan of this node, settled if that is asked for. Raises what `asking.inspecting` does."""
    async with asking.inspecting(options.run_dir) as stub:
        sockets, evidence = await _asked(stub, options)
        found = await workers.run(forgotten.find, options.kubelet_root, evidence.entries)
        results = []
        for each in found:  # settling the one before may have taken minutes
            sockets, evidence = await _asked(stub, options)
            results.append(await _one(each, evidence, sockets, options, kernel))
        for note in await workers.run(trial.left, options.kubelet_root):
            results.append(await _trial(note, stub, sockets, options))
    return tuple(results)


async def _trial(
    note: Path, stub: asking.Stub, sockets: dict[str, str], options: Options
) -> Result:
    """A `crust try` that was killed: the lock of its note proves it."""
    orphan = forgotten.Orphan(
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
                return Result(orphan, (), steps, "proven", "")
        left = await trial.undo(note, stub, sockets)
    except errors.CrustError as error:
        return Result(orphan, (), steps, "kept", error.shown())
    return Result(orphan, (), steps, "refused" if left else "settled", "; ".join(left))


async def _asked(stub: asking.Stub, options: Options) -> tuple[dict[str, str], proof.Evidence]:
    """The drivers' sockets, and what the proxy knows now."""
    served = await stub.ListDrivers(inspect_pb2.ListDriversRequest(), timeout=show.TIMEOUT_S)
    listed = await stub.ListDeferredVolumes(
        inspect_pb2.ListDeferredVolumesRequest(), timeout=show.TIMEOUT_S
    )
    sockets = {driver.name: driver.socket for driver in served.drivers}
    entries = tuple(map(views.Volume.of, listed.volumes))
    return sockets, proof.Evidence(frozenset(sockets), entries, options.grace_s)


async def _one(
    orphan: forgotten.Orphan,
    evidence: proof.Evidence,
    sockets: dict[str, str],
    options: Options,
    kernel: Kernel,
) -> Result:
    try:
        seen = await workers.run(proof.checks, orphan, evidence, kernel)
    except (errors.CrustError, OSError) as err:
        message = f"nothing is touched, because a check could not look: {_text(err)}"
        return Result(orphan, (), (), "kept", message)
    failed = ", ".join(each.name for each in seen if not each.proven)
    if failed:
        message = f"nothing is touched: the check {failed} failed"
        return Result(orphan, seen, (), "kept", message)
    steps: tuple[str, ...] = ()
    try:
        plan = await workers.run(settle.planned, orphan, sockets[orphan.driver], options.grace_s)
        steps = await workers.run(plan.steps, kernel)
        if options.dry_run:
            return Result(orphan, seen, steps, "proven", "")
        await settle.settle(plan, kernel)
    except (errors.CrustError, OSError) as err:
        return Result(orphan, seen, steps, "refused", _text(err))
    return Result(orphan, seen, steps, "settled", "")


def _text(err: errors.CrustError | OSError) -> str:
    return err.shown() if isinstance(err, errors.CrustError) else str(err)


def shown(results: tuple[Result, ...], kubelet_root: str) -> show.Shown:
    """In every format; healthy if nothing is left."""

    def table(_: bool) -> Text:  # noqa: FBT001 - there is one width, and its caller is `Shown`
        if not results:
            return Text(f"nothing below {kubelet_root} is left by a kubelet or by `crust try`")
        return Text("\n\n").join(map(_described, results))

    left = [result for result in results if result.outcome in ("kept", "refused")]
    names = tuple(result.orphan.volume_id or result.orphan.target for result in results)
    return show.Shown({"orphans": results}, names, table, healthy=not left)


def _described(result: Result) -> Text:
    orphan = result.orphan
    styles = {"settled": output.GOOD, "proven": output.GOOD}
    lines = [
        Text.assemble(
            f"{orphan.kind} {orphan.volume_id or '?'} of {orphan.driver or '?'}: ",
            (result.outcome, styles.get(result.outcome, output.BAD)),
        ),
        Text(f"  target    {output.printable(orphan.target)}"),
    ]
    for check in result.checks:
        word, style = ("proven", output.GOOD) if check.proven else ("failed", output.BAD)
        text = f"  {check.name}: {output.printable(check.text)}"
        lines.append(Text.assemble("  ", (f"{word:<8}", style), text))
    verb = "done" if result.outcome == "settled" else "step"
    lines += [Text(f"  {verb:<10}{output.printable(step)}") for step in result.steps]
    if result.message:
        lines.append(Text(f"  {'why':<10}{output.printable(result.message)}"))
    return Text("\n").join(lines)
