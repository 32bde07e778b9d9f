"""The accelerator that QEMU can use."""

from pathlib import Path

from examples.kata.vm import accel


def test_probe_result_is_cached_per_image(tmp_path: Path) -> None:
    path = tmp_path / "accelerator.json"
    assert accel._recall(path) is None
    known = accel.Accelerator("tcg", "no KVM")
    accel._remember(path, known)
    assert accel._recall(path) == known
    path.write_text("{}")
    assert accel._recall(path) is None
