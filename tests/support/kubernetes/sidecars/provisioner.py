"""Makes the calls of csi-provisioner, whose modules no module proxy serves, in its place in the pods of the chart.

It has csi-provisioner's arguments, token and roles, and provisions for its own node alone (--node-deployment): a
claim that the scheduler has given to this node gets a volume and a PersistentVolume; one that nobody claims any more
is deleted. It knows neither content sources nor secrets, says the capacity of a class once, and reports a failure to
its log alone.
"""

import argparse
import os
import urllib.error
from dataclasses import dataclass
from typing import Any

import grpc

from crust.wire.csi.v1 import csi_pb2, csi_pb2_grpc
from tests.support.kubernetes.sidecars import api

_SELECTED = "volume.kubernetes.io/selected-node"
_FINALIZER = "external-provisioner.volume.kubernetes.io/finalizer"
_FS_TYPE = "csi.storage.k8s.io/fstype"
_UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
_TIMEOUT_S = 60
_EVERY_S = 2


def bytes_of(quantity: str) -> int:
    """A quantity of Kubernetes."""
    return int(quantity[:-2]) * _UNITS[quantity[-2:]] if quantity[-2:] in _UNITS else int(quantity)


@dataclass(frozen=True, slots=True)
class Provisioner:
    """The volumes of one driver on one node."""

    api: api.Api
    channel: grpc.Channel
    driver: str
    node: str
    namespace: str

    def look(self) -> None:
        """Do what is to be done now."""
        classes = {
            item["metadata"]["name"]: item
            for item in self.api.items(api.CLASSES)
            if item["provisioner"] == self.driver
        }
        self._report_capacity(classes)
        volumes = {item["metadata"]["name"]: item for item in self.api.items(api.VOLUMES)}
        for claim in self.api.items(api.CLAIMS):
            name = f"pvc-{claim['metadata']['uid']}"
            is_mine = claim["metadata"].get("annotations", {}).get(_SELECTED) == self.node
            of_class = classes.get(claim["spec"].get("storageClassName", ""))
            if of_class and is_mine and name not in volumes and "volumeName" not in claim["spec"]:
                self._provision(name, claim, of_class)
        for name, volume in volumes.items():
            source = volume["spec"].get("csi", {})
            is_wanted = volume["status"].get("phase") != "Released"
            if source.get("driver") == self.driver and not is_wanted:
                self._delete(name, source["volumeHandle"])

    @property
    def _controller(self) -> csi_pb2_grpc.ControllerStub:
        return csi_pb2_grpc.ControllerStub(self.channel)

    def _topology(self) -> csi_pb2.Topology:
        node = csi_pb2_grpc.NodeStub(self.channel)
        answer = node.NodeGetInfo(csi_pb2.NodeGetInfoRequest(), timeout=_TIMEOUT_S)
        return csi_pb2.Topology(segments=answer.accessible_topology.segments)

    def _report_capacity(self, classes: dict[str, Any]) -> None:
        path = f"/apis/storage.k8s.io/v1/namespaces/{self.namespace}/csistoragecapacities"
        known = {item["storageClassName"] for item in self.api.items(path)}
        for name in classes.keys() - known:
            topology = self._topology()
            asked = csi_pb2.GetCapacityRequest(accessible_topology=topology)
            free = self._controller.GetCapacity(asked, timeout=_TIMEOUT_S).available_capacity
            self.api.ask(
                "POST",
                path,
                {
                    "apiVersion": "storage.k8s.io/v1",
                    "kind": "CSIStorageCapacity",
                    "metadata": {"generateName": "csisc-"},
                    "storageClassName": name,
                    "capacity": str(free),
                    "nodeTopology": {"matchLabels": dict(topology.segments)},
                },
            )

    def _provision(self, name: str, claim: Any, of_class: Any) -> None:
        spec, parameters = claim["spec"], of_class["parameters"]
        fs_type = parameters.get(_FS_TYPE, "ext4")
        is_block = spec.get("volumeMode") == "Block"
        modes = csi_pb2.VolumeCapability.AccessMode
        is_of_one_pod = spec["accessModes"] == ["ReadWriteOncePod"]
        mode = modes(
            mode=modes.SINGLE_NODE_SINGLE_WRITER
            if is_of_one_pod
            else modes.SINGLE_NODE_MULTI_WRITER
        )
        capability = (
            csi_pb2.VolumeCapability(access_mode=mode, block=csi_pb2.VolumeCapability.BlockVolume())
            if is_block
            else csi_pb2.VolumeCapability(
                access_mode=mode, mount=csi_pb2.VolumeCapability.MountVolume(fs_type=fs_type)
            )
        )
        here = self._topology()
        size = csi_pb2.CapacityRange(
            required_bytes=bytes_of(spec["resources"]["requests"]["storage"])
        )
        request = csi_pb2.CreateVolumeRequest(
            name=name,
            capacity_range=size,
            volume_capabilities=[capability],
            parameters={k: v for k, v in parameters.items() if not k.startswith("csi.storage")},
            accessibility_requirements=csi_pb2.TopologyRequirement(
                requisite=[here], preferred=[here]
            ),
        )
        made = self._controller.CreateVolume(request, timeout=_TIMEOUT_S).volume
        terms = [
            {
                "matchExpressions": [
                    {"key": key, "operator": "In", "values": [value]}
                    for key, value in topology.segments.items()
                ]
            }
            for topology in made.accessible_topology
        ]
        source = {
            "driver": self.driver,
            "volumeHandle": made.volume_id,
            "volumeAttributes": dict(made.volume_context),
        }
        owner = {key: claim["metadata"][key] for key in ("name", "namespace", "uid")}
        self.api.ask(
            "POST",
            api.VOLUMES,
            {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": {
                    "name": name,
                    "annotations": {"pv.kubernetes.io/provisioned-by": self.driver},
                    "finalizers": [_FINALIZER],
                },
                "spec": {
                    "capacity": {"storage": str(made.capacity_bytes)},
                    "accessModes": spec["accessModes"],
                    "volumeMode": spec.get("volumeMode", "Filesystem"),
                    "storageClassName": spec["storageClassName"],
                    "persistentVolumeReclaimPolicy": of_class["reclaimPolicy"],
                    "claimRef": {"kind": "PersistentVolumeClaim", "apiVersion": "v1", **owner},
                    "csi": source if is_block else {**source, "fsType": fs_type},
                    "nodeAffinity": {"required": {"nodeSelectorTerms": terms}},
                },
            },
        )

    def _delete(self, name: str, volume_id: str) -> None:
        asked = csi_pb2.DeleteVolumeRequest(volume_id=volume_id)
        self._controller.DeleteVolume(asked, timeout=_TIMEOUT_S)
        path = f"{api.VOLUMES}/{name}"
        self.api.ask("DELETE", path)
        self.api.merge(path, {"metadata": {"finalizers": None}})


