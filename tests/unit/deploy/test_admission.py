"""deploy/helm: what the policies let a pod of one node do with volumes and snapshots of the cluster."""

import pytest

from crust.blockdriver.controller import topology
from tests.support.admission import Object, Pod, refusals
from tests.support.admitted_objects import (
    ELSEWHERE,
    OTHER_SOURCES,
    changed,
    content,
    naming_secret_of,
    of_source,
    volume,
    with_rule,
)
from tests.support.chart import objects, of_kind, one
from tests.support.chart_forms import FORMS

OF_VOLUMES, OF_SNAPSHOTS = "crust-persistentvolumes", "crust-snapshotcontents"
HERE = Pod()


def of(name: str, form: str = "snapshots") -> Object:
    return one(objects(FORMS[form]), "ValidatingAdmissionPolicy", name)


def test_pod_makes_changes_and_deletes_volume_of_its_own_node() -> None:
    mine = volume()
    bound = changed(mine, lambda item: item["metadata"].pop("finalizers"))
    for new, old in ((mine, None), (bound, mine), (None, mine)):
        assert refusals(of(OF_VOLUMES), HERE, new, old) == []


@pytest.mark.parametrize("source", OTHER_SOURCES)
def test_volume_of_another_source_is_refused(source: str) -> None:
    """Pod Security does not look behind a claim: such a volume would be a directory of any node."""
    for new, old in ((of_source(source), None), (None, of_source(source))):
        (first, *_) = refusals(of(OF_VOLUMES), HERE, new, old)
        assert "of its own CSI driver alone" in first


def test_volume_of_another_driver_is_refused() -> None:
    other = volume(csi={"driver": "ebs.csi.example.com", "volumeHandle": "v"})
    for new, old in ((other, None), (None, other), (other, other)):
        (first,) = refusals(of(OF_VOLUMES), HERE, new, old)
        assert "of its own CSI driver alone" in first


@pytest.mark.parametrize("where", ELSEWHERE)
def test_volume_that_another_node_may_have_is_refused(where: str) -> None:
    for new, old in ((ELSEWHERE[where], None), (None, ELSEWHERE[where])):
        (only,) = refusals(of(OF_VOLUMES), HERE, new, old)
        assert "of its own node alone" in only


def test_volume_of_another_node_changes_its_size_alone() -> None:
    """The resizer that leads is on one node, and marks the sizes of the volumes of all."""
    old = volume("node-2")
    grown = volume("node-2", capacity={"storage": "2Gi"})
    assert refusals(of(OF_VOLUMES), HERE, grown, old) == []
    for field, value in {
        "claimRef": {"namespace": "attacker", "name": "mine"},
        "mountOptions": ["suid"],
        "persistentVolumeReclaimPolicy": "Retain",
    }.items():
        (only,) = refusals(of(OF_VOLUMES), HERE, volume("node-2", **{field: value}), old)
        assert "of its own node alone" in only
    for freed in (
        changed(old, lambda item: item["spec"].pop("claimRef")),
        changed(old, lambda item: item["metadata"].pop("finalizers")),
    ):
        assert refusals(of(OF_VOLUMES), HERE, freed, old)


def test_affinity_of_another_node_is_not_changed() -> None:
    assert refusals(of(OF_VOLUMES), HERE, volume("node-1"), volume("node-2"))
    assert refusals(of(OF_VOLUMES), HERE, volume("node-2"), volume("node-1"))


@pytest.mark.parametrize("pod", [Pod(node=None), Pod(node="")])
def test_token_without_a_node_makes_no_volume(pod: Pod) -> None:
    nowhere = {"key": topology.KEY, "operator": "In", "values": [""]}
    for new in (volume(), with_rule({"matchExpressions": [nowhere]})):
        (only,) = refusals(of(OF_VOLUMES), pod, new, None)
        assert "node in the pod's token" in only


def test_volume_names_secrets_of_claim_and_crust_alone() -> None:
    for namespace in ("tenant", "crust-system"):
        assert refusals(of(OF_VOLUMES), HERE, naming_secret_of(namespace), None) == []
    for namespace in ("kube-system", "crust"):
        (only,) = refusals(of(OF_VOLUMES), HERE, naming_secret_of(namespace), None)
        assert "names Secrets of" in only


