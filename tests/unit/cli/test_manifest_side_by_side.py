"""Two drivers in one cluster: no object of one replaces one of the other, and a node has directories for each."""

import itertools
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from crust.cli.manifest import names
from crust.core.settings import loading
from crust.node.settings import NodeSettings
from tests.unit.cli.test_manifest import KUBERNETES, Objects, config, made, rendered, run
from tests.unit.cli.test_manifest_of_roles import text_of

OF_THE_NODE = {"/var/lib/kubelet", "/dev", "/sys/fs/cgroup", "/etc/machine-id"}
"""Of the kubelet and the kernel, where each driver has names of its own, and what is only read."""
LOCAL = (
    "block-driver",
    "distributed",
    "snapshots",
    "single-node",
    "wrapped-driver",
)
CEPH = ("ceph-node", "ceph-controller")
OTHER = "disks.example.com"


def all_of(*overlays: str) -> Objects:
    return {key: each for overlay in overlays for key, each in rendered(overlay).items()}


def of_other_name(tmp_path: Path) -> Objects:
    """A second driver of Ceph, for another namespace of the pool."""
    found: Objects = {}
    for overlay in CEPH:
        text = (
            text_of(overlay).replace("rbd.csi.crust.dev", OTHER).replace("crust-rbd", "crust-disks")
        )
        found |= made(config(tmp_path, text))
    return found


def workloads(found: Objects) -> list[dict[str, Any]]:
    return [each for (kind, _), each in found.items() if kind in ("DaemonSet", "Deployment")]


def host_paths(found: Objects) -> set[str]:
    volumes = [v for each in workloads(found) for v in each["spec"]["template"]["spec"]["volumes"]]
    return {each["hostPath"]["path"] for each in volumes if "hostPath" in each} - OF_THE_NODE


def sockets(found: Objects) -> set[str]:
    """Of the node's process: what the kubelet calls, what runtimes call, and the directories of its locks."""
    (text,) = (
        each["data"]["node.toml"] for each in found.values() if "node.toml" in each.get("data", {})
    )
    its = loading.load(NodeSettings, "node", toml=text, environ={}, flags={})
    parts = {its.proxy.run_dir, its.proxy.volumes_root, its.runtime_socket, *its.inner_sockets}
    return (
        parts
        | {each.socket for each in its.proxy.drivers}
        | {each.name for each in its.proxy.drivers}
    )


def assert_apart(one: Objects, two: Objects) -> None:
    assert set(one) & set(two) == {("Namespace", "crust-system")}
    labels = [
        {str(each["spec"]["selector"]["matchLabels"]) for each in workloads(found)}
        for found in (one, two)
    ]
    assert labels[0] & labels[1] == set()
    assert not any(
        each["spec"]["template"]["spec"].get("hostNetwork") for each in workloads({**one, **two})
    )
    assert [
        (a, b)
        for a, b in itertools.product(host_paths(one), host_paths(two))
        if f"{a}/".startswith(f"{b}/") or f"{b}/".startswith(f"{a}/")
    ] == []


@pytest.mark.parametrize("overlay", LOCAL)
def test_overlays_of_local_and_ceph_volumes_can_be_in_one_cluster(overlay: str) -> None:
    local, ceph = all_of(overlay), all_of(*CEPH)
    assert_apart(local, ceph)
    assert sockets(local) & sockets(ceph) == set()


def test_manifests_of_two_drivers_can_be_in_one_cluster(tmp_path: Path) -> None:
    local = made()
    ceph: Objects = {}
    for overlay in CEPH:
        ceph |= made(config(tmp_path, text_of(overlay)))
    assert_apart(local, ceph)
    assert sockets(local) & sockets(ceph) == set()
    third = of_other_name(tmp_path)
    for each in (local, ceph):
        assert_apart(each, third)
        assert sockets(each) & sockets(third) == set()
    secrets = [str(found).count("crust-rbd-node") for found in (ceph, third)]
    assert secrets[0] > 0
    assert secrets[1] == 0, "each driver's class names a Secret of its own"