def main() -> None:
    """Serve for ever. The arguments are those that the chart gives; another one is refused."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in (
        "--csi-address",
        "--http-endpoint",
        "--immediate-topology",
        "--capacity-ownerref-level",
    ):
        parser.add_argument(name, required=True)
    for name in ("--node-deployment", "--strict-topology", "--enable-capacity"):
        parser.add_argument(name, action="store_true", required=True)
    address = parser.parse_args().csi_address
    channel = grpc.insecure_channel(f"unix://{address}")
    grpc.channel_ready_future(channel).result()
    identity = csi_pb2_grpc.IdentityStub(channel)
    name = identity.GetPluginInfo(csi_pb2.GetPluginInfoRequest(), timeout=_TIMEOUT_S).name
    server = api.Api(os.environ["KUBERNETES_SERVICE_HOST"])
    provisioner = Provisioner(
        server, channel, name, os.environ["NODE_NAME"], os.environ["NAMESPACE"]
    )
    while True:
        try:
            provisioner.look()
        except (grpc.RpcError, urllib.error.HTTPError) as error:
            shown = error.read() if isinstance(error, urllib.error.HTTPError) else error.details()
            print(error, shown, flush=True)  # noqa: T201 - the log of its container
        server.wait_for_a_change(api.CLAIMS, within_s=_EVERY_S)


if __name__ == "__main__":
    main()
