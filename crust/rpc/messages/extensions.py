"""How a caller opts in to crust's additions to CSI: gRPC metadata.

Released COs and conformance suites never send this metadata, so crust never advertises to them a capability that the
CSI specification does not have (specs/deferral.md, specs/node-identity.md).
"""

from typing import Any

import grpc.aio

KEY = "crust-extensions"
DEFERRAL = "deferral"
NODE_INFO = "node-info"
ERROR_INFO = "error-info"
VERSIONS = "versions"
SHIM_VERSION = "crust-shim-version"
"""The trailing metadata of a Probe: the version that the shim's process runs."""
NOT_READY = "crust-not-ready-bin"
"""The trailing metadata of a Probe that is answered `ready = false`, for a caller that wants errors' names: why."""
METADATA: tuple[tuple[str, str], ...] = ((KEY, DEFERRAL),)
"""The metadata of a caller that knows deferral."""
NODE_INFO_METADATA: tuple[tuple[str, str], ...] = ((KEY, NODE_INFO),)
"""The metadata of a caller that knows specs/node-identity.md."""


def deferral_requested(context: grpc.aio.ServicerContext[Any, Any]) -> bool:
    """Whether the caller opted in; the value is a comma-separated list."""
    return _requested(context, DEFERRAL)


def node_info_requested(context: grpc.aio.ServicerContext[Any, Any]) -> bool:
    """Whether the caller knows NodeGetID and ControllerGetNodeInfo (specs/node-identity.md)."""
    return _requested(context, NODE_INFO)


def error_info_requested(context: grpc.aio.ServicerContext[Any, Any]) -> bool:
    """Whether the caller of a CSI call wants an error's name in the status details, which CSI keeps empty."""
    return _requested(context, ERROR_INFO)


def versions_requested(context: grpc.aio.ServicerContext[Any, Any]) -> bool:
    """Whether the caller of a Probe wants to know the versions of the processes that it passes."""
    return _requested(context, VERSIONS)


def _requested(context: grpc.aio.ServicerContext[Any, Any], name: str) -> bool:
    metadata = context.invocation_metadata() or ()
    return any(key == KEY and name in _split(value) for key, value in metadata)


def _split(value: str | bytes) -> list[str]:
    text = value.decode("ascii", "replace") if isinstance(value, bytes) else value
    return [each.strip() for each in text.split(",")]
