"""Every run of a model: a run asks at each step which way the step goes, and the runs try all answers."""

from collections.abc import Sequence


class Choices:
    """The ways of one run: those of `script`, and then the first of each step."""

    def __init__(self, script: Sequence[int] = ()) -> None:
        self._script = script
        self._taken: list[tuple[int, int]] = []

    def of(self, options: Sequence[str]) -> str:
        """The way of the next step."""
        step = len(self._taken)
        index = self._script[step] if step < len(self._script) else 0
        self._taken.append((index, len(options)))
        return options[index]

    def following(self) -> list[int] | None:
        """The script of the next run; None after the last."""
        taken = list(self._taken)
        while taken and taken[-1][0] == taken[-1][1] - 1:
            taken.pop()
        if not taken:
            return None
        return [index for index, _ in taken[:-1]] + [taken[-1][0] + 1]
