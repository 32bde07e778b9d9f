"""`crust driver manifest` for Ceph, where controller and nodes are apart, and for two drivers in one cluster."""

import itertools
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from crust.core.settings import loading
from crust.node.settings import NodeSettings
from tests.support.manifests import (
    KUBERNETES,
    POD,
    WRAPPED,
    Objects,
    config,
    made,
    rendered,
    run,
)

SETTINGS = {"ceph-node": "node.toml", "ceph-controller": "controller.toml"}
OWN, CEPH = "block.csi.crust.dev", "rbd.csi.crust.dev"


def text_of(overlay: str) -> str:
    return (KUBERNETES / "overlays" / overlay / SETTINGS[overlay]).read_text(encoding="utf-8")


def workloads(manifests: Objects) -> list[dict[str, Any]]:
    return [
        manifest for (kind, _), manifest in manifests.items() if kind in ("DaemonSet", "Deployment")
    ]


def pod_of(manifests: Objects) -> dict[str, Any]:
    (workload,) = workloads(manifests)
    pod: dict[str, Any] = workload["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize("overlay", SETTINGS)
def test_manifest_has_the_objects_that_kubectl_renders(tmp_path: Path, overlay: str) -> None:
    assert made(config(tmp_path, text_of(overlay))) == rendered(overlay)


def test_controller_of_ceph_pool_has_its_sidecars_secrets_and_rights(tmp_path: Path) -> None:
    """No attacher, and no capacity; what the fencing asks of the cluster."""
    manifests = made(config(tmp_path, text_of("ceph-controller")), "--namespace=store")
    sidecars = {container["name"]: container for container in pod_of(manifests)["containers"]}
    assert set(sidecars) == {"crust", "csi-provisioner", "csi-resizer", "csi-snapshotter"}
    assert "--enable-capacity" not in sidecars["csi-provisioner"]["args"]
    parameters = manifests["StorageClass", "crust-rbd"]["parameters"]
    for step in ("stage", "publish", "expand"):
        prefix = f"csi.storage.k8s.io/node-{step}-secret"
        assert parameters[f"{prefix}-name"] == "crust-rbd-node"
        assert parameters[f"{prefix}-namespace"] == "store"
    assert "[kubernetes]" in text_of("ceph-controller")
    roles = [manifest for key, manifest in manifests.items() if key[0] == "ClusterRole"]
    allowed = {
        resource
        for role in roles
        for rule in role["rules"]
        for resource in rule["resources"]
        if "list" in rule["verbs"]
    }
    assert {"nodes", "csinodes"} <= allowed


def test_nodes_of_ceph_pool_need_no_attach_key_or_pool(tmp_path: Path) -> None:
    manifests = made(config(tmp_path, text_of("ceph-node")))
    spec = manifests["CSIDriver", CEPH]["spec"]
    assert spec["attachRequired"] is False
    assert spec.get("storageCapacity", False) is False
    assert spec["podInfoOnMount"] is True
    assert spec["volumeLifecycleModes"] == ["Persistent"]
    pod = pod_of(manifests)
    kinds = {key for volume in pod["volumes"] for key in volume} - {"name"}
    assert kinds == {"configMap", "hostPath", "emptyDir"}
    assert "key_file" not in text_of("ceph-node")
    assert "/var/lib/crust" not in str(pod)


@pytest.mark.parametrize("overlay", [*SETTINGS, "block-driver"])
def test_name_of_the_driver_is_in_every_object_and_path(tmp_path: Path, overlay: str) -> None:
    if overlay == "block-driver":
        text = POD + "[driver]\n"
    else:
        text = text_of(overlay).replace('driver_name = "rbd.csi.crust.dev"\n', "")
    first = "[driver]\n" if "[driver]" in text else "mode ="
    name = 'driver_name = "disks.example.com"\n'
    text = text.replace(first, first + name if first == "[driver]\n" else name + first, 1)
    manifests = made(config(tmp_path, text))
    others = {key: manifest for key, manifest in manifests.items() if key[0] != "ConfigMap"}
    assert not any(name in str(others) for name in (OWN, CEPH))
    assert "disks.example.com" in str(others)


@pytest.mark.parametrize(
    ("overlay", "before", "after", "words"),
    [
        ("ceph-controller", "/csi/crust/csi.sock", "/run/crust/csi.sock", "the sidecars call"),
        ("ceph-controller", "0.0.0.0:9810", "127.0.0.1:9810", "metrics_address"),
        ("ceph-controller", 'mode = "controller"', 'mode = "controller"\nrun_dir = "/srv"', "/srv"),
        ("ceph-controller", "/etc/crust-ceph/key", "/root/key", "/root/key"),
        (
            "ceph-node",
            'namespace = "crust"',
            'user = "crust-node"\nkey_file = "/etc/crust-ceph/userKey"',
            "a node keeps no key",
        ),
        (
            "ceph-node",
            "/run/crust-rbd/volumes",
            "/run/crust/volumes",
            "/run/crust/volumes would be",
        ),
    ],
)
def test_settings_that_fail_in_a_pod_are_refused(
    tmp_path: Path, overlay: str, before: str, after: str, words: str
) -> None:
    text = text_of(overlay)
    assert before in text
    result = run(tmp_path / "made", config(tmp_path, text.replace(before, after)))
    assert result.exit_code == 2
    assert words in result.stderr
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("text", "flags", "words"),
    [
        (
            text_of("ceph-node").replace('mode = "node"', 'mode = "all"')
            + 'user = "u"\nkey_file = "/run/crust-rbd/key"\n',
            (),
            "each node would be a controller",
        ),
        (POD + '[driver]\nmode = "node"\n', (), "on many nodes set node_deployment"),
        (text_of("ceph-node"), ("--snapshots",), "beside the controller"),
        (WRAPPED, ("--snapshots",), "its own manifests"),
    ],
)
def test_roles_that_fit_no_cluster_are_refused(
    tmp_path: Path, text: str, flags: tuple[str, ...], words: str
) -> None:
    result = run(tmp_path / "made", config(tmp_path, text), *flags)
    assert (result.exit_code, words in result.stderr) == (2, True), result.stderr


