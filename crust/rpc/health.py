"""What is wrong with this process as a whole: told in its log, by `crust status`, and to whoever probes it.

A part reports itself under its name, and reports again when it is well. A change is logged, a repetition is not.
"""

import logging
from collections.abc import Mapping

from crust import errors

_log = logging.getLogger(__name__)


class Health:
    """The process's conditions, by the part that has them."""

    def __init__(self) -> None:
        self._problems: dict[str, errors.CrustError] = {}

    @property
    def problems(self) -> Mapping[str, errors.CrustError]:
        """What is wrong now; empty when nothing is."""
        return self._problems

    def report(self, part: str, problem: errors.CrustError | None) -> None:
        """What is wrong with `part` from now on; None: nothing."""
        before = self._problems.pop(part, None)
        if problem is None:
            if before is not None:
                _log.info("healthy again", extra={"part": part})
            return
        self._problems[part] = problem
        if before is None or str(before) != str(problem):
            told = {"part": part, "error": str(problem), "error_name": problem.error_name}
            _log.error("unhealthy", extra=told)

    def check(self) -> None:
        """Raise the first of the problems, if there is one."""
        for problem in self._problems.values():
            raise problem
