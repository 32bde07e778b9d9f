"""deploy/kubernetes: what `kubectl kustomize` renders is accepted by the published schemas, and by crust itself."""

import asyncio
import functools
import re
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

import crust
from crust.core.deferral_keys import Defer
from crust.core.settings import loading
from crust.core.settings.shim import ShimSettings
from crust.kubernetes_api import api as kubernetes_api
from crust.kubernetes_api.volumes_in_use import VolumesInUse
from crust.node.settings import NodeSettings
from crust.rpc.serving.health import Health
from tests.support.nodes import fake_kubernetes
from tests.support.nodes.fake_kubernetes import FakeKubernetes, recorded
from tests.support.raised import raised
from tests.support.third_party import kustomize

KUBERNETES = Path(__file__).parents[3] / "deploy" / "kubernetes"
OVERLAYS = (
    "block-driver",
    "distributed",
    "snapshots",
    "single-node",
    "wrapped-driver",
    "ceph-node",
)
CONTROLLERS = ("ceph-controller",)
VERSIONS = ("1.30", "1.34", "1.37")
NEWER = {("VolumeAttributesClass", "1.30")}
"""What an older Kubernetes has not, as docs/kubernetes.md says."""
WITHOUT_SCHEMA = {"VolumeSnapshotClass", "VolumeGroupSnapshotClass"}
"""Custom resources: their schemas are not Kubernetes' own."""


@functools.cache
def rendered(directory: str) -> tuple[dict[str, Any], ...]:
    return tuple(kustomize.render(KUBERNETES / directory))


def workload(overlay: str) -> dict[str, Any]:
    kinds = ("DaemonSet", "Deployment")
    (found,) = (each for each in rendered(f"overlays/{overlay}") if each["kind"] in kinds)
    return found


def node_settings(overlay: str) -> NodeSettings:
    (found,) = (each for each in rendered(f"overlays/{overlay}") if each["kind"] == "ConfigMap")
    environ = {"CRUST_NODE_NAME": "node-1"}
    return loading.load(
        NodeSettings, "node", toml=found["data"]["node.toml"], environ=environ, flags={}
    )


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "directory", [*(f"overlays/{each}" for each in (*OVERLAYS, *CONTROLLERS)), "examples"]
)
def test_rendered_object_is_accepted_by_the_published_schema(directory: str, version: str) -> None:
    for each in rendered(directory):
        if each["kind"] not in WITHOUT_SCHEMA and (each["kind"], version) not in NEWER:
            kubernetes_validate.validate(each, version, strict=True)


