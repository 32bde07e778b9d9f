"""What the settings of every daemon have in common, and the tables that more than one of them has."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from crust.core.settings.fields import AbsolutePath, MetricsAddress


class Table(BaseModel):
    """A table of a settings file, which has no other keys and never changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class ProgramSettings(Table):
    """Settings of every daemon."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The lowest level that is logged. Level info has one line per RPC."""

    log_format: Literal["json", "console"] = "console"
    """json for a log collector."""

    metrics_address: MetricsAddress = ""
    """Where Prometheus reads the metrics, host:port or [IPv6]:port; empty: no metrics. There is no authentication."""

    traces: bool = False
    """Whether spans go to the OpenTelemetry collector that OTEL_EXPORTER_OTLP_ENDPOINT names; extra otel."""

    @classmethod
    def at_endpoint(cls, given: Mapping[str, Any], endpoint: str) -> dict[str, Any]:
        """The settings of a program whose CSI socket is `endpoint`. Raises `ValueError` if it cannot be."""
        return {**given, "socket": endpoint}


class KubernetesAccess(Table):
    """How the Kubernetes API is reached."""

    kubeconfig: AbsolutePath | Literal[""] = ""
    """Empty: by the service account of the pod that the program runs in."""
