"""csi-sanity, unmodified: crust's own driver passes it, and a wrapped driver gets from it what it gets alone."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from examples.drivers import cloud
from tests.support import capabilities
from tests.support.drivers import own_driver, vendor_driver
from tests.support.drivers.wrapping_processes import wrapping
from tests.support.third_party import csi_sanity

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]

CASES = 95
"""How many cases the pinned version has."""
SIZE = f"--csi.testvolumesize={64 << 20}"


@pytest.fixture(autouse=True)
def _is_built() -> None:
    capabilities.need("csi-sanity")


@pytest.mark.parametrize("way", ["alone", "behind-proxy"])
def test_own_driver_passes_every_case(base: Path, way: own_driver.Way) -> None:
    with own_driver.serving(base, "1.12", way) as driver:
        mutable = base / "mutable.yaml"
        mutable.write_text('writeIOPS: "0"\n')  # no limit, which every host keeps
        outcome = csi_sanity.run(
            str(driver.socket), driver.target_root,
            f"--csi.testvolumemutableparameters={mutable}", "--csi.testnodevolumeattachlimit", SIZE,
        )  # fmt: skip
    assert (outcome.failed, outcome.skipped) == ({}, frozenset())
    assert len(outcome.passed) == CASES


@pytest.mark.parametrize("kind", ["cloud", "minimal", "stateful"])
def test_wrapped_driver_gets_what_it_gets_alone(base: Path, kind: str) -> None:
    alone, wrapped = (_outcome(base / way, kind, way) for way in ("alone", "wrapped"))
    assert wrapped.passed == alone.passed
    assert wrapped.failed.keys() == alone.failed.keys()
    assert wrapped.skipped == alone.skipped
    assert len(alone.passed) > 20
    assert len(alone.passed) + len(alone.failed) + len(alone.skipped) == CASES


_WITH_SECRETS = (
    "CreateVolume", "DeleteVolume", "ControllerPublishVolume", "ControllerUnpublishVolume",
    "ControllerValidateVolumeCapabilities", "NodeStageVolume", "NodePublishVolume",
    "CreateSnapshot", "DeleteSnapshot", "ControllerExpandVolume", "ListSnapshots",
)  # fmt: skip


def _outcome(base: Path, kind: str, way: str) -> csi_sanity.Outcome:
    root = base / "kubelet"
    root.mkdir(parents=True)
    secrets = base / "secrets.yaml"
    secrets.write_text(
        "".join(f"{each}Secret:\n  token: {cloud.TOKEN}\n" for each in _WITH_SECRETS)
    )
    with ExitStack() as stack:
        driver = stack.enter_context(vendor_driver.running(kind, str(base)))
        socket = driver.socket
        if way != "alone":
            socket = stack.enter_context(wrapping(base, kind, driver.socket, as_node=False))
        return csi_sanity.run(socket, root, f"--csi.secrets={secrets}", SIZE)
