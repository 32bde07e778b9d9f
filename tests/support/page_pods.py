"""The pods of docs/wrapping.md: crust's shim in the pods of the vendor's driver, and the proxy."""

from dataclasses import dataclass
from typing import Any

import yaml

from tests.support.pages import page_blocks
from tests.support.rendered_pods import RenderedPod


def manifests() -> tuple[str, str, str]:
    """The patch of the vendor's DaemonSet, the DaemonSet of the proxy, and the patch of the vendor's Deployment."""
    blocks = page_blocks.blocks("wrapping.md")
    shim, proxy, controller = (block for block in blocks if "containers:" in block)
    return shim, proxy, controller


@dataclass(frozen=True, slots=True)
class PagePod(RenderedPod):
    """One of them. `values` is the text of its manifest."""

    @property
    def spec(self) -> Any:
        return yaml.safe_load(self.values)["spec"]["template"]["spec"]
