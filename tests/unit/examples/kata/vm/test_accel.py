"""The accelerator that QEMU can use."""

from pathlib import Path

from crust.core import errors
from examples.kata.vm import accel


def test_probe_result_is_cached_per_image(tmp_path: Path) -> None:
    path = tmp_path / "accelerator.json"
    assert accel._recall(path) is None
    known = accel.Accelerator("tcg", "no KVM")
    accel._remember(path, known)
    assert accel._recall(path) == known
    path.write_text("{}")
    assert accel._recall(path) is None


def test_reason_without_kvm_ends_before_the_remedy() -> None:
    why = accel._why(errors.RuntimeFailed("no guest", why="it was slow", hint="try again"))
    assert why == "it was slow; try again"
    assert accel._why(errors.RuntimeFailed("no guest", why="it was slow")) == "it was slow"
