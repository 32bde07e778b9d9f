"""Whether a deferred volume may be detached: only if every node that may have it is known not to use it.

Kubernetes detaches by force from a node that is not ready when an unmount takes more than six minutes, and a guest
that outlives its pod keeps the volume. Kubernetes does not ask the node then, and the driver's controller knows of no
guest. But the kubelet lists in Node.status.volumesInUse the volumes that it has not unmounted yet, and it adds a
volume before it mounts it.

The nodes that may have the volume: CSINode translates the driver's node id while the driver is registered there. An
orderly stop of crust ends the registration, so a detach by force often finds none. Then every node counts that a
VolumeAttachment of the volume names and that has no id of the driver. Watches follow these objects: an old object can
only hide a node, and the detach from an unknown node is refused. The volumes in use are always requested afresh, by
one request each, for at most three nodes.

A node is gone, and uses no volume, if it is out of service, or if its Node object was absent at each look for
`absent_s`. Every other doubt refuses the detach: no answer, a missing object, a kubelet that never reported.

A node is out of service by the taint of that name, set by a person or by the system that powers machines off: it says
that the machine is off. Kubernetes then detaches and deletes without waiting; a driver cuts such a node off from
storage (`out_of_service`). Crust believes the taint only if the node is not ready: a node whose kubelet reports is
alive. A node that is not ready, a deleted Node object and a detach by force prove nothing: each happens to a machine
that only lost its network.

Kubernetes removes a volume from Node.status.volumesAttached before it deletes the VolumeAttachment. A kubelet that
starts after that takes the volume for one that is not attached, and leaves it out of volumesInUse while a guest has
it (Kubernetes 1.36, updateReconstructedFromNodeStatus). So an absent volume proves nothing if the node's condition
Ready has changed since the VolumeAttachment was deleted, unless the node has booted since the first call of that
detach: no guest of before lives, and Kubernetes gives the volume to no pod until the VolumeAttachment has gone.
"""

import time
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from crust.core import deferral_keys, errors
from crust.core.supervised import Health
from crust.kubernetes_api.api import Informer, KubernetesApi, following
from crust.kubernetes_api.objects import (
    CSINode,
    CSISource,
    Node,
    PersistentVolume,
    VolumeAttachment,
    VolumeAttachmentSpec,
)

TAINT = "node.kubernetes.io/out-of-service"
ABSENT_S = 300.0
_MOST_NODES = 3
"""Requests of one detach. Only a call without a node id can need more: the CO then names each node."""
_IF_DEAD = f"if the node is dead, taint it {TAINT}"


