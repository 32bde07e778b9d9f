"""docs/kubernetes.md and the chart: the five steps, the sidecars and the values are those that the chart has."""

import re
import subprocess
import textwrap
from typing import Any

import kubernetes_validate
import yaml

from tests.support import chart
from tests.support.chart import objects, of_kind, one
from tests.support.chart_forms import FORMS
from tests.support.kubernetes import images
from tests.support.pages import page_blocks

PAGE = (chart.CHECKOUT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
THIRD_PARTY = chart.CHECKOUT / "tests/support/third_party/kubernetes"
STEPS = PAGE.partition("\n## Five steps")[2].partition("\n## ")[0]
VALUES = yaml.safe_load((chart.CHART / "values.yaml").read_text(encoding="utf-8"))


def test_claim_and_pod_of_the_steps_fit_the_chart() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", STEPS, re.DOTALL)
    claim, pod = yaml.safe_load_all(textwrap.dedent(f"   {block.lstrip()}"))
    for item in (claim, pod):
        kubernetes_validate.validate(item, "1.37", strict=True)
    used = one(objects(), "StorageClass", claim["spec"]["storageClassName"])
    assert used["parameters"]["crust.dev/defer"] == "always"
    assert used["parameters"]["crust.dev/runtime-handler"] == pod["spec"]["runtimeClassName"]
    one(objects(), "StorageClass", "crust-host")


def test_label_and_names_of_steps_are_those_of_chart() -> None:
    daemon_set = one(objects(), "DaemonSet")
    (label,) = re.findall(r"kubectl label node NODE (\S+)", STEPS)
    key, _, value = label.partition("=")
    assert daemon_set["spec"]["template"]["spec"]["nodeSelector"][key] == value
    assert f"daemonset/{daemon_set['metadata']['name']}" in STEPS
    assert f"--namespace {chart.NAMESPACE}" in STEPS
    namespace = one(objects(chart.choice("local")), "Namespace")
    for name, wanted in namespace["metadata"]["labels"].items():
        assert f"{name}={wanted}" in STEPS


def test_images_of_sidecars_are_those_of_the_page() -> None:
    named = set(re.findall(r"^\| `(csi-[a-z-]+:v[0-9.]+)` \|", PAGE, re.MULTILINE))
    used = {
        container["image"].removeprefix("registry.k8s.io/sig-storage/")
        for form in FORMS
        for workload in of_kind(objects(FORMS[form]), "DaemonSet", "Deployment")
        for container in workload["spec"]["template"]["spec"]["containers"]
        if container["name"] != "crust"
    }
    assert used == named


def test_sidecars_on_the_host_have_roles_and_arguments_of_chart() -> None:
    section = PAGE.partition("\n### Sidecars on the host")[2].partition("\n### ")[0]
    items = objects("snapshots: {enabled: true}")
    named = re.findall(r"for role in ([a-z ]+); do\s+kubectl (?:-n \S+ )?create (\w+)", section)
    for roles, binding in named:
        kind = {"clusterrolebinding": "ClusterRole", "rolebinding": "Role"}[binding]
        shipped = {role["metadata"]["name"] for role in of_kind(items, kind)} - {"crust-node"}
        assert {f"crust-{role}" for role in roles.split()} == shipped
    assert len(named) == 2
    pod = one(items, "DaemonSet")["spec"]["template"]["spec"]
    of_the_pod = ("--csi-address", "--http-endpoint", "--capacity-ownerref-level")
    wanted = {
        container["name"]: {
            argument.replace("$(NAMESPACE)", chart.NAMESPACE)
            for argument in container["args"]
            if not argument.startswith(of_the_pod)
        }
        for container in pod["containers"]
        if container["name"] != "crust"
    }
    lines = re.findall(r"ExecStart=/usr/local/bin/(\S+) (.*)", section)
    of_the_host = ("--kubeconfig", *of_the_pod)
    said = {
        program: {argument for argument in line.split() if not argument.startswith(of_the_host)}
        for program, line in lines
    }
    assert said == wanted


def value_at(path: str) -> Any:
    """The default of a value, by its path. Raises KeyError."""
    found: Any = VALUES
    for key in path.split("."):
        found = found[key]
    return found


def test_kubernetes_tests_build_sidecars_that_they_name() -> None:
    modules = (THIRD_PARTY / "sidecars/go.mod").read_text()
    built = re.findall(r"kubernetes-csi/external-(\w+)/v\d+ (v\S+)", modules)
    named = {name.rpartition("/")[2] for name in (*images.sidecars().values(), images.ATTACHER)}
    assert {f"csi-{role}:{version}" for role, version in built} == named


def test_page_names_the_versions_that_are_built() -> None:
    """docs/conformance.md, "In a real Kubernetes"."""
    page = page_blocks.text("conformance.md")
    for file, module, name in (
        ("go.mod", "k8s.io/kubernetes v", "Kubernetes "),
        ("etcd/go.mod", "go.etcd.io/etcd/server/v3 v", "etcd "),
        ("containerd.txt", "/cmd/containerd@v", "containerd "),
    ):
        (version,) = re.findall(
            rf"{module}([0-9.]+)$", (THIRD_PARTY / file).read_text(), re.MULTILINE
        )
        assert f"{name}{version}, " in page


def test_values_of_the_pages_exist() -> None:
    first = {f"`{key}`" for key in VALUES}
    named = set(re.findall(r"`((?:[a-zA-Z]+\.)*[a-zA-Z]+)=(?:true|false)`", PAGE))
    named |= set(re.findall(r"--set ([a-zA-Z.]+)=", PAGE))
    assert len(named) > 4
    for path in named:
        value_at(path)
    table = PAGE.partition("\n| values | what | needs |")[2].partition("\n\n")[0]
    assert {"`ceph`", "`wrapped`", "`monitoring`", "`networkPolicy`"} <= first
    assert [key for key in ("`ceph`", "`wrapped`", "`monitoring`") if key not in table] == []


def test_line_for_plain_manifests_puts_the_tag_into_each() -> None:
    """Theirs is that of the release, which a build of another commit does not make."""
    (script, path) = re.findall(
        r"^    sed '(.*)' (\S+) \| kubectl apply --filename -$", PAGE, re.M
    )[0]
    assert chart.CHECKOUT / path in chart.plain_manifests()
    for manifest in chart.plain_manifests():
        done = subprocess.run(["sed", script, manifest], capture_output=True, text=True, check=True)
        ours = [
            container["image"]
            for workload in of_kind(
                list(yaml.safe_load_all(done.stdout)), "DaemonSet", "Deployment"
            )
            for container in workload["spec"]["template"]["spec"]["containers"]
            if "sig-storage" not in container["image"]
        ]
        assert set(ours) == {"crust-csi:<version>"}, manifest


def test_no_page_names_an_image_of_one_version() -> None:
    pages = sorted((chart.CHECKOUT / "docs").rglob("*.md"))
    named = {tag for page in pages for tag in re.findall(r"crust-csi:([\w.<]+)", page.read_text())}
    assert named <= {"<version", "."}  # the second is sed's


def test_flag_of_snapshot_controller_is_named_where_it_is_needed() -> None:
    """Without it a snapshot of a local volume is never ready, and nothing says why."""
    flag = "--enable-distributed-snapshotting=true"
    notes = (chart.CHART / "templates" / "NOTES.txt").read_text(encoding="utf-8")
    values = (chart.CHART / "values.yaml").read_text(encoding="utf-8")
    assert [flag in text for text in (PAGE, notes, values)] == [True, True, True]
