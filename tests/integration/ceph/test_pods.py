"""The pods of the chart for a Ceph pool, from its values to a guest that has an image of a real cluster."""

import re
from functools import partial

import pytest

from examples.cluster.ceph_cluster import POOL, CephCluster
from tests.support import capabilities, chart, containers
from tests.support.ceph.rbd_node import created
from tests.support.co import MIB, capability
from tests.support.forms import pod
from tests.support.forms.form import Volume
from tests.support.forms.pod import CephPods

pytestmark = [pytest.mark.vm, pytest.mark.timeout(600)]


def values(ceph: CephCluster, namespace: str, user: str) -> str:
    """The choice of the chart, for a cluster without the Kubernetes API."""
    text = chart.choice("ceph").replace("fenceLostNodes: true", "fenceLostNodes: false")
    given = {"monitors": f'"{ceph.monitors}"', "pool": POOL, "namespace": namespace, "user": user}
    for name, value in given.items():
        text, count = re.subn(rf"(?m)^    {name}: .*$", f"    {name}: {value}", text)
        assert count == 1, name
    return text


async def test_pods_for_ceph_publish_an_image_to_a_guest(ceph: CephCluster, namespace: str) -> None:
    capabilities.need("containerd")
    user, guest = f"controller-{namespace}", f"guest-{namespace}"
    given = values(ceph, namespace, user)
    secrets = {"userID": guest, "userKey": ceph.node(guest, namespace)}
    pods = partial(CephPods, key=ceph.controller(user, namespace))
    with containers.containerd() as containerd, pod.serving(containerd, given, pods) as node:
        async with node.controller() as controller, node.called(node.driver) as co, node.handler():
            made = await created(controller, "v", capability())
            volume = Volume(co, made, capability(), node.driver, secrets)
            await volume.stage()
            await volume.publish()
            with node.guest():
                assert node.is_mounted()  # the guard mount
                snapshot = (await controller.snapshot(volume.id)).snapshot_id
            await volume.unpublish()
            await volume.unstage()
            copy = (await created(controller, "copy", capability(), snapshot=snapshot)).volume_id
            await controller.grow(copy, 400 * MIB)
            await controller.delete_snapshot(snapshot)
            for each in (copy, volume.id):
                await controller.delete(each)
            assert await controller.volumes() == {}
