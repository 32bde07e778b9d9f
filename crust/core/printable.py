"""Text of other programs on one line: no control character of a terminal, no line that the program has not.

Guests, tenants' processes, runtimes and drivers choose names and errors. A control character in one moves a cursor or
sets a terminal's title, a line break forges a line of a log, a character of bidirectional text reverses the rest of
the line. Text is escaped where crust reads it from such a program, and again by each output for people.
"""

from collections.abc import Sequence


def printable(text: str) -> str:
    """The text with each character escaped that is not printable; a second call changes nothing."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def some(texts: Sequence[str], most: int = 5) -> str:
    """The first texts of a list, and how many there are besides."""
    others = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {others} more" if others > 0 else "")
