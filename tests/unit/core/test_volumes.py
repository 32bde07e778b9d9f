"""The names that cannot be wrong values."""

import pytest

from crust.core import errors, volumes


@pytest.mark.parametrize("text", ["", "-a", "a.", "A", "a_b", "a\n", "a" * 64, "ä"])
def test_handler_name_is_never_a_wrong_one(text: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="63"):
        volumes.HandlerName(text)


@pytest.mark.parametrize("text", ["", "s" * 257, "a\nb", "\0", "\x7f"])
def test_sandbox_id_is_never_a_wrong_one(text: str) -> None:
    with pytest.raises(errors.InvalidRequest, match=r"256|control"):
        volumes.SandboxId(text)


def test_name_and_id_are_the_text_itself() -> None:
    for text in ("kata-qemu", "a", "a" * 63, "0.1"):
        assert volumes.HandlerName(text) == text
    for text in ("pod uid/Ä", "s" * 256):
        assert {volumes.SandboxId(text): 1}[volumes.SandboxId(text)] == 1
        assert f"{volumes.SandboxId(text)}" == text
