"""crust's Prometheus metrics. Labels never hold ids, paths or other data of a user.

Dashboards depend on the names: docs/operations.md lists them.
"""

from prometheus_client import Counter, Gauge, Histogram

rpc_seconds = Histogram(
    "crust_rpc_seconds",
    "Time to answer an RPC.",
    ("server", "rpc", "code"),
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 120),
)
deferred_publishes = Counter(
    "crust_volumes_published_with_deferred_ops_total",
    "Volumes published to a runtime handler instead of being mounted (KEP-2857).",
    ("driver", "handler"),
)
deferred_volumes = Gauge("crust_deferred_volumes", "Entries in the handoff directory.", ("driver",))
pool_open = Gauge("crust_pool_open", "1 while the block driver's pool is there and open, else 0.")
unused_ephemeral_volumes = Gauge(
    "crust_unused_ephemeral_volumes",
    "Inline ephemeral volumes that are neither attached nor published; deleted after a grace.",
)
handlers = Gauge("crust_runtime_handlers", "Registered runtime handlers.")
log_lines_dropped = Counter(
    "crust_log_lines_dropped_total", "Log lines that were lost because their reader was too slow."
)
