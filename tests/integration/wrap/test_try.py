"""`crust try` of a wrapped driver whose volumes have a kind, which the controller's shim chooses."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from crust.cli import trial
from crust.csi_shim import shim_process
from crust.csi_shim.settings import ShimSettings
from crust.inspection import daemon_calls
from crust.rpc.port import SocketPort
from tests.integration.wrap.conftest import DEFERRED, Wrapped

pytestmark = pytest.mark.root


@pytest.fixture
async def sidecars(stateful: Wrapped) -> AsyncIterator[str]:
    """The socket that the CSI sidecars call."""
    settings = ShimSettings(
        socket=f"{stateful.places.root}/controller.sock",
        driver_socket=stateful.driver.socket,
        controller=True,
        check_detach=False,
    )
    async with shim_process.serving(settings):
        yield settings.socket


def _request(node: Wrapped, controller_socket: str) -> trial.TrialRequest:
    return trial.TrialRequest(
        driver=node.driver_name,
        handler="kata",
        size_bytes=64 << 20,
        fs_type="ext4",
        target_root=node.places.kubelet,
        parameters=DEFERRED,
        wait_s=0,
        controller_socket=controller_socket,
    )


def _check_nothing_left(node: Wrapped) -> None:
    assert node.driver.images() == []
    assert list(Path(node.places.kubelet).rglob("crust-try*")) == []


async def test_try_creates_the_volume_at_the_controllers_shim(
    stateful: Wrapped, sidecars: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await trial.try_publish(stateful.places.run, _request(stateful, sidecars)) == 0
    assert "published /dev/loop" in capsys.readouterr().out
    (create,) = stateful.driver.calls("CreateVolume")
    assert create.volume_capabilities[0].WhichOneof("access_type") == "block"
    assert not create.parameters, "the driver sees no key of crust"
    _check_nothing_left(stateful)


async def test_try_past_the_controllers_shim_shows_the_drivers_refusal(
    stateful: Wrapped, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await trial.try_publish(stateful.places.run, _request(stateful, "")) == 1
    assert "cannot publish a mount volume as block volume" in capsys.readouterr().err
    _check_nothing_left(stateful)


async def test_killed_try_is_undone_at_the_controllers_shim(
    stateful: Wrapped, sidecars: str
) -> None:
    async with (
        daemon_calls.inspecting(stateful.places.run) as inspect,
        SocketPort(sidecars) as controller,
    ):
        killed = trial.Trial(_request(stateful, sidecars), inspect, controller, controller)
        await asyncio.to_thread(killed.note_down)
        assert await trial.undo(Path(killed.note), inspect) == ()
    (create,) = stateful.driver.calls("CreateVolume")
    assert create.volume_capabilities[0].WhichOneof("access_type") == "block"
    _check_nothing_left(stateful)
