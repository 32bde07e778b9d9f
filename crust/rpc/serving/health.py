"""The health of this process: its problems are logged, listed by `crust status`, and returned to a Probe.

A part of the process reports a problem under its own name, and reports again when the problem has ended. A change is
logged, a repeated report is not.
"""

import logging
from collections.abc import Mapping

from crust.core import errors

_log = logging.getLogger(__name__)


class Health:
    """The problems of this process, by part."""

    def __init__(self) -> None:
        self._problems: dict[str, errors.CrustError] = {}
        self._fatal: set[str] = set()

    @property
    def problems(self) -> Mapping[str, errors.CrustError]:
        """The current problems; empty if the process is healthy."""
        return self._problems

    def report(
        self, part: str, problem: errors.CrustError | None, *, is_fatal: bool = True
    ) -> None:
        """What is wrong with `part` from now on; None: nothing. What is not fatal is shown, and fails no probe."""
        before = self._problems.pop(part, None)
        self._fatal.discard(part)
        if problem is None:
            if before is not None:
                _log.info("healthy again", extra={"part": part})
            return
        self._problems[part] = problem
        if is_fatal:
            self._fatal.add(part)
        if before is None or str(before) != str(problem):
            fields = {"part": part, "error": str(problem), "error_name": problem.error_name}
            _log.error("unhealthy", extra=fields)

    def check_healthy(self) -> None:
        """Raise the first fatal problem, if there is one."""
        for part, problem in self._problems.items():
            if part in self._fatal:
                raise problem
