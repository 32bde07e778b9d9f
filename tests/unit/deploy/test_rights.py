"""The roles of deploy/helm: each part may do what it does, and no account has the rights of an absent part."""

import asyncio
import itertools
from collections.abc import Iterable
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from crust.core.settings import loading
from crust.core.supervised import Health
from crust.csi_shim.settings import ShimSettings
from crust.kubernetes_api import api as kubernetes_api
from crust.kubernetes_api.volumes_in_use import VolumesInUse
from tests.support import page_pods
from tests.support.chart import Object, objects, of_kind, one
from tests.support.chart_forms import FORMS
from tests.support.nodes import fake_kubernetes
from tests.support.nodes.fake_kubernetes import FakeKubernetes, recorded
from tests.support.raised import raised

Permission = tuple[str, str, str]
SNAPSHOTS, GROUPS = "snapshot.storage.k8s.io", "groupsnapshot.storage.k8s.io"
STORAGE, LEASES = "storage.k8s.io", "coordination.k8s.io"
NEEDED: dict[str, set[Permission]] = {
    "csi-provisioner": {
        ("", "persistentvolumes", "patch"),
        ("", "persistentvolumeclaims", "update"),
        (STORAGE, "volumeattributesclasses", "watch"),
    },
    "csi-resizer": {
        ("", "persistentvolumeclaims/status", "patch"),
        ("", "persistentvolumes", "patch"),
        ("", "pods", "watch"),
        (STORAGE, "volumeattributesclasses", "watch"),
    },
    "csi-health-monitor": {
        ("", "persistentvolumeclaims", "watch"),
        ("", "nodes", "watch"),
        ("", "pods", "watch"),
        ("", "events", "create"),
    },
    "csi-snapshotter": {
        (SNAPSHOTS, "volumesnapshotcontents/status", "patch"),
        (SNAPSHOTS, "volumesnapshots", "update"),  # of the provisioner, for claims from a snapshot
        (SNAPSHOTS, "volumesnapshotcontents", "list"),
    },
    "--leader-election": {(LEASES, "leases", "create"), (LEASES, "leases", "update")},
    "--enable-capacity": {(STORAGE, "csistoragecapacities", "create")},
    "--feature-gates=CSIVolumeGroupSnapshot=true": {
        (GROUPS, "volumegroupsnapshotcontents/status", "patch")
    },
}
"""What the sidecars ask of the API, by their own roles: of each, and of a flag, what is easily forgotten."""
OF_PART = {
    "--leader-election": {LEASES},
    "csi-snapshotter": {SNAPSHOTS},
    "--feature-gates=CSIVolumeGroupSnapshot=true": {GROUPS},
}
"""Groups of the API that nobody else needs."""


def permissions(rules: Iterable[Object]) -> set[Permission]:
    """What rules of roles allow."""
    return {
        permission
        for rule in rules
        for permission in itertools.product(rule["apiGroups"], rule["resources"], rule["verbs"])
    }


def allowed(form: str, account: str) -> set[Permission]:
    """What the roles of a service account allow."""
    items = objects(FORMS[form])
    bound = {
        (binding["roleRef"]["kind"], binding["roleRef"]["name"])
        for binding in of_kind(items, "ClusterRoleBinding", "RoleBinding")
        if account in {subject["name"] for subject in binding["subjects"]}
    }
    roles = of_kind(items, "ClusterRole", "Role")
    of_account = [role for role in roles if (role["kind"], role["metadata"]["name"]) in bound]
    return permissions(rule for role in of_account for rule in role["rules"])


def accounts(form: str) -> list[tuple[str, list[Object]]]:
    """Each service account of pods, with the pods' containers."""
    pods = [
        workload["spec"]["template"]["spec"]
        for workload in of_kind(objects(FORMS[form]), "DaemonSet", "Deployment")
    ]
    return [(pod["serviceAccountName"], pod["containers"]) for pod in pods]


def parts(containers: list[Object]) -> set[str]:
    """The names of the containers, and their arguments."""
    return {word for item in containers for word in (item["name"], *item["args"])}


