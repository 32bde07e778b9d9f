"""`crust driver manifest`: deploy/kubernetes as kubectl renders it, with what the settings say."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

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

OVERLAYS = {
    ("block-driver",): (),
    ("snapshots",): ("--snapshots",),
    ("single-node",): ("--resizer",),
    ("snapshots", "single-node"): ("--snapshots", "--resizer"),
}


def pod_of(objects: Objects) -> dict[str, Any]:
    spec: dict[str, Any] = objects["DaemonSet", "crust-node"]["spec"]["template"]["spec"]
    return spec


@pytest.mark.parametrize("overlays", OVERLAYS)
def test_manifest_has_the_objects_that_kubectl_renders(overlays: tuple[str, ...]) -> None:
    objects = made(*OVERLAYS[overlays])
    expected: Objects = {}
    for overlay in overlays:
        expected |= rendered(overlay)
    if len(overlays) == 1:
        assert objects == expected
    else:  # each overlay adds a sidecar to the one DaemonSet
        assert set(objects) == set(expected)
        containers = {container["name"] for container in pod_of(objects)["containers"]}
        assert containers == {"crust", "csi-provisioner", "csi-snapshotter", "csi-resizer"}


def test_manifest_of_node_deployment_has_resizer_that_only_marks_sizes() -> None:
    text = KUBERNETES / "overlays/distributed/node.toml"
    objects = made(f"--config={text}", "--resizer")
    assert objects == rendered("distributed")
    assert [kind for kind, _ in objects].count("ConfigMap") == 1
    both = made(f"--config={text}", "--resizer", "--snapshots")
    containers = {container["name"] for container in pod_of(both)["containers"]}
    assert containers == {"crust", "csi-provisioner", "csi-snapshotter", "csi-resizer"}


def test_manifest_of_a_wrapped_driver_has_its_objects_and_name(tmp_path: Path) -> None:
    assert made(config(tmp_path, WRAPPED)) == rendered("wrapped-driver")
    other = made(config(tmp_path, WRAPPED.replace("csi.example.com", "ebs.csi.aws.com")))
    assert other["StorageClass", "example-deferred"]["provisioner"] == "ebs.csi.aws.com"
    assert "CSIDriver" not in {kind for kind, _ in other}


def test_manifest_is_read_by_kubectl() -> None:
    """Without a server: kubectl decodes each object into its own types."""
    objects = made("--snapshots", "--resizer")
    command = ("kubectl", "label", "--local", "-f", "-", "checked=yes", "-o", "name")
    text = yaml.safe_dump_all(objects.values())
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(objects)


def test_pod_info_is_asked_for_where_runtime_class_may_decide(tmp_path: Path) -> None:
    driver = ("CSIDriver", "block.csi.crust.dev")
    assert made()[driver]["spec"]["podInfoOnMount"] is True
    without = made(config(tmp_path, POD + "[driver]\n"))
    assert without[driver]["spec"]["podInfoOnMount"] is False


def test_settings_are_the_config_map_as_they_were_written(tmp_path: Path) -> None:
    text = POD + "# a comment that says crust-system and /var/lib/kubelet/pods\n[driver]\n"
    objects = made(config(tmp_path, text), "--namespace=storage", "--image=r.example/crust:1")
    (config_map,) = (item for (kind, _), item in objects.items() if kind == "ConfigMap")
    assert config_map["data"] == {"node.toml": text}
    volumes = {volume["name"]: volume for volume in pod_of(objects)["volumes"]}
    assert volumes["settings"]["configMap"]["name"] == config_map["metadata"]["name"]
    namespaces = {item["metadata"].get("namespace") for item in objects.values()}
    assert namespaces == {None, "storage"}
    containers = (*pod_of(objects)["containers"], *pod_of(objects)["initContainers"])
    ours = {
        container["image"] for container in containers if "sig-storage" not in container["image"]
    }
    assert ours == {"r.example/crust:1"}


def test_kubelet_root_and_port_of_the_settings_are_the_pods(tmp_path: Path) -> None:
    text = POD.replace("/var/lib/kubelet", "/data/kubelet").replace("9810", "9900")
    text += 'target_roots = ["/data/kubelet"]\n[[proxy.drivers]]\nname = "block.csi.crust.dev"\n'
    text += 'socket = "/data/kubelet/plugins/block.csi.crust.dev/csi.sock"\n'
    text += 'backend = "/run/crust/shim/csi.sock"\n[shim]\nkubelet_root = "/data/kubelet"\n'
    pod = pod_of(made(config(tmp_path, text + '[driver]\ntarget_roots = ["/data/kubelet"]\n')))
    (crust,) = (container for container in pod["containers"] if container["name"] == "crust")
    assert crust["ports"] == [{"name": "metrics", "containerPort": 9900}]
    assert "/var/lib/kubelet" not in str(pod)


def test_own_image_may_have_programs_that_ours_lacks(tmp_path: Path) -> None:
    text = config(tmp_path, "traces = true\n" + POD + "[driver]\n")
    assert run(tmp_path / "made", text).exit_code == 2
    assert run(tmp_path / "made", text, "--image=registry.example/crust-with-otel:1").exit_code == 0


def test_run_directory_of_the_settings_is_the_hosts(tmp_path: Path) -> None:
    text = POD + 'run_dir = "/srv/crust"\nvolumes_root = "/srv/crust/volumes"\n[driver]\n'
    pod = pod_of(made(config(tmp_path, text)))
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["run"]["hostPath"] == {"path": "/srv/crust", "type": "DirectoryOrCreate"}
    assert "/run/crust" not in str(pod)


def test_wrapped_driver_can_be_served_beside_our_own(tmp_path: Path) -> None:
    theirs = WRAPPED.partition("[[proxy.drivers]]")[2].partition("# The pod's")[0]
    text = POD + "[[proxy.drivers]]" + theirs.replace("/shim/", "/shim-example/")
    text += '[[proxy.drivers]]\nname = "block.csi.crust.dev"\n'
    text += 'socket = "/var/lib/kubelet/plugins/block.csi.crust.dev/csi.sock"\n'
    text += 'backend = "/run/crust/shim/csi.sock"\n[[shim]]\n[[shim]]\n'
    text += 'socket = "/run/crust/shim-example/csi.sock"\n'
    text += 'driver_socket = "/var/lib/kubelet/plugins/csi.example.com-inner/csi.sock"\n[driver]\n'
    assert ("CSIDriver", "block.csi.crust.dev") in made(config(tmp_path, text))


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("metrics_address", "traces = true\nmetrics_address", "leave traces out"),
        ('"0.0.0.0:9810"', '"127.0.0.1:9810"', "metrics_address"),
        ('plugins_registry = "/var/lib/kubelet/plugins_registry"', "", "plugins_registry"),
        ("[proxy]", '[proxy]\nrun_dir = "/srv/crust"', "/run/crust/volumes would be"),
        (
            "[driver]",
            '[proxy.kubernetes]\nruntime_handlers = ["kata"]\nkubeconfig = "/root/config"\n[driver]',
            "/root/config would be",
        ),
        (
            "[driver]",
            '[proxy.kubernetes]\nruntime_handlers = ["kata"]\nnode_name = "other"\n[driver]',
            "leave proxy.kubernetes.node_name out",
        ),
        ("[driver]", '[driver]\nnode_id = "other"', "leave driver.node_id out"),
        ("[driver]", '[driver]\npool_id_file = "/mnt/id"', "/mnt/id would be"),
        (
            "[driver]",
            '[driver]\ndriver_name = "Disks_1"',
            "a CSIDriver object cannot have the name",
        ),
        ("[driver]", '[driver]\ndriver_name = "rbd"', "give it a domain"),
        ("[driver]", '[driver]\nstate_dir = "/mnt/pool"', "/mnt/pool"),
        (
            "[driver]",
            '[[proxy.drivers]]\nname = "block.csi.crust.dev"\n'
            'socket = "/var/lib/kubelet/plugins/other/csi.sock"\nbackend = "/run/crust/shim/csi.sock"\n[driver]',
            "the sidecars look for the socket",
        ),
        ("[driver]", "[driver]\nunknown = 1", "unknown"),
    ],
)
def test_settings_that_fail_in_a_pod_are_refused(
    tmp_path: Path, before: str, after: str, words: str
) -> None:
    text = (POD + "[driver]\n").replace(before, after)
    result = run(tmp_path / "made", config(tmp_path, text))
    assert result.exit_code == 2
    assert words in result.stderr
    assert not (tmp_path / "made").exists()
