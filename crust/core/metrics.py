"""crust's Prometheus metrics. Labels never hold ids, paths or other data of a user.

Each part exports its metrics when it starts (`export`), so a daemon shows only the metrics of its parts. A value that
a part counts anyway, e.g. entries, is read together with the metrics (`Sampled`), by a thread: the source must be
safe to read beside the event loop.

Calls of CSI are measured under the name, the labels and the buckets that a kubelet has, so that its dashboards show
them. Dashboards depend on the names: docs/monitoring.md lists them.
"""

import platform
from collections import Counter as Counted
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

import crust

UNKNOWN_DRIVER = "unknown-driver"
"""The label of a driver that has not said its name yet, as the CSI sidecars have it."""

Sample = tuple[Sequence[str], float]


class Sampled(Collector):
    """A gauge whose values its sources give when the metrics are read.

    With `is_total` it is a counter: its values never fall while the process runs.
    """

    def __init__(
        self, name: str, documentation: str, labels: Sequence[str] = (), *, is_total: bool = False
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = labels
        self._family = CounterMetricFamily if is_total else GaugeMetricFamily
        self._sources: dict[str, Callable[[], Iterable[Sample]]] = {}

    def show(self, part: str, source: Callable[[], Iterable[Sample]]) -> None:
        """Show from now on the values of a part of the process, in place of an earlier source of that part."""
        self._sources[part] = source
        export(self)

    def collect(self) -> Iterable[Metric]:
        family = self._family(self._name, self._documentation, labels=self._labels)
        for source in tuple(self._sources.values()):
            for labels, value in source():
                family.add_metric(labels, value)
        yield family


# from 0.1 s on a kubelet's buckets; most calls take milliseconds
_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 25, 50, 120, 300, 600
)  # fmt: skip
csi_operations = Histogram(
    "csi_operations_seconds",
    "Time to answer a CSI call.",
    ("driver_name", "method_name", "grpc_status_code", "migrated"),
    buckets=_BUCKETS_S,
)
log_lines_dropped = Counter(
    "crust_log_lines_dropped_total", "Log lines that were lost because their reader was too slow."
)
build_info = Gauge(
    "crust_build_info", "1, with the versions of this process.", ("version", "python_version")
)
build_info.labels(crust.__version__, platform.python_version()).set(1)

background_failures = Counter(
    "crust_background_failures_total",
    "Failures of background work, which began again or ended the process.",
    ("work",),
)
calls_unseen = Counter(
    "crust_calls_unseen_total",
    "Calls that were refused because the kernel did not answer a question about the host (NotSeen).",
)
problems = Sampled(
    "crust_problems",
    "Problems of this process, by the error's name; `crust status` shows those of proxy and drivers.",
    ("error",),
)
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
    "crust_operations_running", "Operations on volumes that have not ended.", ("component",)
)
worker_threads = Sampled(
    "crust_worker_threads",
    "Threads for calls that block: the limit, and the busy ones.",
    ("component", "kind"),
)
worker_calls_waiting = Sampled(
    "crust_worker_calls_waiting", "Calls that wait for a thread.", ("component",)
)
worker_refusals = Sampled(
    "crust_worker_refusals_total",
    "Operations and probes that were refused because no thread was free in time.",
    ("component",),
    is_total=True,
)
log_queue = Sampled(
    "crust_log_queue_bytes", "Log lines that wait for the reader of standard error."
)
SHARED = (
    operations,
    worker_threads,
    worker_calls_waiting,
    worker_refusals,
    log_queue,
    problems,
)
PROXY = (deferred_publishes, deferred_volumes, handlers, reservations)

pool_open = Gauge(
    "crust_pool_open",
    "0 while the block driver's pool is absent or cannot be opened, else 1.",
    ("driver",),
    registry=None,
)
pool_bytes = Gauge(
    "crust_pool_bytes",
    "The pool's capacity: its size, the bytes allocated on disk, reserved for volumes, free for a new one; and "
    "`low`, the free bytes below which operators are warned.",
    ("driver", "kind"),
    registry=None,
)
snapshots = Sampled(
    "crust_snapshots", "Records of snapshots and group snapshots in the pool.", ("driver", "kind")
)
volumes_abnormal = Sampled(
    "crust_volumes_abnormal",
    "Volumes of the pool that are not healthy, by the reason, as `crust pool` shows them; looked at once a minute.",
    ("driver", "reason"),
)
DRIVER = (snapshots, pool_open, pool_bytes, volumes_abnormal)

claims_fenced = Counter(
    "crust_claims_fenced_total",
    "Claims on images that this process has ended by cutting off nodes that are declared gone.",
    registry=None,
)
fencing_failures = Counter(
    "crust_fencing_failures_total",
    "Looks for nodes that are declared gone that failed: the Kubernetes API or the storage did not answer.",
    registry=None,
)
nodes_waiting_for_fencing = Gauge(
    "crust_nodes_waiting_for_fencing",
    "Nodes that are declared gone and have claims still, at the last look that did not fail.",
    registry=None,
)
FENCING = (claims_fenced, fencing_failures, nodes_waiting_for_fencing)

_ALERTED = (
    "BackgroundWorkFails",
    "HandlerNotResponding",
    "OperationsHang",
    "SystemCallTimedOut",
    "UnpublishRefused",
)
_exported: set[int] = set()


def export(*collectors: Collector) -> None:
    for collector in collectors:
        if id(collector) not in _exported:
            _exported.add(id(collector))
            REGISTRY.register(collector)


def export_snapshots(driver: str, count: Callable[[], Iterable[Sample]]) -> None:
    """Show how many snapshots the pool of a driver has, by kind."""
    snapshots.show(driver, lambda: [((driver, *labels), number) for labels, number in count()])


def show_abnormal(driver: str, number_of: Mapping[str, int]) -> None:
    """Show how many volumes of a driver are not healthy, by the reason; without any the alert has a series too."""
    samples = [((driver, reason), number) for reason, number in number_of.items()]
    volumes_abnormal.show(driver, lambda: samples or [((driver, "none"), 0)])


def forget_pool(driver: str) -> None:
    """Remove the numbers of a pool that cannot be measured now: they would look current."""
    pool_bytes.remove_by_labels({"driver": driver})
    volumes_abnormal.show(driver, tuple)


def export_operations(component: str, running: Callable[[], int]) -> None:
    operations.show(component, lambda: [((component,), running())])


def export_problems(names: Callable[[], Iterable[str]]) -> None:
    """Show how many problems the process has, by the error's name; 0 of those with an alert of their own."""
    zeros = dict.fromkeys(_ALERTED, 0)
    problems.show("", lambda: [((name,), n) for name, n in (zeros | Counted(names())).items()])


def export_workers(component: str, load: Callable[[], Mapping[str, int]]) -> None:
    """Show how busy the threads of a component are, by `limit`, `busy`, `waiting` and `refused`."""
    kinds = ("limit", "busy")
    worker_threads.show(component, lambda: [((component, kind), load()[kind]) for kind in kinds])
    worker_calls_waiting.show(component, lambda: [((component,), load()["waiting"])])
    worker_refusals.show(component, lambda: [((component,), load()["refused"])])
