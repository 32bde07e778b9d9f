"""The objects of the Kubernetes API that crust reads, as Go's client reads them.

A Go program writes an empty list without `omitempty` as null, leaves it out with `omitempty`, and reads both as the
zero value. A typed client that follows the API's description refuses them: CSINode.spec.drivers of a node without a
CSI driver is null on the wire, and is required in the description. So an absent or null field has Go's zero value
here, and only a value of another type is refused. The caller decides whether an empty field proves anything.
"""

from typing import Any, ClassVar, Generic, TypeVar

import pydantic
from pydantic import Field
from pydantic.alias_generators import to_camel


class GoStruct(pydantic.BaseModel):
    """A part of an object. Keys that crust does not read are ignored."""

    model_config = pydantic.ConfigDict(
        frozen=True, extra="ignore", alias_generator=to_camel, validate_by_name=True
    )

    @pydantic.model_validator(mode="before")
    @classmethod
    def _null_is_zero(cls, value: Any) -> Any:
        if value is None:
            return {}
        if isinstance(value, dict):
            return {key: value for key, value in value.items() if value is not None}
        return value


class Metadata(GoStruct):
    """`metadata` of an object, and of a list (which has a version and a place to continue at).

    `name` is unique for its kind (in its namespace).
    """

    name: str = ""
    uid: str = ""
    resource_version: str = ""
    deletion_timestamp: pydantic.AwareDatetime | None = None
    continue_: str = Field("", alias="continue")


class KubernetesObject(GoStruct):
    """An object. `path` is where the API server has the objects of its kind."""

    path: ClassVar[str]

    metadata: Metadata = Metadata()


class Taint(GoStruct):
    key: str = ""


class Condition(GoStruct):
    """A condition of a node; the kubelet reports `Ready`, and the cluster writes "Unknown" when the reports stop."""

    type: str = ""
    status: str = ""
    last_transition_time: pydantic.AwareDatetime | None = None


class NodeSpec(GoStruct):
    taints: tuple[Taint, ...] = ()


class NodeSystemInfo(GoStruct):
    """The kubelet's report of its machine. `boot_id`: the kernel's, another one after each boot (random(4))."""

    boot_id: str = Field("", alias="bootID")


class NodeStatus(GoStruct):
    """The kubelet's report. `volumes_in_use`: unique names of volumes that it has not unmounted."""

    node_info: NodeSystemInfo = NodeSystemInfo()
    conditions: tuple[Condition, ...] = ()
    volumes_in_use: tuple[str, ...] = ()


class Node(KubernetesObject):
    path = "/api/v1/nodes"

    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()


class CSINodeDriver(GoStruct):
    """A driver that is registered with the kubelet of a node, and the node's name to the driver."""

    name: str = ""
    node_id: str = Field("", alias="nodeID")


class CSINodeSpec(GoStruct):
    """Null on the wire where no driver is registered."""

    drivers: tuple[CSINodeDriver, ...] = ()


class CSINode(KubernetesObject):
    """The CSI drivers of the node of the same name."""

    path = "/apis/storage.k8s.io/v1/csinodes"

    spec: CSINodeSpec = CSINodeSpec()


class CSIDriverSpec(GoStruct):
    """Two fields that are pointers in Go: absent is not false."""

    attach_required: bool | None = None
    pod_info_on_mount: bool | None = None


class CSIDriver(KubernetesObject):
    path = "/apis/storage.k8s.io/v1/csidrivers"

    spec: CSIDriverSpec = CSIDriverSpec()


class CSISource(GoStruct):
    driver: str = ""
    volume_handle: str = ""
    volume_attributes: dict[str, str] = {}


class PersistentVolumeSpec(GoStruct):
    """`csi` is None for a volume of another kind."""

    csi: CSISource | None = None


class PersistentVolume(KubernetesObject):
    path = "/api/v1/persistentvolumes"

    spec: PersistentVolumeSpec = PersistentVolumeSpec()


class VolumeAttachmentSource(GoStruct):
    """One of the two is set: the inline one for a volume that Kubernetes migrated from a pod's in-tree source."""

    persistent_volume_name: str = ""
    inline_volume_spec: PersistentVolumeSpec | None = None


class VolumeAttachmentSpec(GoStruct):
    """`attacher` is the driver's name."""

    attacher: str = ""
    source: VolumeAttachmentSource = VolumeAttachmentSource()
    node_name: str = ""


class VolumeAttachment(KubernetesObject):
    path = "/apis/storage.k8s.io/v1/volumeattachments"

    spec: VolumeAttachmentSpec = VolumeAttachmentSpec()


class VolumeMount(GoStruct):
    name: str = ""
    sub_path: str = ""
    sub_path_expr: str = ""


class Container(GoStruct):
    volume_mounts: tuple[VolumeMount, ...] = ()


class PodVolume(GoStruct):
    """A volume of a pod. One of a CSI driver has one of these sources."""

    name: str = ""
    persistent_volume_claim: dict[str, Any] | None = None
    ephemeral: dict[str, Any] | None = None
    csi: dict[str, Any] | None = None


class PodSpec(GoStruct):
    runtime_class_name: str = ""
    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] = ()
    volumes: tuple[PodVolume, ...] = ()

    @property
    def takes_sub_paths(self) -> bool:
        """Whether containers take a subPath of each CSI volume of the pod: a publish does not say which one it is."""
        containers = (*self.containers, *self.init_containers)
        mounts = (mount for container in containers for mount in container.volume_mounts)
        parts = {mount.name for mount in mounts if mount.sub_path or mount.sub_path_expr}
        sources = (
            (each.name, each.persistent_volume_claim, each.ephemeral, each.csi)
            for each in self.volumes
        )
        names = {name for name, *source in sources if source != [None] * 3}
        return bool(names) and names <= parts


class Pod(KubernetesObject):
    """A pod. Its path covers all namespaces; `KubernetesApi.get` inserts its namespace."""

    path = "/api/v1/pods"

    spec: PodSpec = PodSpec()


class RuntimeClass(KubernetesObject):
    """Names the handler of the container engine that runs the pods of the class."""

    path = "/apis/node.k8s.io/v1/runtimeclasses"

    handler: str = ""


class StatusDetails(GoStruct):
    name: str = ""


class Status(GoStruct):
    message: str = ""
    details: StatusDetails = StatusDetails()
    code: int = 0


Item = TypeVar("Item", bound=KubernetesObject)


class ListBody(GoStruct, Generic[Item]):
    """One page of a list. An empty `items` is null on the wire."""

    metadata: Metadata = Metadata()
    items: tuple[Item, ...] = ()


class WatchEvent(GoStruct):
    """One line of a watch. The object is of the kind that is watched, or a Status; a bookmark's may be null."""

    type: str = ""
    object: Any = None