def test_other_accounts_are_not_confined() -> None:
    administrator = Pod(account="storage-admin", node=None)
    assert refusals(of(OF_VOLUMES), administrator, of_source("hostPath"), None) == []
    elsewhere = Pod(namespace="storage")  # an account of the same name, which is not crust's
    assert refusals(of(OF_VOLUMES), elsewhere, of_source("hostPath"), None) == []


@pytest.mark.parametrize("form", FORMS)
def test_account_that_may_make_volumes_is_confined(form: str) -> None:
    """Wherever the role is, the policy is, its binding denies, and the policy is about the account of the pods."""
    items = objects(FORMS[form])
    roles = {item["metadata"]["name"] for item in of_kind(items, "ClusterRole")}
    daemon_set = one(items, "DaemonSet")
    account = daemon_set["spec"]["template"]["spec"]["serviceAccountName"]
    stem = account.removesuffix("-node")
    expected = set()
    if f"{stem}-provisioner" in roles:
        expected.add(f"{stem}-persistentvolumes")
        policy = of(f"{stem}-persistentvolumes", form)
        assert refusals(policy, Pod(account=account), of_source("hostPath"), None)
    if f"{stem}-snapshotter" in roles:
        expected.add(f"{stem}-snapshotcontents")
    bindings = {
        item["spec"]["policyName"]: item["spec"]["validationActions"]
        for item in of_kind(items, "ValidatingAdmissionPolicyBinding")
    }
    assert bindings == {name: ["Deny"] for name in expected}


@pytest.mark.parametrize("form", ["snapshots", "single-node-groups"])
@pytest.mark.parametrize(("name", "role"), [
    (OF_VOLUMES, "crust-provisioner"), (OF_SNAPSHOTS, "crust-snapshotter"),
])  # fmt: skip
def test_policy_is_asked_about_all_that_role_changes(name: str, role: str, form: str) -> None:
    rules = one(objects(FORMS[form]), "ClusterRole", role)["rules"]
    asked = {
        (group, resource)
        for rule in of(name, form)["spec"]["matchConstraints"]["resourceRules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        if set(rule["operations"]) == {"CREATE", "UPDATE", "DELETE"}
    }
    may_change = {
        (group, resource)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        if set(rule["verbs"]) & {"create", "update", "patch", "delete"}
    }
    assert asked == {
        (group, resource)
        for group, resource in may_change
        if "contents" in resource or resource == "persistentvolumes"
    }


def test_pod_changes_snapshots_of_its_node_and_driver_alone() -> None:
    mine = content()
    unlabelled = changed(mine, lambda item: item["metadata"].pop("labels"))
    assert refusals(of(OF_SNAPSHOTS), HERE, mine, mine) == []
    for new, old in (
        (content("node-2"), content("node-2")),
        (mine, content("node-2")),
        (content("node-2"), mine),
        (mine, unlabelled),
        (content(driver="ebs.csi.example.com"), content(driver="ebs.csi.example.com")),
    ):
        assert len(refusals(of(OF_SNAPSHOTS), HERE, new, old)) == 1
    assert refusals(of(OF_SNAPSHOTS), Pod(node=None), mine, mine)


def test_contents_of_a_single_node_have_no_label() -> None:
    """Its snapshot controller writes none; the driver is checked all the same."""
    unlabelled = changed(content(), lambda item: item["metadata"].pop("labels"))
    policy = of(OF_SNAPSHOTS, "single-node-groups")
    assert refusals(policy, HERE, unlabelled, unlabelled) == []
    other = content(driver="ebs.csi.example.com")
    assert len(refusals(policy, HERE, other, other)) == 1


def test_policies_of_another_name_and_driver_confine_its_account() -> None:
    pod = Pod(account="store-node")
    policy = of("store-persistentvolumes", "all")
    own = volume(csi={"driver": "disks.example.com", "volumeHandle": "v"})
    assert refusals(policy, pod, own, None) == []
    assert refusals(policy, pod, volume(), None)
    assert refusals(policy, HERE, volume(), None) == []
    of_contents = of("store-snapshotcontents", "all")
    assert refusals(of_contents, pod, *[content(driver="disks.example.com")] * 2) == []
    assert refusals(of_contents, pod, content(), content())
