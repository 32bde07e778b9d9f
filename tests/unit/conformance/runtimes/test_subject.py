"""The processes of the runtime under test."""

import os
from typing import Any, cast

from crust.host.answers import NotSeen
from crust_conformance.runtimes.subject import RuntimeUnderTest
from tests.support.faults import lies


def test_process_that_is_not_seen_has_not_ended() -> None:
    subject, pid = RuntimeUnderTest("", "", cast("Any", None), 1.0), os.getpid()
    assert subject.may_answer(pid)
    assert not subject.may_answer(0)
    process = lies.Concerns(frozenset(), (f"/proc/{pid}",))
    for asked in lies.failures(lambda: subject.may_answer(pid), process, errnos_of=lies.all_errnos):
        assert isinstance(asked.error, NotSeen), str(asked.failure)
