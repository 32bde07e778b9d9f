"""What a keeper imports."""

import subprocess
import sys


def test_claiming_and_resolving_import_no_grpc() -> None:
    program = (
        "import sys, crust.runtime_handler.keepers\n"
        "sys.exit(any(m.partition('.')[0] == 'grpc' for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
