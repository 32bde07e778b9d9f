"""A driver as a peer: its errors name the call that was sent to it."""

import tempfile

import grpc
import pytest

from crust.rpc.csi_driver import CsiDriver
from crust.rpc.port import SocketPort
from crust.rpc.status import PeerStatus
from tests.support.drivers import fake_driver
from tests.support.drivers.fake_driver import Failure, FakeDriver

# What a caller learns when the driver does not answer what it is asked first.


@pytest.mark.parametrize(
    ("details", "shown"),
    [
        ("Driver is missing version", "the driver was asked {}, and answered: {}"),
        ("[NotServedInMode] not here", "{1}"),
    ],
)
async def test_status_names_the_call_that_the_caller_did_not_send(details: str, shown: str) -> None:
    driver, failure = FakeDriver(), Failure(grpc.StatusCode.UNAVAILABLE, details)
    driver.failing = dict.fromkeys(("GetPluginInfo", "NodeGetCapabilities"), failure)
    with tempfile.TemporaryDirectory(prefix="crust-") as directory:
        socket = f"{directory}/csi.sock"
        async with fake_driver.serving(driver, socket), SocketPort(socket) as port:
            peer = CsiDriver(port)
            asked = {"GetPluginInfo": peer.name, "NodeGetCapabilities": peer.defers}
            for rpc, question in asked.items():
                with pytest.raises(PeerStatus) as caught:
                    await question()
                assert caught.value.code is grpc.StatusCode.UNAVAILABLE
                assert caught.value.text == shown.format(f"{rpc} first", details)
            await peer.aclose()
