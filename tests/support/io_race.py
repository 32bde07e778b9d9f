"""Reads and writes devices past the page cache, and counts: `io_race.py FREE KIND:DEVICE...`.

Each limited device gets a thread that does a fixed number of operations of its kind ("r" or "w"); beside them one
thread does the same with a free device, without an end. Printed is, per limited device, how many operations the
free one had done when it was finished. So nobody looks at a clock, and a busy machine slows both alike.
"""

import mmap
import os
import sys
import threading

OPERATIONS = 24
BLOCK = 4096
_buffer = mmap.mmap(-1, BLOCK)  # aligned, as O_DIRECT wants it
_done = 0
_stop = False


def operate(fd: int, kind: str, number: int) -> None:
    """One operation, at one of the first places of the device."""
    offset = (number % 256) * BLOCK
    if kind == "r":
        os.preadv(fd, [_buffer], offset)
    else:
        os.pwrite(fd, _buffer, offset)


def be_free(path: str) -> None:
    """Operate until stopped."""
    global _done
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    while not _stop:
        operate(fd, "rw"[_done % 2], _done)
        _done += 1


def be_limited(word: str, seen: dict[str, int]) -> None:
    """Operate as often as it takes, and look how far the free one is."""
    kind, _, path = word.partition(":")
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    before = _done
    for number in range(OPERATIONS):
        operate(fd, kind, number)
    seen[word] = _done - before


def main() -> None:
    """Race."""
    global _stop
    free, *limited = sys.argv[1:]
    seen: dict[str, int] = {}
    running = threading.Thread(target=be_free, args=(free,))
    running.start()
    racing = [threading.Thread(target=be_limited, args=(each, seen)) for each in limited]
    for thread in racing:
        thread.start()
    for thread in racing:
        thread.join()
    _stop = True
    running.join()
    for word in limited:
        sys.stdout.write(f"{seen[word]}\n")


if __name__ == "__main__":
    main()