OF_THE_NODE = {"/var/lib/kubelet", "/dev", "/sys/fs/cgroup", "/etc/machine-id"}
"""Of the kubelet and the kernel, where each driver has names of its own, and what is only read."""

LOCAL = ("block-driver", "distributed", "snapshots", "single-node", "wrapped-driver")
OTHER = "disks.example.com"


def all_of(*overlays: str) -> Objects:
    return {key: manifest for overlay in overlays for key, manifest in rendered(overlay).items()}


def of_other_name(tmp_path: Path) -> Objects:
    """A second driver of Ceph, for another namespace of the pool."""
    manifests: Objects = {}
    for overlay in SETTINGS:
        text = (
            text_of(overlay).replace("rbd.csi.crust.dev", OTHER).replace("crust-rbd", "crust-disks")
        )
        manifests |= made(config(tmp_path, text))
    return manifests


def host_paths(manifests: Objects) -> set[str]:
    volumes = [
        v
        for workload in workloads(manifests)
        for v in workload["spec"]["template"]["spec"]["volumes"]
    ]
    return {volume["hostPath"]["path"] for volume in volumes if "hostPath" in volume} - OF_THE_NODE


def sockets(manifests: Objects) -> set[str]:
    """Of the node's process: what the kubelet calls, what runtimes call, and the directories of its locks."""
    (text,) = (
        manifest["data"]["node.toml"]
        for manifest in manifests.values()
        if "node.toml" in manifest.get("data", {})
    )
    its = loading.load(NodeSettings, "node", toml=text, environ={}, flags={})
    parts = {its.proxy.run_dir, its.proxy.volumes_root, its.runtime_socket, *its.inner_sockets}
    return (
        parts
        | {driver.socket for driver in its.proxy.drivers}
        | {driver.name for driver in its.proxy.drivers}
    )


def assert_apart(one: Objects, two: Objects) -> None:
    assert set(one) & set(two) == {("Namespace", "crust-system")}
    labels = [
        {str(workload["spec"]["selector"]["matchLabels"]) for workload in workloads(manifests)}
        for manifests in (one, two)
    ]
    assert labels[0] & labels[1] == set()
    assert not any(
        workload["spec"]["template"]["spec"].get("hostNetwork")
        for workload in workloads({**one, **two})
    )
    assert [
        (a, b)
        for a, b in itertools.product(host_paths(one), host_paths(two))
        if f"{a}/".startswith(f"{b}/") or f"{b}/".startswith(f"{a}/")
    ] == []


