"""The suite for runtimes: starts the command under test, and runs the cases in one event loop."""

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Callable, Collection, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

from crust.core import volumes
from crust_conformance import plugin, report
from crust_conformance.catalogue import Case
from crust_conformance.options import RunOptions
from crust_conformance.results import Exchange, Finding, Results
from crust_conformance.runtimes import file_opens, testing
from crust_conformance.runtimes.runtime_process import RuntimeNotUsable
from crust_conformance.runtimes.subject import FANOTIFY, KEEPER, RuntimeUnderTest

CASES = Path(__file__).parent
T = TypeVar("T")


def run_suite(command: str, options: RunOptions, *, quiet: bool = False) -> Results:
    """Run the cases against the command. Raises `errors.InvalidRequest` for an unknown case.

    Needs root, for loop devices and mounts.
    """
    with (
        asyncio.Runner() as loop,
        tempfile.TemporaryDirectory(prefix="crust-", ignore_cleanup_errors=True) as directory,
    ):
        os.makedirs(f"{directory}/targets")
        stack = contextlib.AsyncExitStack()
        try:
            proxy = loop.run(stack.enter_async_context(testing.serving(directory)))
            subject = RuntimeUnderTest(command, directory, proxy, options.timeout_s)
            stack.push_async_callback(subject.close)
            runtime = RuntimeSubject(subject, loop)
            return plugin.run_cases(runtime, CASES, "R", options, report.Report(quiet=quiet))
        finally:
            loop.run(stack.aclose())


class RuntimeSubject(plugin.Subject):
    """The tested runtime."""

    def __init__(self, subject: RuntimeUnderTest, loop: asyncio.Runner) -> None:
        self._subject = subject
        self._loop = loop
        self._last_case = ""

    def open(self) -> None:
        """Start the command. Raises `plugin.Gone`."""
        self._usable(self._subject.serve)

    def begin(
        self, case: Case, chosen: Collection[Case], remark: Callable[[str], None]
    ) -> Collection[str]:
        """Start the command again if an earlier case has ended it; returns the needs that the runtime lacks."""
        if ended := self._usable(self._subject.revive):
            remark(f"{ended} since case {self._last_case}, and was started again")
        self._last_case = case.number
        self._subject.transcript.clear()
        offered = self._subject.runtime.features
        has = {
            f"{'handler' if feature in offered else 'without'}.{feature.name}"
            for feature in volumes.HandlerFeature
        }
        if FANOTIFY in case.needs and file_opens.is_offered():
            has.add(FANOTIFY)
        return set(case.needs) - has - {KEEPER}

    @contextlib.contextmanager
    def using(self, case: Case, findings: list[Finding]) -> Iterator[RuntimeUnderTest]:
        """The runtime; the end removes the sandboxes and volumes of the case. Raises `plugin.Gone` if it cannot."""
        yield self._subject
        wrong = self._loop.run(self._subject.reset())
        findings += [Finding(case.clauses[0], f"clean-up: {text}", self.last()) for text in wrong]
        if self._subject.left:
            raise plugin.Gone(
                f"the clean-up of {case.number} has left a volume, which would fail every later case"
            )

    def call(self, case: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run the case, which is a coroutine."""
        self._loop.run(case())

    def last(self) -> Exchange:
        """The transcript of the running case."""
        return Exchange("\n".join(self._subject.transcript))

    def _usable(self, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        try:
            return self._loop.run(start())
        except RuntimeNotUsable as error:
            raise plugin.Gone(error.shown()) from None