def test_object_with_a_misspelt_key_is_not_accepted() -> None:
    (pod,) = (each for each in rendered("examples") if each["kind"] == "Pod")
    misspelt = {**pod, "spec": {**pod["spec"], "runtimeClasName": "kata"}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(misspelt, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_paths_of_the_settings_are_mounted_from_the_host(overlay: str) -> None:
    found = node_settings(overlay)
    assert found.proxy.kubernetes is not None
    assert found.proxy.kubernetes.node_name == "node-1"
    pod = workload(overlay)["spec"]["template"]["spec"]
    hosts = {each["name"] for each in pod["volumes"] if "hostPath" in each}
    (crust,) = (each for each in pod["containers"] if each["name"] == "crust")
    mounted = {each["mountPath"] for each in crust["volumeMounts"] if each["name"] in hosts}
    needed = {found.proxy.run_dir, found.proxy.volumes_root, *found.proxy.target_roots}
    needed |= {each.socket for each in found.proxy.drivers}
    if not found.driver:
        needed.add(found.shim[0].driver_socket)
    elif found.driver[0].engine == "files":
        needed.add(found.driver[0].state_dir)
    assert [each for each in needed if not any(each.startswith(path) for path in mounted)] == []
    (kubelet,) = (each for each in crust["volumeMounts"] if each["name"] == "kubelet")
    assert kubelet["mountPropagation"] == "Bidirectional"
    assert found.metrics_address.endswith(f":{crust['ports'][0]['containerPort']}")
    assert crust["securityContext"]["privileged"]  # the API server refuses Bidirectional without


def test_distributed_nodes_provision_for_themselves_and_one_resizer_leads() -> None:
    (driver,) = node_settings("distributed").driver
    assert driver.node_deployment
    pod = workload("distributed")["spec"]["template"]["spec"]
    arguments = {each["name"]: set(each.get("args", ())) for each in pod["containers"]}
    assert {"--node-deployment", "--strict-topology", "--enable-capacity"} <= (
        arguments["csi-provisioner"]
    )
    assert "--leader-election" in arguments["csi-resizer"]
    assert "csi-attacher" not in arguments
    (csi_driver,) = (
        each for each in rendered("overlays/distributed") if each["kind"] == "CSIDriver"
    )
    assert csi_driver["spec"]["attachRequired"] is False
    rules = [
        rule
        for each in rendered("overlays/distributed")
        if each["kind"] == "Role"
        for rule in each["rules"]
    ]
    assert any("leases" in rule["resources"] for rule in rules)


def test_wrapped_driver_has_no_pool_and_no_object_of_our_driver() -> None:
    assert node_settings("wrapped-driver").driver == ()
    assert "block.csi.crust.dev" not in yaml.safe_dump_all(rendered("overlays/wrapped-driver"))


def test_container_for_a_vendors_controller_is_accepted_by_the_published_schema() -> None:
    text = (KUBERNETES / "overlays/wrapped-driver/controller.yaml").read_text(encoding="utf-8")
    found, role, binding = yaml.safe_load_all(text)
    found["spec"]["selector"] = {"matchLabels": {"app": "x"}}  # the vendor's Deployment has one
    for each in (found, role, binding):
        kubernetes_validate.validate(each, VERSIONS[-1], strict=True)
    (shim,) = found["spec"]["template"]["spec"]["containers"]
    flags = {each.partition("=")[0]: each.partition("=")[2] for each in shim["args"]}
    given = {
        "socket": flags["--socket"],
        "driver_socket": flags["--driver-socket"],
        "controller": True,
    }
    loaded = loading.load(ShimSettings, "shim", environ={}, flags=given)
    assert loaded.controller
    assert loaded.check_detach
    assert binding["roleRef"]["name"] == role["metadata"]["name"]


async def test_vendors_controller_may_ask_exactly_what_a_detach_needs(tmp_path: Path) -> None:
    text = (KUBERNETES / "overlays/wrapped-driver/controller.yaml").read_text(encoding="utf-8")
    _, role, _ = yaml.safe_load_all(text)
    allowed = {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    api = FakeKubernetes()
    api.add(recorded("volumeattachment-attached"), "volumeattachments")
    api.add(recorded("pv-csi"), "persistentvolumes")
    with fake_kubernetes.serving(api, tmp_path) as kubeconfig:
        client = kubernetes_api.client(kubeconfig)
        users = VolumesInUse(client, Defer.NEVER)
        async with users.following(Health()):
            for collection in ("volumeattachments", "persistentvolumes", "csinodes"):
                await asyncio.to_thread(api.wait_for_watch, collection)
            with raised("VolumeUseUnknown"):
                await users.check_detach("block.csi.crust.dev", "vol-1", "worker-1")
        await client.close()
    assert api.verbs == allowed


@pytest.mark.parametrize("overlay", CONTROLLERS)
def test_controller_needs_no_privilege_and_no_path_of_the_host(overlay: str) -> None:
    spec = workload(overlay)["spec"]
    assert spec["replicas"] == 2
    pod = spec["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    for each in (*pod["containers"], *pod.get("initContainers", ())):
        assert each["securityContext"] == {
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
    assert not any("hostPath" in each for each in pod["volumes"])
    sidecars = [each for each in pod["containers"] if each["name"] != "crust"]
    assert all("--leader-election" in each["args"] for each in sidecars)


@pytest.mark.parametrize("overlay", [*OVERLAYS, *CONTROLLERS])
def test_image_of_crust_has_this_version(overlay: str) -> None:
    pod = workload(overlay)["spec"]["template"]["spec"]
    images = [each["image"] for each in (*pod["containers"], *pod.get("initContainers", ()))]
    ours = {each for each in images if each.startswith("crust-csi")}
    assert ours == {f"crust-csi:{crust.__version__}"}
    assert [each for each in images if ":" not in each] == []


def test_wheel_has_every_directory_of_the_manifests() -> None:
    project = tomllib.loads((KUBERNETES.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    shipped = {
        pattern.removesuffix("/*")
        for patterns in project["tool"]["setuptools"]["data-files"].values()
        for pattern in patterns
    }
    directories = {path.parent for path in KUBERNETES.rglob("*.yaml")}
    root = KUBERNETES.parents[1]
    assert [each for each in directories if str(each.relative_to(root)) not in shipped] == []


SNAPSHOTS, STORAGE = "snapshot.storage.k8s.io", "storage.k8s.io"
NEEDED = {
    "csi-provisioner": {
        ("", "persistentvolumes", "patch"),
        ("", "persistentvolumeclaims", "update"),
        (SNAPSHOTS, "volumesnapshots", "update"),
        (SNAPSHOTS, "volumesnapshotcontents", "list"),
        (STORAGE, "volumeattributesclasses", "watch"),
    },
    "csi-attacher": {
        (STORAGE, "volumeattachments", "patch"),
        (STORAGE, "volumeattachments/status", "patch"),
        (STORAGE, "csinodes", "list"),
    },
    "csi-resizer": {
        ("", "persistentvolumeclaims/status", "patch"),
        ("", "pods", "watch"),
        (STORAGE, "volumeattributesclasses", "watch"),
    },
    "csi-snapshotter": {
        (SNAPSHOTS, "volumesnapshotcontents/status", "patch"),
        ("groupsnapshot.storage.k8s.io", "volumegroupsnapshotcontents/status", "patch"),
    },
}
"""What the sidecars' releases ask of the API, by their own roles: of each what is easily forgotten."""


def allowed(overlay: str) -> set[tuple[str, str, str]]:
    """What the cluster roles of an overlay's one service account allow."""
    found = rendered(f"overlays/{overlay}")
    account = workload(overlay)["spec"]["template"]["spec"]["serviceAccountName"]
    bound = {
        each["roleRef"]["name"]
        for each in found
        if each["kind"] == "ClusterRoleBinding"
        and account in {subject["name"] for subject in each["subjects"]}
    }
    roles = [each for each in found if each["kind"] == "ClusterRole"]
    rules = [rule for each in roles if each["metadata"]["name"] in bound for rule in each["rules"]]
    return {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


@pytest.mark.parametrize("overlay", [*OVERLAYS, *CONTROLLERS])
def test_sidecars_may_do_what_they_do(overlay: str) -> None:
    pod = workload(overlay)["spec"]["template"]["spec"]
    needed = {each for c in pod["containers"] for each in NEEDED.get(c["name"], set())}
    assert needed - allowed(overlay) == set()


def test_images_of_sidecars_are_those_of_the_page() -> None:
    page = (KUBERNETES.parents[1] / "docs/kubernetes.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `(csi-[a-z]+:v[0-9.]+)` \|", page, re.MULTILINE))
    used = {
        each["image"].removeprefix("registry.k8s.io/sig-storage/")
        for overlay in (*OVERLAYS, *CONTROLLERS)
        for each in workload(overlay)["spec"]["template"]["spec"]["containers"]
        if each["name"] != "crust"
    }
    assert used == named


@pytest.mark.parametrize("overlay", [*OVERLAYS, *CONTROLLERS])
def test_pod_is_scheduled_first_and_killed_last(overlay: str) -> None:
    found = workload(overlay)
    pod = found["spec"]["template"]["spec"]
    is_node = found["kind"] == "DaemonSet"
    assert pod["priorityClassName"] == f"system-{'node' if is_node else 'cluster'}-critical"
    assert ({"operator": "Exists"} in pod.get("tolerations", [])) is is_node
    for each in pod["containers"]:
        assert set(each["resources"]) == {"requests"}, "a limit kills e2fsck half-way"
    for each in pod["volumes"]:
        assert each.get("hostPath", {"type": "-"}).get("type"), (
            "a missing path is made as a directory"
        )


@pytest.mark.parametrize("overlay", [*OVERLAYS, *CONTROLLERS])
def test_liveness_never_asks_probe(overlay: str) -> None:
    """A controller whose pool is away answers CSI's Probe with ready: false, and is alive."""
    containers = workload(overlay)["spec"]["template"]["spec"]["containers"]
    probes = {each["name"]: each["livenessProbe"] for each in containers if "livenessProbe" in each}
    assert set(probes) == {"crust"}
    assert probes["crust"]["httpGet"] == {"path": "/healthz", "port": "metrics"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_sidecars_of_a_node_have_no_capability(overlay: str) -> None:
    for each in workload(overlay)["spec"]["template"]["spec"]["containers"]:
        if each["name"] != "crust":
            assert each["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert each["securityContext"]["allowPrivilegeEscalation"] is False
