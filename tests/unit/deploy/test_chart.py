"""deploy/helm: what helm renders is accepted by the published schemas and by crust itself, and its parts agree."""

import itertools
import subprocess
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from crust.cli.programs import daemons, monitoring
from crust.node.settings import NodeSettings
from tests.support import chart, custom_resources
from tests.support.chart import Object, objects, of_kind, one
from tests.support.chart_forms import FORMS

VERSIONS = ("1.30", "1.34", "1.37")
NEWER = {("VolumeAttributesClass", "1.30")}
"""What an older Kubernetes has not, as docs/kubernetes.md says."""


def workloads(form: str) -> list[Object]:
    return of_kind(objects(FORMS[form]), "DaemonSet", "Deployment")


def pod_of(workload: Object) -> Any:
    return workload["spec"]["template"]["spec"]


def containers(form: str) -> list[Object]:
    """All containers of the pods, with those that run before."""
    return [
        container
        for workload in workloads(form)
        for container in (
            *pod_of(workload)["containers"],
            *pod_of(workload).get("initContainers", ()),
        )
    ]


def node_pod(form: str) -> Any:
    return pod_of(one(objects(FORMS[form]), "DaemonSet"))


def node_settings(form: str) -> NodeSettings:
    toml = chart.settings(objects(FORMS[form]))
    loaded = daemons.load("node", toml, environ={"CRUST_NODE_NAME": "node-1"})
    assert isinstance(loaded, NodeSettings)
    return loaded


def arguments(pod: Any, name: str) -> list[str]:
    """Those of one container; none without it."""
    return [word for item in pod["containers"] if item["name"] == name for word in item["args"]]


def longest_hang_s(probe: Any) -> int:
    """From a hang right after an answer to SIGKILL: the next questions, the last one's timeout, the probe's grace."""
    questions_s = probe["periodSeconds"] * probe["failureThreshold"]
    return int(questions_s + probe["timeoutSeconds"] + probe["terminationGracePeriodSeconds"])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("form", FORMS)
def test_rendered_object_is_accepted_by_the_published_schema(form: str, version: str) -> None:
    for item in objects(FORMS[form]):
        if item["kind"] in custom_resources.KINDS:
            custom_resources.validate(item)
        elif (item["kind"], version) not in NEWER:
            kubernetes_validate.validate(item, version, strict=True)


