"""The limits of I/O after a start."""

from pathlib import Path

import pytest

from crust.core import volumes
from crust.host.mounts import mountinfo
from tests.support.drivers import driver_state
from tests.support.drivers.memory_backend import MemoryBackend
from tests.support.nodes.fake_throttle import FakeThrottle


async def test_recover_reads_the_mounts_once_for_all_volumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = MemoryBackend()
    state = driver_state.opened(tmp_path, backend=backend, throttle=FakeThrottle())
    for name in ("a", "b", "c"):
        wanted = driver_state.create(name, sent={"readIOPS": "100"})
        made = await state.controller.provisioner.create(wanted)
        backend.attach(volumes.VolumeId(made.volume_id))
    real, reads = mountinfo.read_all, []

    def counted() -> tuple[mountinfo.Mount, ...]:
        reads.append("read")
        return real()

    monkeypatch.setattr(mountinfo, "read_all", counted)
    state.node.io_limits.recover()
    assert reads == ["read"]
