"""Runs Ember-CSI, a public driver over the storage backends of OpenStack Cinder, as examples/drivers are run.

    python -m tests.support.third_party.ember --socket=… --state-dir=… --node-id=…

Driver, Cinder and os-brick are the packages that ember.txt pins, unmodified, in an environment of their own: its
protobuf is another one than crust's. `make third-party` makes it. Cinder's own backends need an array or a kernel
with iSCSI, so the volumes are those of ember_backend/sparse_files.py. Ember keeps what it knows of them in a
database below the state directory.
"""

import argparse
import json
import os
from pathlib import Path

NAME = "ember-csi.io"
MIN_BYTES = 1 << 30
"""Cinder counts in GiB."""

_ROOT = Path(__file__).parents[3]
PROGRAM = _ROOT / ".cache" / "ember" / "bin" / "ember-csi"


def environment(socket: str, state_dir: str, node_id: str) -> dict[str, str]:
    """What Ember is configured with: all its settings are variables."""
    backend = {"volume_backend_name": "files", "volume_driver": "sparse_files.SparseFiles"}
    driver = {
        "root_helper": "env",  # it is root already
        "state_path": state_dir,
        "file_locks_path": f"{state_dir}/locks",
        "slow_operations": False,
    }
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(Path(__file__).parent / "ember_backend"),
        "GRPC_ENABLE_FORK_SUPPORT": "0",  # it forks with calls under way
        "VOLUMES_DIR": f"{state_dir}/volumes",
        "CSI_ENDPOINT": f"unix://{socket}",
        "CSI_MODE": "all",
        "X_CSI_SPEC_VERSION": "1.1",
        "X_CSI_NODE_ID": node_id,
        "X_CSI_PERSISTENCE_CONFIG": json.dumps(
            {"storage": "db", "connection": f"sqlite:///{state_dir}/ember.sqlite"}
        ),
        "X_CSI_BACKEND_CONFIG": json.dumps(backend),
        "X_CSI_EMBER_CONFIG": json.dumps(driver),
    }


def main() -> None:
    """Become Ember."""
    parser = argparse.ArgumentParser()
    for option in ("--socket", "--state-dir", "--node-id"):
        parser.add_argument(option, required=True)
    given = parser.parse_args()
    Path(given.state_dir, "volumes").mkdir(parents=True, exist_ok=True)
    settings = environment(given.socket, given.state_dir, given.node_id)
    os.execve(PROGRAM, [str(PROGRAM)], settings)


if __name__ == "__main__":
    main()