@pytest.mark.parametrize("form", FORMS)
def test_sidecars_may_do_what_they_do(form: str) -> None:
    for account, containers in accounts(form):
        assert account in {
            item["metadata"]["name"] for item in of_kind(objects(FORMS[form]), "ServiceAccount")
        }
        needed = {rule for part in parts(containers) for rule in NEEDED.get(part, set())}
        assert needed - allowed(form, account) == set()


@pytest.mark.parametrize("form", FORMS)
def test_account_has_no_right_of_a_part_that_is_absent(form: str) -> None:
    for account, containers in accounts(form):
        groups = {group for group, _, _ in allowed(form, account)}
        present = parts(containers)
        for part, of_part in OF_PART.items():
            assert bool(groups & of_part) is (part in present), (account, part)
        if "csi-provisioner" not in present:
            assert "persistentvolumes" not in {name for _, name, _ in allowed(form, account)}


@pytest.mark.parametrize("form", FORMS)
def test_pods_are_listed_only_for_a_sidecar_or_runtime_class(form: str) -> None:
    says = "runtime-class" in yaml.safe_dump_all(of_kind(objects(FORMS[form]), "StorageClass"))
    for account, containers in accounts(form):
        rights = allowed(form, account)
        is_node = account.endswith("-node")
        assert (("node.k8s.io", "runtimeclasses", "list") in rights) is (is_node and says)
        sidecars = {"csi-resizer", "csi-health-monitor"} & parts(containers)
        listing = (is_node and says) or bool(sidecars)
        assert (("", "pods", "list") in rights) is listing


def test_least_of_rights_is_those_of_provisioner() -> None:
    (account, _), = accounts("least")  # fmt: skip
    assert {f"{group}/{name}" for group, name, _ in allowed("least", account)} == {
        "/persistentvolumes", "/persistentvolumeclaims", "/events", "/pods", "storage.k8s.io/storageclasses",
        "storage.k8s.io/volumeattributesclasses", "storage.k8s.io/csistoragecapacities",
    }  # fmt: skip
    assert ("", "pods", "get") in allowed("least", account)
    assert ("", "pods", "list") not in allowed("least", account)


@pytest.mark.parametrize("form", FORMS)
def test_attachments_are_watched_where_driver_attaches(form: str) -> None:
    """csi-provisioner watches them for a driver with PUBLISH_UNPUBLISH_VOLUME alone."""
    for account, _ in accounts(form):
        watches = (STORAGE, "volumeattachments", "watch") in allowed(form, account)
        assert watches is form.startswith("single-node")


def test_vendors_controller_container_is_accepted_by_published_schema() -> None:
    patch = yaml.safe_load(page_pods.manifests()[-1])
    deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "x"}, **patch}
    deployment["spec"]["selector"] = {"matchLabels": {"app": "x"}}  # the vendor's Deployment has it
    kubernetes_validate.validate(deployment, "1.37", strict=True)
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


def test_manifests_of_a_wrapped_node_are_accepted_by_published_schema() -> None:
    patch, proxy = map(yaml.safe_load, page_pods.manifests()[:2])
    patch["spec"]["selector"] = {"matchLabels": {"app": "x"}}  # the vendor's DaemonSet has it
    patch["spec"]["template"]["metadata"] = {"labels": {"app": "x"}}
    vendors = {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "x"}, **patch}
    for manifest in (vendors, proxy):
        kubernetes_validate.validate(manifest, "1.37", strict=True)


async def test_vendors_controller_may_ask_exactly_what_a_detach_needs(tmp_path: Path) -> None:
    items = objects(FORMS["wrapped"])
    role = one(items, "ClusterRole", "crust-detach-csi.example.com")
    binding = one(items, "ClusterRoleBinding", "crust-detach-csi.example.com")
    (subject,) = binding["subjects"]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert (subject["name"], subject["namespace"]) == ("csi-example-controller", "csi-example")
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
