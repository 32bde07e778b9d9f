"""crust's Prometheus metrics. Labels never hold ids, paths or other data of a user.

Each daemon exports what its parts know, and nothing else: a part names its metrics when it starts (`export`). What is
counted anyway, e.g. entries, is asked for when the metrics are read (`Sampled`), by a thread: the source must be safe
to read beside the event loop.

Calls of CSI are measured under the name, the labels and the buckets that a kubelet has, so that its dashboards show
them. Dashboards depend on the names: docs/operations.md lists them.
"""

import platform
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

UNKNOWN_DRIVER = "unknown-driver"
"""The label of a driver that has not said its name yet, as the CSI sidecars have it."""

Sample = tuple[Sequence[str], float]


class Sampled(Collector):
    """A gauge whose values are asked for when the metrics are read; without a source it has none."""

    def __init__(self, name: str, documentation: str, labels: Sequence[str] = ()) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = labels
        self.source: Callable[[], Iterable[Sample]] = lambda: ()

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """As prometheus_client has it."""
        family = GaugeMetricFamily(self._name, self._documentation, labels=self._labels)
        for labels, value in self.source():
            family.add_metric(labels, value)
        yield family


csi_operations = Histogram(
    "csi_operations_seconds",
    "Time to answer a CSI call.",
    ("driver_name", "method_name", "grpc_status_code", "migrated"),
    buckets=(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 25, 50, 120, 300, 600),
)
log_lines_dropped = Counter(
    "crust_log_lines_dropped_total", "Log lines that were lost because their reader was too slow."
)
build_info = Gauge(
    "crust_build_info", "1, with the versions of this process.", ("version", "python_version")
)
build_info.labels(metadata.version("crust-csi"), platform.python_version()).set(1)

deferred_publishes = Counter(
    "crust_volumes_published_with_deferred_ops_total",
    "Volumes published to a runtime handler instead of being mounted (KEP-2857).",
    ("driver", "handler"),
    registry=None,
)
deferred_volumes = Sampled(
    "crust_deferred_volumes", "Entries in the handoff directory.", ("driver", "state")
)
handlers = Gauge("crust_runtime_handlers", "Registered runtime handlers.", registry=None)
reservations = Gauge(
    "crust_device_reservations", "Deferred volumes whose device is reserved.", registry=None
)
operations = Sampled(
    "crust_operations_running", "Operations on volumes that have not ended.", ("part",)
)
PROXY = (deferred_publishes, deferred_volumes, handlers, reservations)

pool_open = Gauge(
    "crust_pool_open", "1 while the block driver's pool is there and open, else 0.", registry=None
)
pool_bytes = Gauge(
    "crust_pool_bytes",
    "The pool's capacity: its size, what is allocated on the disk, reserved for volumes, free for a new one.",
    ("kind",),
    registry=None,
)
unused_ephemeral_volumes = Gauge(
    "crust_unused_ephemeral_volumes",
    "Inline ephemeral volumes that are neither attached nor published; deleted after a grace.",
    registry=None,
)
DRIVER = (pool_open, pool_bytes, unused_ephemeral_volumes)

_exported: set[int] = set()
_running: dict[str, Callable[[], int]] = {}


def export(*collectors: Collector) -> None:
    """Show the metrics from now on."""
    for each in collectors:
        if id(each) not in _exported:
            _exported.add(id(each))
            REGISTRY.register(each)


def export_operations(part: str, running: Callable[[], int]) -> None:
    """Show how many operations of a part run."""
    _running[part] = running
    operations.source = lambda: [((name,), count()) for name, count in _running.items()]
    export(operations)
