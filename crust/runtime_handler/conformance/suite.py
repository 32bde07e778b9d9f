"""Runs the cases against a runtime, and prints one line for each; a failure also has what was said."""

import asyncio
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Collection

from crust import errors
from crust.runtime_handler import testing
from crust.runtime_handler.conformance import call_cases, claim_cases, record_cases
from crust.runtime_handler.conformance.case import CASES, BrokenDuty, Case, Strength
from crust.runtime_handler.conformance.subject import Subject

MODULES = (call_cases, claim_cases, record_cases)
"""Importing them registers their cases."""

TIMEOUT_S = 120.0
"""For one answer: a virtual machine boots meanwhile."""


def run(
    command: str,
    write: Callable[[str], None],
    *,
    only: Collection[str] = (),
    timeout_s: float = TIMEOUT_S,
) -> int:
    """Run the cases, all or those of the numbers `only`, against the command; returns the number of broken MUSTs.

    Raises `RuntimeNotUsable`. Needs root, for loop devices and mounts.
    """
    chosen = [each for each in CASES if not only or each.number in only]
    return asyncio.run(_run(command, write, chosen, timeout_s))


async def _run(
    command: str, write: Callable[[str], None], chosen: list[Case], timeout_s: float
) -> int:
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="crust-", ignore_cleanup_errors=True) as directory:
        os.makedirs(f"{directory}/targets")
        async with testing.serving(directory) as proxy:
            subject = Subject(command, directory, proxy, timeout_s)
            try:
                await subject.serve()
                for each in sorted(chosen, key=lambda one: one.number):
                    await subject.revive()
                    counts[await _judge(each, subject, write)] += 1
            finally:
                await subject.close()
    write(", ".join(f"{number} {verdict}" for verdict, number in sorted(counts.items())))
    return counts["failed"]


async def _judge(case: Case, subject: Subject, write: Callable[[str], None]) -> str:
    line = f"{case.number} {{}} {case.title} [{', '.join(case.clauses)} {case.strength.value}]"
    if why := case.skipped(subject.runtime.features):
        write(f"{line.format('skipped')}: {why}")
        return "skipped"
    try:
        await case.body(subject)
    except (BrokenDuty, errors.CrustError, OSError) as error:
        verdict = "failed" if case.strength is Strength.MUST else "warning"
        write(line.format(verdict))
        for text in (*subject.transcript, f"=> {str(error) or type(error).__name__}"):
            write(f"    {text}")
        return verdict
    else:
        write(line.format("passed"))
        return "passed"
    finally:
        await subject.reset()
