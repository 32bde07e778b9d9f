"""tests.support.faults.crashes: a child that is to die is undisturbed until then."""

import gc
import os

from tests.support.faults.crashes import crash_points


def test_forked_child_ends_no_garbage_of_its_parent() -> None:
    parent = os.getpid()

    class Garbage:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            if os.getpid() != parent:
                os._exit(1)

    def collect(_: int) -> None:
        gc.collect()

    gc.disable()
    try:
        Garbage()
        assert list(crash_points(lambda _: None, collect)) == []
    finally:
        gc.enable()
