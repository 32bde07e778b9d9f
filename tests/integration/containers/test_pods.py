"""The pods of the chart, and those of docs/wrapping.md, do what the list of a node names."""

import functools
from collections.abc import Callable, Iterator

import pytest

from crust.core.settings import OWN_DRIVER
from examples.cluster.ceph_cluster import CephCluster
from examples.drivers import minimal
from tests.support import capabilities, chart
from tests.support.containers import Containerd
from tests.support.forms import node_list, pod
from tests.support.forms.form import VENDORS_SOCKET
from tests.support.forms.pod import CephPods, Pod, VendorsPods, WrappingPod

pytestmark = pytest.mark.root

VENDOR = f"\nwrapped: [{{name: {minimal.NAME}, driverSocket: {VENDORS_SOCKET}}}]\n"
FORMS: dict[str, tuple[str, type[Pod]]] = {
    "local": (chart.choice("local") + VENDOR, Pod),
    "single-node": (chart.choice("single-node") + VENDOR, Pod),
    "wrapped": (f"local: {{enabled: false}}{VENDOR}", WrappingPod),
    "unprivileged-shim": ("", VendorsPods),
    "ceph": ("", CephPods),
}
"""The values of those for Ceph name the cluster of the run."""
WHOLE = {
    OWN_DRIVER: node_list.WHOLE,
    minimal.NAME: node_list.OF_ANY_DRIVER,
    CephPods.driver: node_list.OF_CEPH,
}
ENTRIES = [
    pytest.param(form, functools.partial(entry), id=f"{form}-{node_list.name(entry)}")
    for form, (_, kind) in FORMS.items()
    for entry in node_list.chosen(WHOLE[kind.driver])
]
"""Each has an entry of its own, else pytest would put equal entries of several forms side by side, and start each
form again for each.
"""


@pytest.fixture(scope="module")
def form(request: pytest.FixtureRequest, containerd: Containerd) -> Iterator[Pod]:
    """A node with the pod of a choice of the chart, for the vendor's driver too."""
    values, kind = FORMS[request.param]
    make: Callable[..., Pod] = kind
    if kind is CephPods:
        capabilities.need("vm")
        ceph: CephCluster = request.getfixturevalue("ceph")
        namespace = ceph.make_namespace()
        values, make = (
            pod.of_ceph(ceph, namespace),
            functools.partial(kind, ceph=ceph, namespace=namespace),
        )
    with pod.serving(containerd, values, make) as served:
        yield served


@pytest.mark.parametrize(("form", "entry"), ENTRIES, indirect=["form"], scope="module")
async def test_pods_do_what_a_node_must(form: Pod, entry: node_list.Entry) -> None:
    async with form.cleaned():
        await entry(form)