def test_objects_of_another_driver_refer_to_each_other(tmp_path: Path) -> None:
    found = of_other_name(tmp_path)
    accounts = {name for kind, name in found if kind == "ServiceAccount"}
    assert accounts == {"crust-disks-example-com-node", "crust-disks-example-com-controller"}
    used = {each["spec"]["template"]["spec"]["serviceAccountName"] for each in workloads(found)}
    assert used == accounts
    bindings = {key: each for key, each in found.items() if key[0].endswith("RoleBinding")}
    assert bindings
    for (kind, _), each in bindings.items():
        assert (kind.removesuffix("Binding"), each["roleRef"]["name"]) in found
        assert {subject["name"] for subject in each["subjects"]} <= accounts
    for each in workloads(found):
        volumes = each["spec"]["template"]["spec"]["volumes"]
        (settings,) = (volume["configMap"]["name"] for volume in volumes if "configMap" in volume)
        assert ("ConfigMap", settings) in found
        labels = each["spec"]["template"]["metadata"]["labels"]
        assert each["spec"]["selector"]["matchLabels"].items() <= labels.items()


@pytest.mark.parametrize(
    ("driver", "stem"),
    [
        ("block.csi.crust.dev", "crust"),
        ("rbd.csi.crust.dev", "crust-rbd"),
        ("disks.example.com", "crust-disks-example-com"),
        ("my-disks.example.com", "crust-my--disks-example-com"),
        ("a", "crust-a"),
    ],
)
def test_stem_follows_from_the_drivers_name(driver: str, stem: str) -> None:
    assert names.stem(driver) == stem


def test_no_two_names_have_one_stem() -> None:
    """All names of up to six characters of those that matter."""
    found: dict[str, str] = {}
    for length in range(1, 7):
        for letters in itertools.product("a-.", repeat=length):
            name = "".join(letters)
            try:
                stem = names.stem(name)
            except loading.InvalidSettings:
                continue
            assert found.setdefault(stem, name) == name
    assert len(found) > 50


def kinds(found: Objects) -> set[tuple[str, str]]:
    """Without the ConfigMap, whose name follows from the settings."""
    return {key for key in found if key[0] != "ConfigMap"}


def of_one_node() -> str:
    """Settings of a node with both drivers, as docs/multi-node.md has them."""
    local, ceph = (KUBERNETES / "overlays/distributed/node.toml").read_text(), text_of("ceph-node")
    tables = ceph[ceph.index("[driver]") :].replace(
        "[driver]\n", '[driver]\nrun_dir = "/run/crust/d"\n'
    )
    return (local + tables).replace("[driver]\n", "[[driver]]\n")


@pytest.mark.parametrize("first", ["local", "ceph"])
def test_two_drivers_of_a_node_have_one_daemon_set_and_an_object_each(
    tmp_path: Path, first: str
) -> None:
    text = of_one_node()
    if first == "ceph":
        head, one, two = text.split("[[driver]]")
        text = f"{head}[[driver]]{two}\n[[driver]]{one}"
    found = made(config(tmp_path, text))
    alone = rendered("block-driver")
    assert kinds(found) == {*kinds(alone), ("CSIDriver", "rbd.csi.crust.dev")}
    assert (
        found["CSIDriver", "rbd.csi.crust.dev"]
        == rendered("ceph-node")["CSIDriver", "rbd.csi.crust.dev"]
    )
    assert found["CSIDriver", "block.csi.crust.dev"] == alone["CSIDriver", "block.csi.crust.dev"]
    of_pod, of_ceph = (
        next(each for each in workloads(all_)) for all_ in (found, rendered("ceph-node"))
    )
    volumes = {each["name"]: each for each in of_pod["spec"]["template"]["spec"]["volumes"]}
    for each in of_ceph["spec"]["template"]["spec"]["volumes"]:
        assert each["name"] in volumes
    assert volumes["run"]["hostPath"]["path"] == "/run/crust"
    assert {"pool", "machine-id"} <= set(volumes)
    for each in found.values():
        kubernetes_validate.validate(each, "1.34", strict=True)


def test_path_of_a_further_driver_that_a_pod_would_lose_is_refused(tmp_path: Path) -> None:
    refused = run(
        tmp_path / "made", config(tmp_path, of_one_node().replace("/run/crust/d", "/srv/rbd"))
    )
    assert refused.exit_code == 2
    assert "/srv/rbd would be the container's own" in refused.output
