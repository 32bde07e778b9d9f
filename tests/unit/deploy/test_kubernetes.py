"""deploy/kubernetes: what `kubectl kustomize` renders is accepted by the published schemas, and by crust itself."""

import asyncio
import functools
import itertools
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from crust.core.settings import loading
from crust.core.supervised import Health
from crust.csi_shim.settings import ShimSettings
from crust.kubernetes_api import api as kubernetes_api
from crust.kubernetes_api.volumes_in_use import VolumesInUse
from crust.node.settings import NodeSettings
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


def manifest_of(overlay: str, *kinds: str) -> dict[str, Any]:
    """The one manifest of these kinds."""
    manifests = rendered(f"overlays/{overlay}")
    (only,) = (manifest for manifest in manifests if manifest["kind"] in kinds)
    return only


def workload(overlay: str) -> dict[str, Any]:
    return manifest_of(overlay, "DaemonSet", "Deployment")


def pod_of(overlay: str) -> Any:
    return workload(overlay)["spec"]["template"]["spec"]


def node_settings(overlay: str) -> NodeSettings:
    toml = manifest_of(overlay, "ConfigMap")["data"]["node.toml"]
    environ = {"CRUST_NODE_NAME": "node-1"}
    return loading.load(NodeSettings, "node", toml=toml, environ=environ, flags={})


def permissions(rules: Iterable[dict[str, Any]]) -> set[tuple[str, str, str]]:
    """What rules of roles allow."""
    return {
        permission
        for rule in rules
        for permission in itertools.product(rule["apiGroups"], rule["resources"], rule["verbs"])
    }


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "directory", [*(f"overlays/{overlay}" for overlay in (*OVERLAYS, *CONTROLLERS)), "examples"]
)
def test_rendered_object_is_accepted_by_the_published_schema(directory: str, version: str) -> None:
    for manifest in rendered(directory):
        if manifest["kind"] not in WITHOUT_SCHEMA and (manifest["kind"], version) not in NEWER:
            kubernetes_validate.validate(manifest, version, strict=True)


