"""The deferred volume of a mount source, where the kernel does not show which target a guard mount is on."""

import os
from pathlib import Path

import pytest

from crust.handoff.store import Store
from crust.host import answers
from crust.host.mounts import mount_api, mountinfo
from crust.runtime_handler.blocking import resolve
from tests.support.faults import lies
from tests.support.records.records import a_record


def test_target_that_is_not_seen_has_perhaps_the_guard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, source = tmp_path / "target", tmp_path / "bind"
    target.mkdir()
    store = Store(f"{tmp_path}/volumes")
    store.open()
    store.write(a_record(str(target)))
    device = os.stat(target).st_dev
    line = f"1 0 {os.major(device)}:{os.minor(device)} / {source} rw - tmpfs crust-deferred rw"
    (guard,) = mountinfo.parse(line.encode())
    assert mount_api.is_guard(guard)
    monkeypatch.setattr(mountinfo, "holding", lambda _: guard)
    resolved = resolve.resolve_source(store.root, str(source))
    assert isinstance(resolved, resolve.Resolved)
    assert resolved.record.target.text == str(target)
    concerns = lies.Concerns(frozenset({str(target)}), ())
    for number in lies.ERRNOS:
        failure = lies.Failure(0, number)
        with lies.failing(concerns, failure), pytest.raises(answers.NotSeen, match="the target"):
            resolve.resolve_source(store.root, str(source))
