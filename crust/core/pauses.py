"""The pauses between attempts at a peer that is away: scattered, so that nodes do not come back in step."""

import random
from collections.abc import Iterator


def scattered(time_s: float) -> float:
    """The time, or up to half of it less."""
    return random.uniform(time_s / 2, time_s)


def pauses(first_s: float, longest_s: float) -> Iterator[float]:
    """The pauses after failures in a row: each twice as long as the last one, and scattered."""
    pause_s = first_s
    while True:
        yield scattered(pause_s)
        pause_s = min(pause_s * 2, longest_s)