@pytest.mark.parametrize("overlay", LOCAL)
def test_overlays_of_local_and_ceph_volumes_share_one_cluster(overlay: str) -> None:
    local, ceph = all_of(overlay), all_of(*SETTINGS)
    assert_apart(local, ceph)
    assert sockets(local) & sockets(ceph) == set()


def test_manifests_of_two_drivers_can_be_in_one_cluster(tmp_path: Path) -> None:
    """That of Ceph is rendered: the command makes the same (`test_manifest_has_the_objects_that_kubectl_renders`)."""
    ceph, third = all_of(*SETTINGS), of_other_name(tmp_path)
    for other in (made(), ceph):
        assert_apart(other, third)
        assert sockets(other) & sockets(third) == set()
    secrets = [str(manifests).count("crust-rbd-node") for manifests in (ceph, third)]
    assert secrets[0] > 0
    assert secrets[1] == 0, "each driver's class names a Secret of its own"


def test_objects_of_another_driver_refer_to_each_other(tmp_path: Path) -> None:
    manifests = of_other_name(tmp_path)
    accounts = {name for kind, name in manifests if kind == "ServiceAccount"}
    assert accounts == {"crust-disks-example-com-node", "crust-disks-example-com-controller"}
    used = {
        workload["spec"]["template"]["spec"]["serviceAccountName"]
        for workload in workloads(manifests)
    }
    assert used == accounts
    bindings = {
        key: binding for key, binding in manifests.items() if key[0].endswith("RoleBinding")
    }
    assert bindings
    for (kind, _), binding in bindings.items():
        assert (kind.removesuffix("Binding"), binding["roleRef"]["name"]) in manifests
        assert {subject["name"] for subject in binding["subjects"]} <= accounts
    for workload in workloads(manifests):
        volumes = workload["spec"]["template"]["spec"]["volumes"]
        (settings,) = (volume["configMap"]["name"] for volume in volumes if "configMap" in volume)
        assert ("ConfigMap", settings) in manifests
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert workload["spec"]["selector"]["matchLabels"].items() <= labels.items()


def kinds(manifests: Objects) -> set[tuple[str, str]]:
    """Without the ConfigMap, whose name follows from the settings."""
    return {key for key in manifests if key[0] != "ConfigMap"}


def of_one_node() -> str:
    """Settings of a node with both drivers, as docs/multi-node.md has them."""
    local, ceph = (KUBERNETES / "overlays/distributed/node.toml").read_text(), text_of("ceph-node")
    tables = ceph[ceph.index("[driver]") :].replace(
        "[driver]\n", '[driver]\nrun_dir = "/run/crust/d"\n'
    )
    return (local + tables).replace("[driver]\n", "[[driver]]\n")


@pytest.mark.parametrize("first", ["local", "ceph"])
def test_two_drivers_of_a_node_have_one_daemon_set(tmp_path: Path, first: str) -> None:
    text = of_one_node()
    if first == "ceph":
        head, one, two = text.split("[[driver]]")
        text = f"{head}[[driver]]{two}\n[[driver]]{one}"
    manifests = made(config(tmp_path, text))
    alone = rendered("block-driver")
    assert kinds(manifests) == {*kinds(alone), ("CSIDriver", "rbd.csi.crust.dev")}
    assert (
        manifests["CSIDriver", "rbd.csi.crust.dev"]
        == rendered("ceph-node")["CSIDriver", "rbd.csi.crust.dev"]
    )
    assert (
        manifests["CSIDriver", "block.csi.crust.dev"] == alone["CSIDriver", "block.csi.crust.dev"]
    )
    volumes = {volume["name"]: volume for volume in pod_of(manifests)["volumes"]}
    assert {volume["name"] for volume in pod_of(rendered("ceph-node"))["volumes"]} <= set(volumes)
    assert volumes["run"]["hostPath"]["path"] == "/run/crust"
    assert {"pool", "machine-id"} <= set(volumes)
    for manifest in manifests.values():
        kubernetes_validate.validate(manifest, "1.34", strict=True)


def test_path_of_further_driver_that_pod_would_lose_is_refused(tmp_path: Path) -> None:
    refused = run(
        tmp_path / "made", config(tmp_path, of_one_node().replace("/run/crust/d", "/srv/rbd"))
    )
    assert refused.exit_code == 2
    assert "/srv/rbd would be the container's own" in refused.output
