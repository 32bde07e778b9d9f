"""`crust driver manifest` where controller and nodes are apart: a settings file for each, and objects for each."""

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from tests.unit.cli.test_manifest import (
    KUBERNETES,
    POD,
    VERSIONS,
    WITHOUT_SCHEMA,
    Objects,
    config,
    made,
    read_by_kubectl,
    rendered,
    run,
)

SETTINGS = {
    "ceph-node": "node.toml",
    "ceph-controller": "controller.toml",
}
OWN, CEPH = "block.csi.crust.dev", "rbd.csi.crust.dev"


def text_of(overlay: str) -> str:
    return (KUBERNETES / "overlays" / overlay / SETTINGS[overlay]).read_text(encoding="utf-8")


def pod_of(found: Objects) -> dict[str, Any]:
    (workload,) = (each for (kind, _), each in found.items() if kind in ("DaemonSet", "Deployment"))
    pod: dict[str, Any] = workload["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize("overlay", SETTINGS)
def test_manifest_has_the_objects_that_kubectl_renders(tmp_path: Path, overlay: str) -> None:
    assert made(config(tmp_path, text_of(overlay))) == rendered(overlay)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", SETTINGS)
def test_manifest_is_accepted_by_the_published_schemas(
    tmp_path: Path, overlay: str, version: str
) -> None:
    found = made(config(tmp_path, text_of(overlay)), "--image=r.example/c:1", "--namespace=store")
    for each in found.values():
        if each["kind"] not in WITHOUT_SCHEMA:
            kubernetes_validate.validate(each, version, strict=True)
    assert "crust-system" not in str(found)


@pytest.mark.parametrize("overlay", SETTINGS)
def test_manifest_is_read_by_kubectl(tmp_path: Path, overlay: str) -> None:
    read_by_kubectl(made(config(tmp_path, text_of(overlay))))


def test_controller_of_the_ceph_pool_has_no_attacher_and_publishes_no_capacity(
    tmp_path: Path,
) -> None:
    found = made(config(tmp_path, text_of("ceph-controller")))
    sidecars = {each["name"]: each for each in pod_of(found)["containers"]}
    assert set(sidecars) == {"crust", "csi-provisioner", "csi-resizer", "csi-snapshotter"}
    assert "--enable-capacity" not in sidecars["csi-provisioner"]["args"]


def test_csi_driver_of_the_ceph_pool_needs_no_attach_and_has_no_capacity(tmp_path: Path) -> None:
    spec = made(config(tmp_path, text_of("ceph-node")))["CSIDriver", CEPH]["spec"]
    assert spec["attachRequired"] is False
    assert spec.get("storageCapacity", False) is False
    assert spec["podInfoOnMount"] is True


def test_class_of_the_ceph_pool_names_the_secret_for_each_call_of_a_node(tmp_path: Path) -> None:
    found = made(config(tmp_path, text_of("ceph-controller")), "--namespace=store")
    parameters = found["StorageClass", "crust-rbd"]["parameters"]
    for step in ("stage", "publish", "expand"):
        prefix = f"csi.storage.k8s.io/node-{step}-secret"
        assert parameters[f"{prefix}-name"] == "crust-rbd-node"
        assert parameters[f"{prefix}-namespace"] == "store"


def test_controller_of_the_ceph_pool_may_list_what_its_fencing_asks(tmp_path: Path) -> None:
    text = text_of("ceph-controller")
    assert "[kubernetes]" in text
    found = made(config(tmp_path, text))
    roles = [each for key, each in found.items() if key[0] == "ClusterRole"]
    allowed = {
        resource
        for role in roles
        for rule in role["rules"]
        for resource in rule["resources"]
        if "list" in rule["verbs"]
    }
    assert {"nodes", "csinodes"} <= allowed


def test_pod_of_a_node_of_the_ceph_pool_has_no_key_and_no_pool(tmp_path: Path) -> None:
    found = made(config(tmp_path, text_of("ceph-node")))
    pod = pod_of(found)
    kinds = {key for each in pod["volumes"] for key in each} - {"name"}
    assert kinds == {"configMap", "hostPath", "emptyDir"}
    assert "key_file" not in text_of("ceph-node")
    assert "/var/lib/crust" not in str(pod)


def test_nodes_of_the_ceph_pool_have_no_inline_volumes(tmp_path: Path) -> None:
    found = made(config(tmp_path, text_of("ceph-node")))
    assert found["CSIDriver", CEPH]["spec"]["volumeLifecycleModes"] == ["Persistent"]


@pytest.mark.parametrize("overlay", [*SETTINGS, "block-driver"])
def test_name_of_the_driver_is_in_every_object_and_path(tmp_path: Path, overlay: str) -> None:
    if overlay == "block-driver":
        text = POD + "[driver]\n"
    else:
        text = text_of(overlay).replace('driver_name = "rbd.csi.crust.dev"\n', "")
    first = "[driver]\n" if "[driver]" in text else "mode ="
    name = 'driver_name = "disks.example.com"\n'
    text = text.replace(first, first + name if first == "[driver]\n" else name + first, 1)
    found = made(config(tmp_path, text))
    others = {key: each for key, each in found.items() if key[0] != "ConfigMap"}
    assert not any(each in str(others) for each in (OWN, CEPH))
    assert "disks.example.com" in str(others)


@pytest.mark.parametrize(
    ("overlay", "before", "after", "words"),
    [
        ("ceph-controller", "/csi/crust/csi.sock", "/run/crust/csi.sock", "the sidecars call"),
        ("ceph-controller", "0.0.0.0:9810", "127.0.0.1:9810", "metrics_address"),
        (
            "ceph-controller",
            'mode = "controller"',
            'mode = "controller"\nrun_dir = "/srv"',
            "/srv",
        ),
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


def test_node_that_would_be_a_controller_of_the_ceph_pool_is_refused(tmp_path: Path) -> None:
    text = text_of("ceph-node").replace('mode = "node"', 'mode = "all"')
    result = run(
        tmp_path / "made", config(tmp_path, text + 'user = "u"\nkey_file = "/run/crust-rbd/key"\n')
    )
    assert result.exit_code == 2
    assert "each node would be a controller" in result.stderr


def test_node_whose_local_pool_no_controller_reaches_is_refused(tmp_path: Path) -> None:
    result = run(tmp_path / "made", config(tmp_path, POD + '[driver]\nmode = "node"\n'))
    assert result.exit_code == 2
    assert "on many nodes set node_deployment" in result.stderr


def test_sidecars_beside_a_node_are_refused(tmp_path: Path) -> None:
    result = run(tmp_path / "made", config(tmp_path, text_of("ceph-node")), "--snapshots")
    assert result.exit_code == 2
    assert "beside the controller" in result.stderr