def test_object_with_a_misspelt_key_is_not_accepted() -> None:
    daemon_set = one(objects(), "DaemonSet")
    daemon_set["spec"]["template"]["spec"]["hostPid"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(daemon_set, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("kind", custom_resources.KINDS)
def test_custom_resource_with_a_misspelt_key_is_not_accepted(kind: str) -> None:
    items = of_kind([each for form in FORMS for each in objects(FORMS[form])], kind)
    custom_resources.validate(items[0])
    misspelt = [{**items[0], "speck": {}}]
    if "spec" in items[0]:
        misspelt.append({**items[0], "spec": {**items[0]["spec"], "selectors": {}}})
    for item in misspelt:
        with pytest.raises(jsonschema.ValidationError, match=r"speck|selectors"):
            custom_resources.validate(item)


def test_chart_passes_lint() -> None:
    lint = [str(chart.HELM), "lint", "--strict", "--quiet", str(chart.CHART)]
    done = subprocess.run(lint, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_plain_manifests_are_what_the_chart_renders() -> None:
    assert chart.stale() == [], "run `make manifests`"


@pytest.mark.parametrize("form", FORMS)
def test_no_two_objects_have_one_name(form: str) -> None:
    names = [(item["kind"], item["metadata"]["name"]) for item in objects(FORMS[form])]
    assert len(names) == len(set(names))


def test_two_releases_share_no_object_and_no_host_path() -> None:
    other = objects(
        "{name: other, runDir: /run/other, local: {driverName: other.example.com, directory: /data,"
        " storageClasses: [{name: other, defer: never, allowVolumeExpansion: true}]}}"
    )
    both = [{(item["kind"], item["metadata"]["name"]) for item in o} for o in (objects(), other)]
    assert both[0] & both[1] == set()
    paths = [
        {volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume}
        for pod in (pod_of(one(objects(), "DaemonSet")), pod_of(one(other, "DaemonSet")))
    ]
    assert paths[0] & paths[1] == {"/var/lib/kubelet", "/dev", "/sys/fs/cgroup"}


@pytest.mark.parametrize("form", FORMS)
def test_paths_of_the_settings_are_mounted_from_the_host(form: str) -> None:
    settings, pod = node_settings(form), node_pod(form)
    hosts = {volume["name"]: volume for volume in pod["volumes"] if "hostPath" in volume}
    (container,) = (item for item in pod["containers"] if item["name"] == "crust")
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    mounted = {path for path, mount in mounts.items() if mount["name"] in hosts}
    assert {path: hosts[mounts[path]["name"]]["hostPath"]["path"] for path in mounted} == {
        path: path for path in mounted
    }
    needed = {settings.proxy.run_dir, settings.proxy.volumes_root, *settings.proxy.target_roots}
    needed |= {served.socket for served in settings.proxy.drivers}
    needed |= {shim.driver_socket for shim in settings.shim}
    for driver in settings.driver:
        needed |= {driver.run_dir, *driver.target_roots}
        needed |= {pool.state_dir for pool in driver.pools.values()}
        needed |= {driver.state_dir} if driver.engine == "files" else {"/etc/machine-id"}
    inside = tuple(f"{path}/" for path in mounted)
    assert [path for path in needed if not f"{path}/".startswith(inside)] == []
    assert mounts[settings.proxy.target_roots[0]]["mountPropagation"] == "Bidirectional"
    assert container["securityContext"]["privileged"]  # the API server refuses it without


@pytest.mark.parametrize("form", FORMS)
def test_disk_of_each_pool_is_mounted_and_unmounted_under_pod(form: str) -> None:
    """And no container keeps crust, with its other drivers, from starting while that disk is absent."""
    pod, local = node_pod(form), [d for d in node_settings(form).driver if d.engine == "files"]
    (container,) = (item for item in pod["containers"] if item["name"] == "crust")
    mounts = [mount for mount in container["volumeMounts"] if mount["name"].startswith("pool")]
    directories = {each.state_dir for each in local}
    directories |= {pool.state_dir for each in local for pool in each.pools.values()}
    mounted = {f"{mount['mountPath']}/block" for mount in mounts}
    assert mounted == directories
    assert all(mount.get("mountPropagation") == "HostToContainer" for mount in mounts)
    assert "initContainers" not in pod
    assert all(driver.create_pool for driver in local)


@pytest.mark.parametrize("form", FORMS)
def test_settings_and_objects_name_the_same_drivers(form: str) -> None:
    items, settings = objects(FORMS[form]), node_settings(form)
    served = {driver.name for driver in settings.proxy.drivers}
    assert {driver["metadata"]["name"] for driver in of_kind(items, "CSIDriver")} == {
        driver.driver_name for driver in settings.driver
    }
    for item in of_kind(items, "StorageClass"):
        assert item["provisioner"] in served
    classes = of_kind(items, "VolumeSnapshotClass", "VolumeGroupSnapshotClass")
    assert {item["driver"] for item in classes} <= {d.driver_name for d in settings.driver}
    decides = settings.proxy.kubernetes is not None
    says = "runtime-class" in yaml.safe_dump_all(of_kind(items, "StorageClass"))
    assert decides is says
    if settings.proxy.kubernetes is not None:
        assert settings.proxy.kubernetes.node_name == "node-1"


@pytest.mark.parametrize("form", FORMS)
def test_sidecars_call_the_socket_that_the_settings_serve(form: str) -> None:
    items, settings = objects(FORMS[form]), node_settings(form)
    for workload in workloads(form):
        pod = pod_of(workload)
        called = {
            word.removeprefix("--csi-address=")
            for container in pod["containers"]
            for word in container.get("args", ())
            if word.startswith("--csi-address=")
        }
        if workload["kind"] == "DaemonSet":
            local = [driver for driver in settings.driver if driver.engine == "files"]
            expected = {"/csi/csi.sock"} if local else set()
            for driver in local:
                (csi,) = (volume for volume in pod["volumes"] if volume["name"] == "csi")
                socket = f"{csi['hostPath']['path']}/csi.sock"
                served = {each.name: each.socket for each in settings.proxy.drivers}
                assert served[driver.driver_name] == socket
        else:
            toml = one(items, "ConfigMap", workload["metadata"]["name"])["data"]["controller.toml"]
            loaded = daemons.load("driver", toml).model_dump()
            expected = {loaded["socket"]}
            assert loaded["mode"] == "controller"
            assert loaded["rbd"]["key_file"].startswith("/etc/crust-ceph/")
        assert called == expected


def test_controller_and_nodes_of_a_driver_have_its_settings() -> None:
    nodes = {driver.driver_name: driver for driver in node_settings("all").driver}
    toml = one(objects(FORMS["all"]), "ConfigMap", "team-a-controller")["data"]["controller.toml"]
    controller = daemons.load("driver", toml).model_dump()
    of_nodes = nodes[controller["driver_name"]]
    assert of_nodes.csi_profile == controller["csi_profile"] == "1.13"
    assert of_nodes.max_volumes == 10
    assert of_nodes.max_snapshots_per_volume == controller["max_snapshots_per_volume"] == 20
    assert of_nodes.reserve_snapshots is controller["reserve_snapshots"] is False
    assert of_nodes.rbd is not None
    for key in ("monitors", "pool", "namespace"):
        assert getattr(of_nodes.rbd, key) == controller["rbd"][key]
    assert (of_nodes.rbd.user, of_nodes.rbd.key_file) == ("", "")  # a node keeps no key
    assert controller["log_level"] == "warning"


def test_values_reach_the_settings_of_the_nodes() -> None:
    settings = node_settings("all")
    local, *ceph = settings.driver
    assert (local.overcommit, local.max_volumes, local.io_cgroup) == (1.5, 1_000_000, "")
    assert local.provisioning == "thick"
    assert (local.reserve_snapshots, local.max_snapshots_per_volume) == (False, 100_000)
    assert local.node_deployment
    assert (local.driver_name, local.state_dir) == ("disks.example.com", "/data/crust/block")
    assert settings.log_level == "debug"
    assert settings.excepted_groups == ("/system.slice/agent.service",)
    assert settings.metrics_address == "0.0.0.0:9900"
    assert len({driver.run_dir for driver in settings.driver}) == 1 + len(ceph) == 3
    wrapped = {served.name: served for served in settings.proxy.drivers}
    shims = {shim.socket: shim.driver_socket for shim in settings.shim}
    vendor = "/data/kubelet/plugins/disk-vendor/csi.sock"
    assert shims[wrapped["disk.example.com"].backend] == vendor
    inner = "/data/kubelet/plugins/csi.example.com-inner/csi.sock"
    assert shims[wrapped["csi.example.com"].backend] == inner
    assert wrapped["csi.example.com"].defer == "always"
    assert "/var/lib/kubelet" not in str(node_pod("all"))
    assert "block.csi.crust.dev" not in chart.text(FORMS["all"])


def test_wrapped_driver_has_nothing_of_ours() -> None:
    assert node_settings("wrapped").driver == ()
    assert "block.csi.crust.dev" not in chart.text(FORMS["wrapped"])


def test_other_settings_are_another_pod() -> None:
    def revision(values: str) -> str:
        (daemon_set,) = of_kind(objects(values), "DaemonSet")
        return str(daemon_set["spec"]["template"]["metadata"]["annotations"])

    assert revision("{}") == revision("{monitoring: {rules: {enabled: true}}}")
    assert revision("{}") != revision("{local: {settings: {overcommit: 2}}}")


def test_local_nodes_provision_for_themselves_and_one_resizer_leads() -> None:
    (driver,) = node_settings("local").driver
    assert driver.node_deployment
    pod = node_pod("local")
    needed = {"--node-deployment", "--strict-topology", "--enable-capacity"}
    assert needed <= set(arguments(pod, "csi-provisioner"))
    assert "--leader-election" in arguments(pod, "csi-resizer")
    assert one(objects(FORMS["local"]), "CSIDriver")["spec"]["attachRequired"] is False
    (single,) = node_settings("single-node").driver
    assert not single.node_deployment
    assert "--leader-election" not in arguments(node_pod("single-node"), "csi-resizer")


@pytest.mark.parametrize("form", FORMS)
def test_groups_are_offered_only_where_they_get_ready(form: str) -> None:
    """csi-snapshotter with --node-deployment waits for a label that the snapshot controller writes to no group."""
    items = objects(FORMS[form])
    expected = set()
    for workload in workloads(form):
        words = arguments(pod_of(workload), "csi-snapshotter")
        on = "--feature-gates=CSIVolumeGroupSnapshot=true" in words
        off = "--feature-gates=CSIVolumeGroupSnapshot=false" in words
        assert bool(words) is (on or off)  # by default it is on
        assert not (on and "--node-deployment" in words)
        if on and workload["kind"] == "DaemonSet":
            expected.add(node_settings(form).driver[0].driver_name)
        elif on:
            data = one(items, "ConfigMap", workload["metadata"]["name"])["data"]
            expected.add(daemons.load("driver", data["controller.toml"]).model_dump()["driver_name"])  # fmt: skip
    groups = of_kind(items, "VolumeGroupSnapshotClass")
    assert {item["driver"] for item in groups} == expected
    assert {item["apiVersion"] for item in groups} <= {"groupsnapshot.storage.k8s.io/v1"}


@pytest.mark.parametrize("form", FORMS)
def test_controller_needs_no_privilege_and_no_path_of_the_host(form: str) -> None:
    for workload in of_kind(objects(FORMS[form]), "Deployment"):
        pod = pod_of(workload)
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in (*pod["containers"], *pod["initContainers"]):
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
        assert not any("hostPath" in volume for volume in pod["volumes"])
        sidecars = [item for item in pod["containers"] if item["name"] != "crust"]
        assert all("--leader-election" in sidecar["args"] for sidecar in sidecars)


@pytest.mark.parametrize("form", ["ceph", "all"])
def test_replicas_of_controller_are_kept_apart_and_not_drained_together(form: str) -> None:
    items = objects(FORMS[form])
    for deployment in of_kind(items, "Deployment"):
        name = deployment["metadata"]["name"]
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert deployment["spec"]["replicas"] == 2
        ((rule,),) = pod_of(deployment)["affinity"]["podAntiAffinity"].values()
        budget = one(items, "PodDisruptionBudget", name)["spec"]
        for selector in (rule["podAffinityTerm"]["labelSelector"], budget["selector"]):
            assert selector["matchLabels"].items() <= labels.items()
            assert selector["matchLabels"] == {"app.kubernetes.io/name": name}
        assert budget["maxUnavailable"] == 1
    assert of_kind(objects(FORMS["one-controller"]), "PodDisruptionBudget") == []


@pytest.mark.parametrize("form", FORMS)
def test_image_of_crust_has_the_charts_version(form: str) -> None:
    images = [container["image"] for container in containers(form)]
    ours = {image for image in images if "sig-storage" not in image}
    digest = f"@sha256:{'0' * 64}" if form == "all" else ""
    repository = "registry.example/crust" if form == "all" else "crust-csi"
    metadata = yaml.safe_load((chart.CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert metadata["appVersion"] == metadata["version"]
    assert ours == {f"{repository}:{metadata['version']}{digest}"}


@pytest.mark.parametrize("form", FORMS)
def test_pod_is_scheduled_first_and_killed_last(form: str) -> None:
    for workload in workloads(form):
        pod = pod_of(workload)
        is_node = workload["kind"] == "DaemonSet"
        assert pod["priorityClassName"] == f"system-{'node' if is_node else 'cluster'}-critical"
        assert ({"operator": "Exists"} in pod["tolerations"]) is is_node
        for container in pod["containers"]:
            assert set(container["resources"]) == {"requests"}, "a limit kills e2fsck half-way"
        for volume in pod["volumes"]:
            is_typed = volume.get("hostPath", {"type": "-"}).get("type")
            assert is_typed, "a missing path is made as a directory"


@pytest.mark.parametrize("form", FORMS)
def test_liveness_never_asks_probe_and_kills_in_a_minute(form: str) -> None:
    """A controller whose pool is away answers CSI's Probe with ready: false, and is alive; its sidecars wait."""
    for workload in workloads(form):
        probed = {
            container["name"]: container["livenessProbe"]
            for container in pod_of(workload)["containers"]
            if "livenessProbe" in container
        }
        assert set(probed) == {"crust"}
        assert probed["crust"]["httpGet"] == {"path": "/healthz", "port": "metrics"}
        assert probed["crust"]["timeoutSeconds"] > monitoring.ANSWER_S
        assert longest_hang_s(probed["crust"]) <= 60


@pytest.mark.parametrize("form", FORMS)
def test_sidecars_of_a_node_have_no_capability(form: str) -> None:
    for container in node_pod(form)["containers"]:
        if container["name"] != "crust":
            context = container["securityContext"]
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context["allowPrivilegeEscalation"] is False
            assert context["seccompProfile"] == {"type": "RuntimeDefault"}


@pytest.mark.parametrize("form", FORMS)
def test_every_port_has_its_own_number_and_answers_there(form: str) -> None:
    for workload in workloads(form):
        ports = {}
        for container in pod_of(workload)["containers"]:
            (port,) = container["ports"]
            name, number = port["name"], port["containerPort"]
            ports[name] = number
            if container["name"] != "crust":
                assert f"--http-endpoint=:{number}" in container["args"]
                assert container["name"] == f"csi-{name}"
        assert len(set(ports.values())) == len(ports)
    assert node_settings(form).metrics_address == f"0.0.0.0:{ports['metrics']}"


def test_network_policy_and_monitor_are_of_all_pods_and_ports() -> None:
    items = objects(FORMS["all"])
    policy, monitor = one(items, "NetworkPolicy")["spec"], one(items, "PodMonitor")["spec"]
    labels = [item["spec"]["template"]["metadata"]["labels"] for item in workloads("all")]
    names = {each["app.kubernetes.io/name"] for each in labels}
    for selector in (policy["podSelector"], monitor["selector"]):
        (expression,) = selector["matchExpressions"]
        assert (expression["key"], set(expression["values"])) == ("app.kubernetes.io/name", names)
    every = [port for item in containers("all") for port in item.get("ports", ())]
    ports = {port["name"]: port["containerPort"] for port in every}
    (rule,) = policy["ingress"]
    (open_ports,) = rule["ports"]
    assert set(ports.values()) == set(range(open_ports["port"], open_ports["endPort"] + 1))
    assert {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]} == set(ports)
    assert policy["policyTypes"] == ["Ingress"]
    closed = one(objects("networkPolicy: {from: []}"), "NetworkPolicy")["spec"]
    assert closed["ingress"] == []


def test_rules_of_the_operator_are_those_of_the_file() -> None:
    file = yaml.safe_load((chart.CHART / "files/crust-rules.yaml").read_text(encoding="utf-8"))
    assert one(objects(FORMS["all"]), "PrometheusRule")["spec"] == file


def test_runtime_class_has_the_handler_of_the_settings() -> None:
    made = one(objects(FORMS["all"]), "RuntimeClass")
    assert (made["metadata"]["name"], made["handler"]) == ("kata-qemu", "kata")
    kubernetes = node_settings("all").proxy.kubernetes
    assert kubernetes is not None
    assert kubernetes.runtime_handlers == ("kata",)
    assert of_kind(objects(), "RuntimeClass") == []


@pytest.mark.parametrize("form", FORMS)
def test_node_pod_alone_sees_the_processes_of_its_host(form: str) -> None:
    """Without them the users of a device would not be seen (docs/security.md)."""
    assert node_pod(form)["hostPID"]
    assert not any(
        "hostPID" in pod_of(item) for item in of_kind(objects(FORMS[form]), "Deployment")
    )


@pytest.mark.parametrize("form", FORMS)
def test_node_pod_mounts_no_secret(form: str) -> None:
    kinds = {key for volume in node_pod(form)["volumes"] for key in volume} - {"name"}
    assert kinds == {"configMap", "hostPath", "emptyDir"}


def test_secrets_of_class_are_its_drivers_or_its_own() -> None:
    items = objects(FORMS["all"])
    parameters = one(items, "StorageClass", "crust-rbd")["parameters"]
    for step, key in itertools.product(("stage", "publish", "expand"), ("name", "namespace")):
        value = parameters[f"csi.storage.k8s.io/node-{step}-secret-{key}"]
        assert value == {"name": "crust-rbd-node", "namespace": chart.NAMESPACE}[key]
    own = one(items, "StorageClass", "team-a")["parameters"]
    assert own["csi.storage.k8s.io/node-stage-secret-name"] == "ceph-${pvc.namespace}"
    assert own["csi.storage.k8s.io/node-publish-secret-name"] == "team-a-node"
