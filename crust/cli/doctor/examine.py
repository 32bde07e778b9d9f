"""Runs the checks and prints their findings. Exit code 1 if there is an error; warnings do not count."""

import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path

from rich.text import Text

from crust.cli.doctor import csi_driver_objects, daemons, host, kata, kubelet
from crust.cli.doctor.node import CHECKS, Finding, Level, Node, error
from crust.core import errors
from crust.core.printable import printable
from crust.host.mounts import propagation
from crust.host.process import workers
from crust.inspection import daemon_calls, output, show
from crust.inspection.views import ProxyAnswer

MODULES = (host, kubelet, daemons, kata, csi_driver_objects)
"""Importing one registers its checks."""

_STYLES = {"ok": output.GOOD, "warning": output.BUSY, "error": output.BAD}
_COLUMNS = (
    output.Column("level", lambda row: row.level.value, styles=_STYLES),
    output.Column("check"),
    output.Column("found", "what"),
    output.Column("why", wide=True),
    output.Column("what to do", "todo", wide=True),
)


async def examine(run_dir: str, only: Iterable[str] = ()) -> show.Shown:
    """Run all checks on this node, or the named ones."""
    answered: ProxyAnswer | errors.CrustError
    try:
        async with daemon_calls.inspecting(run_dir) as stub:
            answered = await show.everything(stub)
    except errors.CrustError as problem:
        answered = problem
    node = Node(
        run_dir=run_dir,
        proxy=answered,
        check_propagation=lambda path: propagation.check_propagation((path,)),
        csi_driver_mismatches=csi_driver_objects.mismatches,
        is_pod="KUBERNETES_SERVICE_HOST" in os.environ,  # of every container, by its kubelet
        host_root=Path("/proc/1/root") if propagation.host_is_visible() else None,
    )
    return shown(await workers.run(findings, node, tuple(only)))


def findings(node: Node, only: tuple[str, ...] = ()) -> tuple[Finding, ...]:
    """The findings of the checks, in their order. A check that fails gives an error finding. Blocks."""
    found: list[Finding] = []
    for name in only or CHECKS:
        try:
            for finding in CHECKS[name](node):
                found.append(dataclasses.replace(finding, check=name))
        except (errors.CrustError, OSError) as err:
            what, todo = f"the check {name} could not look", "run the command as root"
            if isinstance(err, errors.CrustError):
                todo = err.hint or f"crust explain {err.error_name}"
            found.append(dataclasses.replace(error(what, str(err), todo), check=name))
    return tuple(found)


def shown(results: tuple[Finding, ...]) -> show.Shown:
    """The findings in every format; `-o name` names the checks that found an error."""
    bad = [finding for finding in results if finding.level is Level.ERROR]

    def table(wide: bool) -> Text:  # noqa: FBT001 - one flag, and its caller is `Shown`
        if wide:
            return output.table(_COLUMNS, results, wide=True)
        lines = []
        for finding in results:
            level = finding.level.value
            line = Text.assemble((f"{level:<8}", _STYLES[level]), f"{finding.check}: ")
            line.append(printable(finding.what))
            for title, text in (("why", finding.why), ("do", finding.todo)):
                if text:
                    line.append(f"\n{'':<8}{title}: {printable(text)}")
            lines.append(line)
        return Text("\n").join(lines)

    names = tuple(dict.fromkeys(finding.check for finding in bad))
    return show.Shown({"healthy": not bad, "findings": results}, names, table, healthy=not bad)
