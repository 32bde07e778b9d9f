"""What a node's account may write in the API, asked of an API server that has the chart's roles and policies.

The tokens are those of pods on two nodes, so the API server itself says which node has which. Nothing else of a
cluster runs: objects are kept, and nobody acts on them.
"""

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import admitted_objects, capabilities, chart, chart_forms
from tests.support.admission import Object
from tests.support.admitted_objects import ELSEWHERE, OTHER_SOURCES, changed, content, volume
from tests.support.kubernetes.control_plane import ControlPlane
from tests.support.kubernetes.kubectl import Kubectl, until

NODES = ("node-1", "node-2")
ACCOUNT = "crust-node"
RIGHTS = (
    "ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding",
    "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding",
)  # fmt: skip
VOLUMES, CONTENTS = "crust-persistentvolumes", "crust-snapshotcontents"
SPEC: Object = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
SNAPSHOTS = "snapshot.storage.k8s.io"


def definition(kind: str) -> Object:
    """A CustomResourceDefinition of external-snapshotter, as far as a policy reads its objects."""
    plural = f"{kind.lower()}s"
    schema = {"type": "object", "properties": {"spec": SPEC, "status": SPEC}}
    version = {
        "name": "v1",
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {"status": {}},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{SNAPSHOTS}",
            "annotations": {"api-approved.kubernetes.io": "unapproved, for tests"},
        },
        "spec": {
            "group": SNAPSHOTS,
            "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
            "scope": "Cluster",
            "versions": [version],
        },
    }


def pod_on(node: str) -> Object:
    """A pod of the account, which never runs."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"on-{node}", "namespace": chart.NAMESPACE},
        "spec": {
            "serviceAccountName": ACCOUNT,
            "nodeName": node,
            "containers": [{"name": "crust", "image": "crust"}],
        },
    }


def named(item: Object, name: str) -> Object:
    return changed(item, lambda new: new["metadata"].update(name=name))


def says(refusal: str, policy: str, words: str) -> bool:
    """Whether it is the refusal of a policy, with the words of its message."""
    return f"ValidatingAdmissionPolicy '{policy}'" in refusal and words in refusal


@dataclass(frozen=True, slots=True)
class Api:
    """Its users: an administrator, the account with a token of a pod on each node, and with a token of no pod."""

    admin: Kubectl
    nodes: dict[str, Kubectl]
    unbound: Kubectl

    @classmethod
    def confined(cls, plane: ControlPlane) -> "Api":
        """With the rights of the chart, and the policies in force."""
        admin = plane.admin
        namespaces = [
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
            for name in (chart.NAMESPACE, "tenant")
        ]
        nodes = [{"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}} for name in NODES]
        admin.apply(*namespaces, *nodes, definition("VolumeSnapshotContent"))
        items = chart.objects(chart_forms.FORMS["snapshots"])
        admin.apply(*chart.of_kind(items, *RIGHTS))
        admin.apply(*map(pod_on, NODES))
        made = ("create", "token", ACCOUNT, f"--namespace={chart.NAMESPACE}")
        tokens = {
            node: admin.run(*made, "--bound-object-kind=Pod", f"--bound-object-name=on-{node}")
            for node in NODES
        }
        users = {node: plane.user(f"on-{node}", token.strip()) for node, token in tokens.items()}
        api = cls(admin, users, plane.user("unbound", admin.run(*made).strip()))
        admin.wait("condition=Established", f"crd/volumesnapshotcontents.{SNAPSHOTS}")
        admin.apply(named(content("node-2"), "theirs"))
        item, change = admitted_objects.of_source("hostPath"), {"metadata": {"labels": {"a": "b"}}}
        kind = "volumesnapshotcontent"
        # the API server reads its own policies by a watch
        until(lambda: says(api.refusal_to_make(item), VOLUMES, ""))
        until(lambda: says(api.refusal_to_change(kind, "theirs", change), CONTENTS, ""))
        return api

    def refusal_to_make(self, item: Object, node: str = "node-1") -> str:
        """What a node's pod is told that would make an object; empty: it may."""
        return self.nodes[node].refusal(
            "create", "--dry-run=server", "--validate=false", "--filename=-", given=item
        )

    def refusal_to_change(self, kind: str, name: str, patch: Any, node: str = "node-1") -> str:
        """What a node's pod is told that would change an object."""
        change = f"--patch={json.dumps(patch)}"
        return self.nodes[node].refusal(
            "patch", kind, name, "--dry-run=server", "--type=merge", change
        )

    def refusal_to_delete(self, kind: str, name: str, node: str = "node-1") -> str:
        """What a node's pod is told that would delete an object."""
        return self.nodes[node].refusal("delete", kind, name, "--dry-run=server")


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    capabilities.need("kubernetes")
    with tempfile.TemporaryDirectory(prefix="k-") as directory:
        plane = ControlPlane(Path(directory), port=8443, etcd_port=12379)
        with plane.api_running():
            yield Api.confined(plane)


def test_api_server_lets_pod_keep_volumes_of_its_node(api: Api) -> None:
    mine = api.nodes["node-1"]
    mine.run("create", "--filename=-", given=json.dumps(named(volume(), "mine")))
    bound = {"metadata": {"finalizers": None}, "spec": {"claimRef": {"uid": "u"}}}
    assert api.refusal_to_change("pv", "mine", bound) == ""
    for refusal in (
        api.refusal_to_change("pv", "mine", bound, "node-2"),
        api.refusal_to_delete("pv", "mine", "node-2"),
    ):
        assert says(refusal, VOLUMES, "of its own node alone")
    mine.run("delete", "pv", "mine", "--wait=false")


