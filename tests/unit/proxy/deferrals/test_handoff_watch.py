"""The watch of the handoff directory: it reports claims, and survives a scan that fails."""

import asyncio
import threading
from pathlib import Path

import pytest

from crust import errors
from crust.handoff import look, store
from crust.proxy.deferrals import handoff_watch
from crust.proxy.deferrals.deferred import DeferredVolumes
from crust.proxy.deferrals.events import Events
from crust.rpc.serving.health import Health
from tests.support.nodes.fake_targets import FakeDevices
from tests.support.records import records
from tests.support.runtimes import fake_handler


class FailingLooks(look.Looks):
    """A directory that cannot be read the first time."""

    failed = threading.Event()

    def look(self) -> look.Look:
        if not self.failed.is_set():
            self.failed.set()
            raise errors.Exhausted("no file can be opened")
        return super().look()


async def test_failed_scan_is_logged_and_the_next_one_finds_everything(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FailingLooks, "failed", threading.Event())
    monkeypatch.setattr("crust.proxy.deferrals.deferred.Looks", FailingLooks)
    directory = store.Store(str(tmp_path / "volumes"))
    directory.open()
    directory.publish(records.a_record())
    events = Events()
    async with (
        events.watch() as watch,
        handoff_watch.watch_handoff(
            directory, DeferredVolumes(directory, FakeDevices()), events, Health()
        ),
    ):
        heard = watch(asyncio.Event())
        assert await asyncio.to_thread(FailingLooks.failed.wait, 20)
        with fake_handler.sandbox(directory.root, records.TARGET.text, name="box-7"):
            async with asyncio.timeout(60):
                event = await anext(heard)
    assert (event.kind, event.message) == ("claimed", "sandbox box-7")
    assert "background work failed" in caplog.text
