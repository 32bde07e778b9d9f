"""The runtime's view of the handoff directory."""

import datetime
import os
from pathlib import Path
from typing import Any

from crust.handoff import claims
from crust.handoff.store import Store
from crust.runtime_handler.blocking import Process, process_of
from examples.kata.runtime.handoff import Directory
from tests.support.records.records import HANDLER, TARGET, a_record


def test_claims_of_machine_are_found_live_dead_and_aside(tmp_path: Path) -> None:
    store, machine = Store(f"{tmp_path}/volumes"), process_of(os.getpid())
    store.open()
    record, paths = a_record(), store.layout.entry(TARGET)
    unused: Any = None
    directory = Directory(store.root, HANDLER, unused, unused)
    store.write(record)
    assert directory.claimed_for(machine) == ()
    now = datetime.datetime.now(datetime.UTC)
    claim = claims.Claim(
        "one", HANDLER, claims.State.CLAIMED, "", 1, now, live=True, process=machine
    )
    with claims.ClaimLock.acquire(paths, TARGET) as lock:
        claims.write(paths, claim)
        assert directory.claimed_for(machine) == (record,)
        lock.close()
    assert directory.claimed_for(machine) == (record,)
    assert directory.claimed_for(Process(machine.pid, machine.started + 1)) == ()
    with claims.ClaimLock.acquire(paths, TARGET):  # an unpublish looks at it
        assert directory.claimed_for(machine) == (record,)
