"""A process that cannot be looked at is not seen, and so is neither the sandbox's machine nor another's."""

import os

import pytest

from crust.host import answers
from crust.kata import evidence
from tests.support.raised import raised
from tests.support.waiting_processes import no_free_descriptor, waiting


def test_machine_that_is_not_seen_is_not_somebody_elses() -> None:
    sandbox_id = f"sandbox-{os.getpid()}"
    with waiting("pass", sandbox_id) as machine:
        evidence.check_machine(sandbox_id, machine, 0)
        with no_free_descriptor(), pytest.raises(answers.NotSeen, match="EMFILE"):
            evidence.check_machine(sandbox_id, machine, 0)
        with raised("VmUnknown", match="is not the sandbox's"):
            evidence.check_machine("sandbox-of-another", machine, 0)
    with raised("VmUnknown"):
        evidence.check_machine(sandbox_id, machine, 0)