@dataclass(slots=True)
class VolumesInUse:
    """Asks the Kubernetes API of one cluster.

    `absent_s`: after how long a node without its object is gone.
    """

    api: KubernetesApi
    absent_s: float = ABSENT_S
    now: Callable[[], float] = time.monotonic
    _absent: dict[str, tuple[float, str]] = field(default_factory=dict)
    """Since when a Node object is absent, and the UID of the node's CSINode object at that time."""
    _boots: dict[str, str] = field(default_factory=dict)
    """The boot of the node at the first call of each detach, by the UID of the VolumeAttachment."""
    _attachments: Informer[VolumeAttachment, VolumeAttachment] = field(init=False)
    _volumes: Informer[PersistentVolume, CSISource | None] = field(init=False)
    _registered: Informer[CSINode, CSINode] = field(init=False)

    def __post_init__(self) -> None:
        self._attachments = Informer(self.api, VolumeAttachment, lambda attachment: attachment)
        self._volumes = Informer(self.api, PersistentVolume, lambda volume: volume.spec.csi)
        self._registered = Informer(self.api, CSINode, lambda node: node)

    def following(self, health: Health) -> AbstractAsyncContextManager[None]:
        """Keep attachments, volumes and the nodes' ids known while the block runs."""
        return following(health, self._attachments, self._volumes, self._registered)

    async def check_detach(self, driver: str, volume_id: str, node_id: str) -> None:
        """Return if the volume may be detached from the node with the driver's id `node_id`; empty: from all nodes.

        Raises `UsedOnNode`, `VolumeUseUnknown`, `KubernetesApiUnavailable`.
        """
        for followed in (self._attachments, self._volumes, self._registered):
            # waits for the first lists after a start, or after an outage
            await followed.check_known(f"the use of volume {volume_id[:128]}")
        # several objects made by hand may name one volume
        inline = (_inline(each.spec) for each in self._attachments.known.values())
        handles = [
            handle
            for handle in (*self._volumes.known.values(), *inline)
            if handle is not None and (handle.driver, handle.volume_handle) == (driver, volume_id)
        ]
        if handles and not any(
            deferral_keys.may_defer(handle.volume_attributes) for handle in handles
        ):
            return
        for node in self._nodes(driver, volume_id, node_id):
            await self._check_node(node, driver, volume_id)

    def _nodes(self, driver: str, volume_id: str, node_id: str) -> Collection[str]:
        """The names of the nodes that may have the volume. Raises `VolumeUseUnknown`."""
        ids = _ids(driver, self._registered.known.values())
        nodes = {name for name, known_id in ids.items() if node_id and known_id == node_id}
        if not nodes:
            attached = {each.spec.node_name for each in self._of_volume(driver, volume_id)}
            nodes = {name for name in attached if not node_id or name not in ids}
        if not nodes:
            place = f"the node id {node_id[:192]!r} is not known" if node_id else "no node is named"
            why = f"{place}: no CSINode and no VolumeAttachment object tells which node may have it"
            raise _unknown(volume_id, why, "detach it by hand, once nothing uses it")
        if len(nodes) > _MOST_NODES:
            why = f"{len(nodes)} nodes may have it, and the call does not say which"
            raise _unknown(volume_id, why, "call with the node_id of each")
        return sorted(nodes)

    def _of_volume(self, driver: str, volume_id: str) -> list[VolumeAttachment]:
        """The attachments of the volume; without any, the attachments of unknown volumes."""
        found, unknown = [], []
        for attachment in self._attachments.known.values():
            spec = attachment.spec
            if spec.attacher != driver:
                continue
            handle = _inline(spec) or self._volumes.known.get(spec.source.persistent_volume_name)
            if handle is None:
                unknown.append(attachment)
            elif handle.volume_handle == volume_id:
                found.append(attachment)
        return found or unknown

    async def _check_node(self, name: str, driver: str, volume_id: str) -> None:
        node = await self.api.get(Node, name)
        if node is None:
            self._check_gone(name, volume_id)
            return
        self._absent.pop(name, None)
        deleted = [
            attachment
            for attachment in self._of_volume(driver, volume_id)
            if attachment.spec.node_name == name and attachment.metadata.deletion_timestamp
        ]
        boot_id = node.status.node_info.boot_id
        # of the first call of each detach, as long as its VolumeAttachment is there
        uids = {attachment.metadata.uid for attachment in self._attachments.known.values()}
        self._boots = {uid: boot for uid, boot in self._boots.items() if uid in uids}
        for attachment in deleted:
            self._boots.setdefault(attachment.metadata.uid, boot_id)
        if _is_out_of_service(node):
            return
        if f"kubernetes.io/csi/{driver}^{volume_id}" in node.status.volumes_in_use:
            raise errors.NotReady.named(
                "UsedOnNode",
                f"volume {volume_id[:128]} is not detached from node {name}",
                why="the node reports it in use: a guest may write to it, even if its pod has ended",
                hint=f"stop the guest on that node; {_IF_DEAD}",
            )
        ready = next((each for each in node.status.conditions if each.type == "Ready"), None)
        if ready is None:
            why = f"the kubelet of node {name} has not reported since its Node object was made"
            raise _unknown(volume_id, why, f"wait until it reports; {_IF_DEAD}")
        for attachment in deleted:
            began, changed = attachment.metadata.deletion_timestamp, ready.last_transition_time
            boots = self._boots[attachment.metadata.uid], boot_id
            has_booted = all(boots) and len(set(boots)) == 2
            if (changed is None or began is None or changed >= began) and not has_booted:
                why = f"node {name} was lost or came back after Kubernetes began to detach: its list may lack volumes"
                hint = f"drain the node and boot it; if that does not help, power it off and taint it {TAINT}"
                raise _unknown(volume_id, why, hint)

    def _check_gone(self, name: str, volume_id: str) -> None:
        """Raise unless the Node object has been absent for long enough.

        A new CSINode object means that the node came back meanwhile.
        """
        registered = self._registered.known.get(name)
        uid = registered.metadata.uid if registered is not None else ""
        since_s, known_uid = self._absent.get(name, (0.0, None))
        if known_uid is None or uid not in ("", known_uid):
            since_s, _ = self._absent[name] = self.now(), uid
        absent_s = self.now() - since_s
        if absent_s < self.absent_s:
            why = f"node {name} has no Node object since {absent_s:.0f} s, and is gone after {self.absent_s:g} s"
            raise _unknown(volume_id, why, "the caller will retry until then")


def _unknown(volume_id: str, why: str, hint: str) -> errors.NotReady:
    refusal = f"volume {volume_id[:128]} is not detached: whether a guest uses it is not known"
    return errors.NotReady.named("VolumeUseUnknown", refusal, why=why, hint=hint)


def _inline(attachment: VolumeAttachmentSpec) -> CSISource | None:
    """The volume of an attachment that Kubernetes migrated from a pod's in-tree source."""
    inline = attachment.source.inline_volume_spec
    return None if inline is None else inline.csi


async def out_of_service(api: KubernetesApi, driver: str) -> frozenset[str]:
    """The driver's ids of the nodes that are gone now, or the node's name if its CSINode object has no id of the
    driver any more. Raises `KubernetesApiUnavailable`.
    """
    nodes, _ = await api.listing(Node)
    names = [node.metadata.name for node in nodes if _is_out_of_service(node)]
    if not names:
        return frozenset()
    csi_nodes, _ = await api.listing(CSINode)
    ids = _ids(driver, csi_nodes)
    return frozenset(ids.get(name, name) for name in names)


def _ids(driver: str, csi_nodes: Iterable[CSINode]) -> dict[str, str]:
    """The driver's ids of the nodes where it is registered, by their names."""
    return {
        csi_node.metadata.name: registered.node_id
        for csi_node in csi_nodes
        for registered in csi_node.spec.drivers
        if registered.name == driver
    }


def _is_out_of_service(node: Node) -> bool:
    """Whether the node has the taint, and its kubelet does not report."""
    is_tainted = any(taint.key == TAINT for taint in node.spec.taints)
    reported = {condition.type: condition.status for condition in node.status.conditions}
    return is_tainted and reported.get("Ready") != "True"