@pytest.mark.parametrize("source", OTHER_SOURCES)
def test_api_server_refuses_volume_of_another_source(api: Api, source: str) -> None:
    item = named(admitted_objects.of_source(source), source.lower())
    assert says(api.refusal_to_make(item), VOLUMES, "of its own CSI driver alone")
    api.admin.run("create", "--filename=-", given=json.dumps(item))
    refused = (
        api.refusal_to_delete("pv", source.lower()),
        api.refusal_to_change("pv", source.lower(), {"spec": {"capacity": {"storage": "2Gi"}}}),
    )
    assert all(says(refusal, VOLUMES, "of its own CSI driver alone") for refusal in refused)


def test_api_server_refuses_volume_of_another_driver(api: Api) -> None:
    other = volume(csi={"driver": "ebs.csi.example.com", "volumeHandle": "v"})
    assert says(api.refusal_to_make(other), VOLUMES, "of its own CSI driver alone")


@pytest.mark.parametrize("where", ELSEWHERE)
def test_api_server_refuses_volume_that_another_node_has(api: Api, where: str) -> None:
    refusal = api.refusal_to_make(ELSEWHERE[where])
    if where in ("not-required", "no-term"):
        assert "is invalid" in refusal  # the API server itself refuses it to everybody
    else:
        assert says(refusal, VOLUMES, "of its own node alone")


def test_api_server_lets_size_alone_of_others_change(api: Api) -> None:
    """The resizer that leads is on one node, and marks the sizes of the volumes of all."""
    theirs = named(volume("node-2"), "theirs")
    api.nodes["node-2"].run("create", "--filename=-", given=json.dumps(theirs))
    grown = {"spec": {"capacity": {"storage": "2Gi"}}}
    assert api.refusal_to_change("pv", "theirs", grown) == ""
    for change in (
        {"spec": {"claimRef": {"namespace": "attacker", "name": "mine"}}},
        {"spec": {"mountOptions": ["suid"]}},
        {"spec": {"persistentVolumeReclaimPolicy": "Retain"}},
        {"metadata": {"finalizers": None}},
    ):
        refusal = api.refusal_to_change("pv", "theirs", change)
        assert says(refusal, VOLUMES, "of its own node alone")


@pytest.mark.parametrize("namespace", ["kube-system", "tenant", chart.NAMESPACE])
def test_api_server_refuses_secret_of_another_namespace(api: Api, namespace: str) -> None:
    refusal = api.refusal_to_make(admitted_objects.naming_secret_of(namespace))
    if namespace == "kube-system":
        assert says(refusal, VOLUMES, "names Secrets of")
    else:
        assert refusal == ""


def test_api_server_refuses_token_of_no_pod(api: Api) -> None:
    refusal = api.unbound.refusal("create", "--dry-run=server", "--filename=-", given=volume())
    assert says(refusal, VOLUMES, "node in the pod's token")


def test_api_server_refuses_snapshots_of_another_node_or_driver(api: Api) -> None:
    api.admin.apply(
        named(content(), "mine"), named(content(driver="ebs.csi.example.com"), "of-another-driver")
    )
    change = {"metadata": {"annotations": {"a": "b"}}}
    kind = "volumesnapshotcontent"
    assert api.refusal_to_change(kind, "mine", change) == ""
    refusal = api.refusal_to_change(kind, "of-another-driver", change)
    assert says(refusal, CONTENTS, "of its own CSI driver alone")
    ready = {**api.admin.get(kind, "mine"), "status": {"readyToUse": True}}
    path = f"/apis/{SNAPSHOTS}/v1/volumesnapshotcontents/mine/status?dryRun=All"
    put = ("replace", f"--raw={path}", "--filename=-")
    assert api.nodes["node-1"].refusal(*put, given=ready) == ""
    for refusal in (
        api.refusal_to_change(kind, "mine", change, "node-2"),
        api.nodes["node-2"].refusal(*put, given=ready),
    ):
        assert says(refusal, CONTENTS, "of its own node alone")


def test_administrator_is_not_confined(api: Api) -> None:
    item = named(admitted_objects.of_source("hostPath"), "of-administrator")
    assert api.admin.refusal("create", "--dry-run=server", "--filename=-", given=item) == ""


@pytest.mark.parametrize("namespace", ["tenant", chart.NAMESPACE])
def test_account_writes_only_what_the_page_names(api: Api, namespace: str) -> None:
    """docs/security.md, "Not defended": what a stolen token of a node can write beside what the policies confine."""
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectRulesReview",
        "spec": {"namespace": namespace},
    }
    asked = ("create", "--raw=/apis/authorization.k8s.io/v1/selfsubjectrulesreviews")
    answer = api.nodes["node-1"].run(*asked, "--filename=-", given=json.dumps(review))
    writes = {
        f"{group}/{resource}"
        for rule in json.loads(answer)["status"]["resourceRules"]
        if {"create", "update", "patch", "delete", "*"} & set(rule["verbs"])
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        if not resource.startswith("selfsubject")
    }
    of_own_namespace = {"storage.k8s.io/csistoragecapacities", "coordination.k8s.io/leases"}
    confined = {
        "/persistentvolumes",
        f"{SNAPSHOTS}/volumesnapshotcontents",
        f"{SNAPSHOTS}/volumesnapshotcontents/status",
    }
    named_there = {
        "/persistentvolumeclaims",
        "/persistentvolumeclaims/status",
        f"{SNAPSHOTS}/volumesnapshots",
        "/events",
        *(of_own_namespace if namespace == chart.NAMESPACE else ()),
    }
    assert writes == confined | named_there
