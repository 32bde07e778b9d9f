"""Simulated time: back-offs and intervals are counted in it, and a test decides how fast it goes."""


class Clock:
    """Seconds since the start of the simulation."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def advance(self, seconds: float) -> None:
        assert seconds >= 0
        self.now_s += seconds
