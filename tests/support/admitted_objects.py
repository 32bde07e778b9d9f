"""Objects of the Kubernetes API that a node's account makes, and others that a node which is taken over would make.

The policies of deploy/helm are tried with them: by Google's CEL (`tests.support.admission`) and by an API server.
"""

import copy
from collections.abc import Callable
from typing import Any

from crust.blockdriver.controller import topology
from tests.support.admission import Object

OTHER_SOURCES: dict[str, Object] = {
    "hostPath": {"path": "/"},
    "local": {"path": "/"},
    "nfs": {"server": "192.0.2.1", "path": "/"},
    "iscsi": {"targetPortal": "192.0.2.1", "iqn": "iqn.2026-01.example:x", "lun": 0},
}


def volume(node: str = "node-1", **spec: Any) -> Object:
    """A PersistentVolume as external-provisioner makes it."""
    rule = {"key": topology.KEY, "operator": "In", "values": [topology.value_of(node)]}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": "pv-1", "finalizers": ["external-provisioner.example/finalizer"]},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "capacity": {"storage": "1Gi"},
            "claimRef": {"namespace": "tenant", "name": "data"},
            "csi": {"driver": "block.csi.crust.dev", "volumeHandle": "v", "fsType": "ext4"},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [rule]}]}},
            "persistentVolumeReclaimPolicy": "Delete",
            **spec,
        },
    }


def changed(original: Object, change: Callable[[Object], None]) -> Object:
    """A copy with a change."""
    new = copy.deepcopy(original)
    change(new)
    return new


def of_source(source: str) -> Object:
    """A volume of another source than a CSI driver."""

    def replace(item: Object) -> None:
        del item["spec"]["csi"]
        item["spec"][source] = OTHER_SOURCES[source]

    return changed(volume(), replace)


def with_affinity(affinity: Object | None) -> Object:
    """A volume that other nodes may have, or none."""
    made = volume()
    if affinity is None:
        del made["spec"]["nodeAffinity"]
    else:
        made["spec"]["nodeAffinity"] = affinity
    return made


def with_rule(*terms: Object) -> Object:
    """A volume with these terms of its node affinity."""
    return with_affinity({"required": {"nodeSelectorTerms": list(terms)}})


ELSEWHERE: dict[str, Object] = {
    "another": volume("node-2"),
    "none": with_affinity(None),
    "not-required": with_affinity({}),
    "no-term": with_rule(),
    "empty-term": with_rule({}),
    "two-nodes": with_rule(
        {
            "matchExpressions": [
                {"key": "crust.dev/node", "operator": "In", "values": ["node-1", "node-2"]}
            ]
        }
    ),
    "not-in": with_rule(
        {"matchExpressions": [{"key": "crust.dev/node", "operator": "NotIn", "values": ["node-1"]}]}
    ),
    "any": with_rule({"matchExpressions": [{"key": "crust.dev/node", "operator": "Exists"}]}),
    "second-term": with_rule(
        {"matchExpressions": [{"key": "crust.dev/node", "operator": "In", "values": ["node-1"]}]},
        {"matchExpressions": [{"key": "kubernetes.io/os", "operator": "Exists"}]},
    ),
}
"""Volumes that not the pod's own node alone may have."""


def naming_secret_of(namespace: str) -> Object:
    """A volume whose kubelet is to read a Secret."""
    secret = {"nodePublishSecretRef": {"name": "key", "namespace": namespace}}
    return volume(csi={**volume()["spec"]["csi"], **secret})


def content(node: str = "node-1", driver: str = "block.csi.crust.dev") -> Object:
    """The content of a snapshot, as the snapshot controller labels it."""
    labels = {"snapshot.storage.kubernetes.io/managed-by": node}
    return {
        "apiVersion": "snapshot.storage.k8s.io/v1",
        "kind": "VolumeSnapshotContent",
        "metadata": {"name": "c", "labels": labels},
        "spec": {"driver": driver},
    }
