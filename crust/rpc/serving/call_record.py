"""What is counted and logged of each served call: its metric, and one line."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import grpc
from prometheus_client import Histogram

from crust.core import metrics
from crust.rpc.messages import call_fields, redaction

_log = logging.getLogger(__name__)

_UNKNOWN = "other"
"""The metric's label for unknown methods that pass."""

QUIET = frozenset({"Probe", "GetPluginInfo", "GetPluginCapabilities", "NodeGetCapabilities"})
"""Called several times per operation by a kubelet: logged at DEBUG."""

_OF_OPERATORS = ("/crust.v1.Inspect/", "/crust.v1.Pool/")
"""An operator who looks leaves no line in the log, and a Watch that its reader ends is no failure."""

_CODES = {code: code.name.title().replace("_", "") for code in grpc.StatusCode} | {
    grpc.StatusCode.OK: "OK",
    grpc.StatusCode.CANCELLED: "Canceled",
}
"""The names that a kubelet's metrics have for the codes."""

_FINE = frozenset({grpc.StatusCode.OK})
_OURS = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS, grpc.StatusCode.UNKNOWN})
"""Failures of crust, or of the driver or handler behind it. All other codes but OK are refusals."""


class CallRecord:
    """Counts and logs the calls of one method of the part `server`; `driver` has the CSI driver whose calls they are.

    An inner call is made by this process for a call that it got: its line is for DEBUG, and it is not counted.
    """

    def __init__(
        self, server: str, driver: Callable[[], str], method: str, *, is_inner: bool
    ) -> None:
        self._server = server
        self._driver = driver
        self._is_inner = is_inner
        self.rpc = method.rpartition("/")[2]
        is_look = method.startswith(_OF_OPERATORS)
        self.is_quiet = is_look or self.rpc in QUIET
        self._fine = _FINE | {grpc.StatusCode.CANCELLED} if is_look else _FINE
        self._method = method
        self._is_csi = method.startswith("/csi.")
        # the caller chooses the name of an unknown method that passes, and a metric would keep that name for good
        self._counted_as = method if call_fields.is_known(method) else _UNKNOWN
        self._timers: dict[tuple[str, grpc.StatusCode], Histogram] = {}
        self._level = logging.DEBUG if is_inner or self.is_quiet else logging.INFO

    def record(
        self,
        request: bytes,
        started_s: float,
        code: grpc.StatusCode = grpc.StatusCode.OK,
        error: Mapping[str, str] | None = None,
    ) -> None:
        """Count and log a call that has ended; `error` has the log fields of a failure."""
        elapsed_s = time.monotonic() - started_s
        if self._is_csi and not self._is_inner:
            self._timer(code).observe(elapsed_s)
        level = self._level_of(code)
        if _log.isEnabledFor(level):
            self._log_served(level, request, elapsed_s, code, error or {})

    def _timer(self, code: grpc.StatusCode) -> Histogram:
        key = (self._driver() or metrics.UNKNOWN_DRIVER, code)
        if key not in self._timers:
            labels = (key[0], self._counted_as, _CODES[code], "false")
            self._timers[key] = metrics.csi_operations.labels(*labels)
        return self._timers[key]

    def _level_of(self, code: grpc.StatusCode) -> int:
        """Refusals are warnings. An inner call's failure is the outer one's, too."""
        if self._is_inner or code in self._fine:
            return self._level
        return logging.ERROR if code in _OURS else logging.WARNING

    def _log_served(
        self,
        level: int,
        request: bytes,
        elapsed_s: float,
        code: grpc.StatusCode,
        error: Mapping[str, str],
    ) -> None:
        extra: dict[str, Any] = {
            "rpc": self.rpc,
            "server": self._server,
            "code": code.name,
            "ms": round(elapsed_s * 1000, 1),
            **error,
        }
        if "error" in extra:
            extra["error"] = redaction.without_secrets(extra["error"], self._method, request)
        if _log.isEnabledFor(logging.DEBUG):
            message = call_fields.decoded(self._method, request)
            extra["request"] = None if message is None else redaction.describe(message)
        _log.log(level, "served", extra=extra)
