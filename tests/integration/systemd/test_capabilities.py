"""Each capability that a unit leaves its daemon is one that it needs: an entry runs with it, and fails without it.

A drop-in takes one capability away. `make forms` tries each, other runs one of them.
"""

import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import pytest

from crust.host.mounts import growth
from tests.integration.systemd import test_units
from tests.support.forms import node_list, of_capabilities, of_volumes
from tests.support.forms.form import VENDORS_SOCKET
from tests.support.forms.units import Units
from tests.unit.deploy.test_units import NAMES, of

pytestmark = pytest.mark.root

machine, form = test_units.machine, test_units.form
SHIM = test_units.SHIM
OWN_SHIM, OWN_DRIVER = "/run/crust/shim/csi.sock", "/run/crust/driver/csi.sock"


@dataclass(frozen=True, slots=True)
class Need:
    """What a unit does by a capability, and a word of the failure without it."""

    entry: Callable[[Any], Awaitable[None]]
    failure: str


BESIDE = of_capabilities.beside_another_user
FS_GROUP = Need(of_volumes.group_of_pod, "EPERM")
OF_DRIVER = {
    "CAP_CHOWN": FS_GROUP,
    "CAP_DAC_OVERRIDE": Need(of_capabilities.private_directory, "EACCES"),
    "CAP_FOWNER": FS_GROUP,
    "CAP_FSETID": Need(of_volumes.group_of_pod, f"1000:{of_volumes.GROUP} "),
    "CAP_MKNOD": Need(of_capabilities.device_without_a_node, "EPERM"),
    "CAP_SYS_ADMIN": Need(node_list.deferred_publish_and_unpublish, "DeniedByKernel"),
    "CAP_SYS_PTRACE": Need(BESIDE, "cannot see the open f"),
    "CAP_SYS_RESOURCE": Need(of_capabilities.mounted_ext4_grows, "CAP_SYS_RESOURCE"),
}
OF_PROXY = {
    "CAP_DAC_OVERRIDE": Need(BESIDE, "cannot see the open f"),
    "CAP_LINUX_IMMUTABLE": Need(
        node_list.deferred_publish_and_unpublish, "it needs CAP_LINUX_IMMUTABLE"
    ),
    "CAP_SYS_ADMIN": Need(node_list.deferred_publish_and_unpublish, "DeniedByKernel"),
    "CAP_SYS_PTRACE": Need(BESIDE, "cannot see the open f"),
}
OF_KATA = {
    "CAP_DAC_OVERRIDE": Need(BESIDE, "cannot see the open f"),
    "CAP_KILL": Need(of_capabilities.container_of_another_user, "EPERM"),
    "CAP_SYS_PTRACE": Need(BESIDE, "it needs CAP_SYS_PTRACE"),
    "CAP_SYS_RESOURCE": Need(of_capabilities.keeper_without_memory, "oom_score_adj"),
}


def _of_shim(unit: str, socket: str, drivers_socket: str) -> dict[str, Need]:
    entry = partial(
        of_capabilities.driver_of_another_user,
        shim=unit,
        socket=socket,
        drivers_socket=drivers_socket,
    )
    return {"CAP_DAC_OVERRIDE": Need(entry, "may not connect to it")}


NEEDS: dict[str, tuple[str, str, dict[str, Need]]] = {
    "node": ("one", "crust-node", {**OF_PROXY, **OF_DRIVER}),
    "driver": ("three", "crust-driver", OF_DRIVER),
    "proxy": ("three", "crust-proxy", OF_PROXY),
    "shim": ("three", "crust-shim", _of_shim("crust-shim", OWN_SHIM, OWN_DRIVER)),
    "shim@": ("three", "crust-shim@vendor", _of_shim("crust-shim@vendor", SHIM, VENDORS_SOCKET)),
    "kata": ("kata", "crust-kata", OF_KATA),
}
"""By the unit's file: a form, the unit in it, and its capabilities."""
CHOSEN = [
    pytest.param(form, name, capability, id=f"{name}-{capability}")
    for name, (form, _, needs) in NEEDS.items()
    for number, capability in enumerate(needs)
    if (name, number) == ("node", 0) or os.environ.get("TESTS_FORMS") == "all"
]


@pytest.mark.parametrize("name", NAMES)
def test_each_capability_of_a_unit_is_tried(name: str) -> None:
    assert set(NEEDS[name][2]) == set(of(name, "CapabilityBoundingSet").split())


@contextmanager
def without(form: Units, unit: str, capability: str) -> Iterator[None]:
    """The unit without a capability serves during the block."""
    directory = f"/run/systemd/system/{unit}.service.d"
    line = f"[Service]\\nCapabilityBoundingSet=~{capability}\\n"
    write = f"mkdir -p {directory}; printf '{line}' >{directory}/less.conf; systemctl daemon-reload"
    form.output("sh", "-ec", f"{write}; systemctl restart {unit}")
    try:
        yield
    finally:
        form.output("sh", "-ec", f"rm -r {directory}; systemctl daemon-reload")
        form.output("systemctl", "restart", unit)


@pytest.mark.parametrize(("form", "name", "capability"), CHOSEN, indirect=["form"], scope="module")
async def test_unit_needs_each_of_its_capabilities(form: Units, name: str, capability: str) -> None:
    _, unit, needs = NEEDS[name]
    need = needs[capability]
    async with form.cleaned():
        if capability != "CAP_SYS_RESOURCE" or growth.has_cap_sys_resource():
            await need.entry(form)
        with (
            without(form, unit, capability),
            pytest.raises((grpc.aio.AioRpcError, AssertionError)) as failed,
        ):
            await need.entry(form)
    assert need.failure in str(failed.value)
