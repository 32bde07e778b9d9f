"""What is counted and logged of each served call: its metric, and one line."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import Message
from prometheus_client import Histogram

from crust import metrics, operations
from crust.rpc.messages import call_fields, redaction

_log = logging.getLogger(__name__)

QUIET = frozenset({"Probe", "GetPluginInfo", "GetPluginCapabilities", "NodeGetCapabilities"})
"""Called several times per operation by a kubelet: logged at DEBUG."""

_CODES = {code: code.name.title().replace("_", "") for code in grpc.StatusCode} | {
    grpc.StatusCode.OK: "OK",
    grpc.StatusCode.CANCELLED: "Canceled",
}
"""The names that a kubelet's metrics have for the codes."""

_OURS = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS, grpc.StatusCode.UNKNOWN})
"""Failures of crust, or of the driver or handler behind it. All other codes but OK are refusals."""


@dataclass(frozen=True, slots=True)
class Served:
    """Who answers calls: a server by its name, and the CSI driver whose calls they are."""

    name: str
    driver: Callable[[], str] = lambda: ""


class CallRecord:
    """Counts and logs the calls of one method.

    `counted_as` is the metric's label of it, if that is not its path. An inner call is made by this process for a
    call that it got: its line is for DEBUG, and it is not counted.
    """

    def __init__(self, served: Served, method: str, counted_as: str, *, is_inner: bool) -> None:
        self._served = served
        self._is_inner = is_inner
        self._name = method.rpartition("/")[2]
        self._method = method
        self._is_csi = method.startswith("/csi.")
        self._counted_as = counted_as or method
        self._timers: dict[tuple[str, grpc.StatusCode], Histogram] = {}
        is_quiet = is_inner or self._name in QUIET
        self._level = logging.DEBUG if is_quiet else logging.INFO

    def soon(self, request: Any, started_s: float) -> None:
        """Record after the answer is sent: a log line takes a tenth of a small call's time, and the caller need
        not wait.
        """
        if self._is_inner and not _log.isEnabledFor(self._level):
            return  # the next part of the call waits for the event loop
        elapsed_s = time.monotonic() - started_s
        record = partial(self._record, request, elapsed_s, grpc.StatusCode.OK, {})
        operations.after_answer(record)

    def now(
        self, request: Any, started_s: float, code: grpc.StatusCode, error: dict[str, str]
    ) -> None:
        """Record at once; `error` has the log fields of a failure."""
        self._record(request, time.monotonic() - started_s, code, error)

    def _record(
        self, request: Any, elapsed_s: float, code: grpc.StatusCode, error: dict[str, str]
    ) -> None:
        if self._is_csi and not self._is_inner:
            self._timer(code).observe(elapsed_s)
        level = self._level_of(code)
        if _log.isEnabledFor(level):
            self._log_served(level, request, elapsed_s, code, error)
        fields = call_fields.current()
        if fields is not None and not self._is_inner:
            fields.settle()

    def _timer(self, code: grpc.StatusCode) -> Histogram:
        key = (self._served.driver() or metrics.UNKNOWN_DRIVER, code)
        if key not in self._timers:
            labels = (key[0], self._counted_as, _CODES[code], "false")
            self._timers[key] = metrics.csi_operations.labels(*labels)
        return self._timers[key]

    def _level_of(self, code: grpc.StatusCode) -> int:
        """Refusals are warnings. An inner call's failure is the outer one's, too."""
        if self._is_inner or code is grpc.StatusCode.OK:
            return self._level
        return logging.ERROR if code in _OURS else logging.WARNING

    def _log_served(
        self,
        level: int,
        request: Any,
        elapsed_s: float,
        code: grpc.StatusCode,
        error: dict[str, str],
    ) -> None:
        extra: dict[str, Any] = {
            "rpc": self._name,
            "server": self._served.name,
            "code": code.name,
            "ms": round(elapsed_s * 1000, 1),
            **error,
        }
        if "error" in extra:
            extra["error"] = redaction.without_secrets(extra["error"], self._method, request)
        if _log.isEnabledFor(logging.DEBUG) and isinstance(request, Message):
            extra["request"] = redaction.describe(request)
        _log.log(level, "served", extra=extra)
