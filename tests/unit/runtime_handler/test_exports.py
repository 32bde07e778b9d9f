"""crust.runtime_handler: what it exports, and what importing it costs."""

import subprocess
import sys

from crust import runtime_handler


def test_exports_are_sorted_and_exist() -> None:
    assert runtime_handler.__all__ == sorted(runtime_handler.__all__)
    for name in runtime_handler.__all__:
        assert hasattr(runtime_handler, name)


def test_claiming_and_resolving_import_no_grpc() -> None:
    program = (
        "import sys, crust.runtime_handler.keepers\n"
        "sys.exit(any(m.partition('.')[0] == 'grpc' for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