def test_object_with_a_misspelt_key_is_not_accepted() -> None:
    (pod,) = (manifest for manifest in rendered("examples") if manifest["kind"] == "Pod")
    misspelt = {**pod, "spec": {**pod["spec"], "runtimeClasName": "kata"}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(misspelt, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_paths_of_the_settings_are_mounted_from_the_host(overlay: str) -> None:
    settings = node_settings(overlay)
    assert settings.proxy.kubernetes is not None
    assert settings.proxy.kubernetes.node_name == "node-1"
    pod = pod_of(overlay)
    hosts = {volume["name"] for volume in pod["volumes"] if "hostPath" in volume}
    (crust,) = (container for container in pod["containers"] if container["name"] == "crust")
    mounted = {mount["mountPath"] for mount in crust["volumeMounts"] if mount["name"] in hosts}
    needed = {settings.proxy.run_dir, settings.proxy.volumes_root, *settings.proxy.target_roots}
    needed |= {driver.socket for driver in settings.proxy.drivers}
    if not settings.driver:
        needed.add(settings.shim[0].driver_socket)
    elif settings.driver[0].engine == "files":
        needed.add(settings.driver[0].state_dir)
    assert [path for path in needed if not path.startswith(tuple(mounted))] == []
    (kubelet,) = (mount for mount in crust["volumeMounts"] if mount["name"] == "kubelet")
    assert kubelet["mountPropagation"] == "Bidirectional"
    assert settings.metrics_address.endswith(f":{crust['ports'][0]['containerPort']}")
    assert crust["securityContext"]["privileged"]  # the API server refuses Bidirectional without


def test_distributed_nodes_provision_for_themselves_and_one_resizer_leads() -> None:
    (driver,) = node_settings("distributed").driver
    assert driver.node_deployment
    pod = pod_of("distributed")
    arguments = {
        container["name"]: set(container.get("args", ())) for container in pod["containers"]
    }
    assert {"--node-deployment", "--strict-topology", "--enable-capacity"} <= (
        arguments["csi-provisioner"]
    )
    assert "--leader-election" in arguments["csi-resizer"]
    assert "csi-attacher" not in arguments
    assert manifest_of("distributed", "CSIDriver")["spec"]["attachRequired"] is False
    rules = [
        rule
        for manifest in rendered("overlays/distributed")
        if manifest["kind"] == "Role"
        for rule in manifest["rules"]
    ]
    assert any("leases" in rule["resources"] for rule in rules)


def test_wrapped_driver_overlay_has_nothing_of_our_driver() -> None:
    assert node_settings("wrapped-driver").driver == ()
    assert "block.csi.crust.dev" not in yaml.safe_dump_all(rendered("overlays/wrapped-driver"))


def test_vendors_controller_container_is_accepted_by_published_schema() -> None:
    text = (KUBERNETES / "overlays/wrapped-driver/controller.yaml").read_text(encoding="utf-8")
    deployment, role, binding = yaml.safe_load_all(text)
    deployment["spec"]["selector"] = {
        "matchLabels": {"app": "x"}
    }  # the vendor's Deployment has one
    for manifest in (deployment, role, binding):
        kubernetes_validate.validate(manifest, VERSIONS[-1], strict=True)
    (shim,) = deployment["spec"]["template"]["spec"]["containers"]
    flags = {argument.partition("=")[0]: argument.partition("=")[2] for argument in shim["args"]}
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
    api = FakeKubernetes()
    api.add(recorded("volumeattachment-attached"), "volumeattachments")
    api.add(recorded("pv-csi"), "persistentvolumes")
    with fake_kubernetes.serving(api, tmp_path) as kubeconfig:
        client = kubernetes_api.client(kubeconfig)
        users = VolumesInUse(client)
        async with users.following(Health()):
            for collection in ("volumeattachments", "persistentvolumes", "csinodes"):
                await asyncio.to_thread(api.wait_for_watch, collection)
            with raised("VolumeUseUnknown"):
                await users.check_detach("block.csi.crust.dev", "vol-1", "worker-1")
        await client.close()
    assert api.verbs == permissions(role["rules"])


@pytest.mark.parametrize("overlay", CONTROLLERS)
def test_controller_needs_no_privilege_and_no_path_of_the_host(overlay: str) -> None:
    spec = workload(overlay)["spec"]
    assert spec["replicas"] == 2
    pod = spec["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    for container in (*pod["containers"], *pod.get("initContainers", ())):
        assert container["securityContext"] == {
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
    assert not any("hostPath" in volume for volume in pod["volumes"])
    sidecars = [container for container in pod["containers"] if container["name"] != "crust"]
    assert all("--leader-election" in sidecar["args"] for sidecar in sidecars)


@pytest.mark.parametrize("overlay", [*OVERLAYS, *CONTROLLERS])
def test_image_of_crust_has_one_version(overlay: str) -> None:
    pod = pod_of(overlay)
    images = [
        container["image"] for container in (*pod["containers"], *pod.get("initContainers", ()))
    ]
    ours = {image for image in images if image.startswith("crust-csi")}
    assert ours == {"crust-csi:0.1.0"}
    assert [image for image in images if ":" not in image] == []


def test_wheel_has_every_directory_of_the_manifests() -> None:
    project = tomllib.loads((KUBERNETES.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    shipped = {
        pattern.removesuffix("/*")
        for patterns in project["tool"]["setuptools"]["data-files"].values()
        for pattern in patterns
    }
    directories = {path.parent for path in KUBERNETES.rglob("*.yaml")}
    root = KUBERNETES.parents[1]
    assert [
        directory for directory in directories if str(directory.relative_to(root)) not in shipped
    ] == []


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
    manifests = rendered(f"overlays/{overlay}")
    account = pod_of(overlay)["serviceAccountName"]
    bound = {
        manifest["roleRef"]["name"]
        for manifest in manifests
        if manifest["kind"] == "ClusterRoleBinding"
        and account in {subject["name"] for subject in manifest["subjects"]}
    }
    roles = [manifest for manifest in manifests if manifest["kind"] == "ClusterRole"]
    of_account = [role for role in roles if role["metadata"]["name"] in bound]
    return permissions(rule for role in of_account for rule in role["rules"])


@pytest.mark.parametrize("overlay", [*OVERLAYS, *CONTROLLERS])
def test_sidecars_may_do_what_they_do(overlay: str) -> None:
    pod = pod_of(overlay)
    needed = {rule for c in pod["containers"] for rule in NEEDED.get(c["name"], set())}
    assert needed - allowed(overlay) == set()


def test_images_of_sidecars_are_those_of_the_page() -> None:
    page = (KUBERNETES.parents[1] / "docs/kubernetes.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `(csi-[a-z]+:v[0-9.]+)` \|", page, re.MULTILINE))
    used = {
        container["image"].removeprefix("registry.k8s.io/sig-storage/")
        for overlay in (*OVERLAYS, *CONTROLLERS)
        for container in pod_of(overlay)["containers"]
        if container["name"] != "crust"
    }
    assert used == named


@pytest.mark.parametrize("overlay", [*OVERLAYS, *CONTROLLERS])
def test_pod_is_scheduled_first_and_killed_last(overlay: str) -> None:
    deployment = workload(overlay)
    pod = deployment["spec"]["template"]["spec"]
    is_node = deployment["kind"] == "DaemonSet"
    assert pod["priorityClassName"] == f"system-{'node' if is_node else 'cluster'}-critical"
    assert ({"operator": "Exists"} in pod.get("tolerations", [])) is is_node
    for container in pod["containers"]:
        assert set(container["resources"]) == {"requests"}, "a limit kills e2fsck half-way"
    for volume in pod["volumes"]:
        assert volume.get("hostPath", {"type": "-"}).get("type"), (
            "a missing path is made as a directory"
        )


@pytest.mark.parametrize("overlay", [*OVERLAYS, *CONTROLLERS])
def test_liveness_never_asks_probe(overlay: str) -> None:
    """A controller whose pool is away answers CSI's Probe with ready: false, and is alive."""
    containers = pod_of(overlay)["containers"]
    probes = {
        container["name"]: container["livenessProbe"]
        for container in containers
        if "livenessProbe" in container
    }
    assert set(probes) == {"crust"}
    assert probes["crust"]["httpGet"] == {"path": "/healthz", "port": "metrics"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_sidecars_of_a_node_have_no_capability(overlay: str) -> None:
    for container in pod_of(overlay)["containers"]:
        if container["name"] != "crust":
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
