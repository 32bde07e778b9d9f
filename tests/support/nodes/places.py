"""Where a node's parts have their sockets and directories, and the command lines with these paths."""

import os
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Sockets:
    """The proxy's own sockets."""

    runtime: str
    handlers: str
    inspect: str


@dataclass(frozen=True)
class Places:
    """The paths of a node, below one short directory (sun_path has 107 bytes)."""

    root: str

    @classmethod
    def make(cls, root: str) -> Self:
        places = cls(root)
        os.mkdir(places.kubelet)
        return places

    @property
    def kubelet(self) -> str:
        return f"{self.root}/kubelet"

    @property
    def run(self) -> str:
        return f"{self.root}/run"

    @property
    def volumes(self) -> str:
        return f"{self.root}/run/volumes"

    @property
    def csi(self) -> str:
        return f"{self.root}/csi.sock"

    @property
    def shim(self) -> str:
        return f"{self.root}/shim.sock"

    @property
    def driver(self) -> str:
        return f"{self.root}/driver.sock"

    @property
    def handler(self) -> str:
        return f"{self.root}/handler.sock"

    @property
    def sizes(self) -> str:
        """Sizes of fake devices, for a proxy in another process."""
        return f"{self.root}/sizes.json"

    @property
    def sockets(self) -> Sockets:
        return Sockets(*(f"{self.run}/{name}.sock" for name in ("runtime", "handlers", "inspect")))

    def target(self, name: str) -> str:
        """A target path, as a kubelet's; its parent exists, as the CO creates it."""
        parent = f"{self.kubelet}/pods/{name}/volumes/kubernetes.io~csi/pv"
        os.makedirs(parent, exist_ok=True)
        return f"{parent}/mount"

    def entries(self) -> list[str]:
        """Every name in the handoff directory but its lock: entries, and what is half-done."""
        return sorted(set(os.listdir(self.volumes)) - {".writer.lock"})

    def arguments(self, driver: str, *, behind: str = "") -> dict[str, tuple[str, ...]]:
        """The command lines of crust for our driver, a shim around it or the driver `behind`, and the proxy."""
        runtime, target_root = self.sockets.runtime, f"--target-root={self.kubelet}"
        return {
            "driver": (
                "driver", f"--socket={self.driver}", f"--state-dir={self.root}/pool/state", "--create-pool",
                f"--run-dir={self.run}/driver", f"--runtime-socket={runtime}", target_root,
            ),
            "shim": (
                "shim", f"--socket={self.shim}", f"--driver-socket={behind or self.driver}",
                f"--runtime-socket={runtime}", f"--kubelet-root={self.kubelet}",
            ),
            "proxy": (
                "proxy", f"--run-dir={self.run}", f"--volumes-root={self.volumes}",
                f"--driver={driver},{self.csi},{self.shim}", target_root,
            ),
        }  # fmt: skip
