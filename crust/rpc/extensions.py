"""How a caller says that it knows crust's additions to CSI.

Released COs and conformance suites never send this metadata, and so never see a capability that the CSI
specification does not have (specs/deferral.md).
"""

from typing import Any

import grpc.aio

KEY = "crust-extensions"
DEFERRAL = "deferral"
NODE_INFO = "node-info"
ERROR_INFO = "error-info"
METADATA: tuple[tuple[str, str], ...] = ((KEY, DEFERRAL),)
"""What a caller that knows deferral adds to its calls."""


def deferral_requested(context: grpc.aio.ServicerContext[Any, Any]) -> bool:
    """Whether the caller opted in; the value is a comma-separated list."""
    return _requested(context, DEFERRAL)


def node_info_requested(context: grpc.aio.ServicerContext[Any, Any]) -> bool:
    """Whether the caller knows NodeGetID and ControllerGetNodeInfo (CSI PR #603)."""
    return _requested(context, NODE_INFO)


def error_info_requested(context: grpc.aio.ServicerContext[Any, Any]) -> bool:
    """Whether the caller of a CSI call wants an error's name in the status details, which CSI keeps empty."""
    return _requested(context, ERROR_INFO)


def _requested(context: grpc.aio.ServicerContext[Any, Any], word: str) -> bool:
    metadata = context.invocation_metadata() or ()
    return any(key == KEY and word in _words(value) for key, value in metadata)


def _words(value: str | bytes) -> list[str]:
    text = value.decode("ascii", "replace") if isinstance(value, bytes) else value
    return [word.strip() for word in text.split(",")]
