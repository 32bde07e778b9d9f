"""The README's picture shows the figures of the page of benchmarks."""

from benchmarks import brings


def test_picture_has_the_four_ratios_of_the_page() -> None:
    ratios = brings.ratios()
    assert len(ratios) == 4
    picture = brings.PICTURE.read_text(encoding="utf-8")
    missing = [name for name, ratio in ratios.items() if f">{ratio:.1f} times<" not in picture]
    assert missing == [], "run `python -m benchmarks.brings`"
