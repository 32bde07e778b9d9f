"""What a keeper imports, and what a keeper of version 1 is asked."""

import json
import socket
import subprocess
import sys
import threading
from pathlib import Path

from crust.runtime_handler.blocking import keepers


def test_claiming_and_resolving_import_no_grpc() -> None:
    program = (
        "import sys, crust.runtime_handler.blocking.keepers\n"
        "sys.exit(any(m.partition('.')[0] == 'grpc' for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_keeper_of_version_1_gets_one_change_after_the_other() -> None:
    """A keeper lives as long as its machine, so the daemon after an upgrade meets the one from before."""
    asked = list[object]()

    def answer() -> None:
        with theirs, theirs.makefile("rb") as lines:
            for line in lines:
                asked.append(json.loads(line))
                theirs.sendall(b'{"pids": [1, 2], "vm": 3, "held": {}, "put": {}}\n')

    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=answer)
    thread.start()
    with keepers.Keeper(Path("/keeper.sock"), ours) as line:
        line.held()
        with line.together():
            line.hold("a", (0, 1))
            line.withdraw("/over")
        assert asked[1:] == [
            {"op": "hold", "name": "a"},
            {"op": "withdraw", "over": "/over", "user": ""},
        ]
    thread.join()
