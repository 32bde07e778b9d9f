"""The rules of `sync_trace` on traces that are written by hand: each breach is seen, and a good order is not one."""

import pytest

from tests.support.faults import sync_trace

POOL = "/p/state"
RECORDS = f"{POOL}/records"
ASIDE, RECORD = f"{RECORDS}/.v.json.aa.crust-tmp", f"{RECORDS}/v.json"
IMAGE = f"{POOL}/images/v.img"

IMAGE_MADE = (
    f'9 openat(AT_FDCWD</>, "{IMAGE}", O_RDWR|O_CREAT, 0600) = 6<{IMAGE}>',
    f"9 ftruncate(6<{IMAGE}>, 4096) = 0",
    f"9 fsync(6<{IMAGE}>) = 0",
    f"9 fsync(6<{POOL}/images>) = 0",
)
RECORD_WRITTEN = (
    f'9 openat(AT_FDCWD</>, "{ASIDE}", O_WRONLY|O_CREAT|O_EXCL, 0600) = 6<{ASIDE}>',
    f'9 write(6<{ASIDE}>, "{{\\"schema\\""..., 40) = 40',
    f"9 fsync(6<{ASIDE}>) = 0",
    f'9 rename("{ASIDE}", "{RECORD}") = 0',
    f'9 unlink("{ASIDE}") = -1 ENOENT (No such file or directory)',
    f"9 fsync(6<{RECORDS}>) = 0",
)
FORMATTED = (
    '10 pwrite64(3</dev/loop4<block 7:4>>, "\\0"..., 4096, 0) = 4096',
    "10 fsync(3</dev/loop4<block 7:4>>) = 0",
)
ASIDE_VOLUME, VOLUME = f"{POOL}/volumes/.new-v", f"{POOL}/volumes/v"
VOLUME_MADE = (
    f'9 mkdir("{ASIDE_VOLUME}", 0700) = 0',
    f'9 openat(AT_FDCWD</>, "{ASIDE_VOLUME}/v.img", O_RDWR|O_CREAT, 0600) = 6<{ASIDE_VOLUME}/v.img>',
    f"9 ftruncate(6<{ASIDE_VOLUME}/v.img>, 4096) = 0",
    f'9 openat(AT_FDCWD</>, "{ASIDE_VOLUME}/v.json", O_WRONLY|O_CREAT, 0600) = 7<{ASIDE_VOLUME}/v.json>',
    f'9 write(7<{ASIDE_VOLUME}/v.json>, "{{\\"schema\\""..., 40) = 40',
    f"9 fsync(7<{ASIDE_VOLUME}/v.json>) = 0",
    f"9 fsync(6<{ASIDE_VOLUME}/v.img>) = 0",
    f"9 fsync(6<{ASIDE_VOLUME}>) = 0",
    f'9 rename("{ASIDE_VOLUME}", "{VOLUME}") = 0',
    f"9 fsync(6<{POOL}/volumes>) = 0",
)
VOLUME_REMOVED = (
    f'9 rename("{VOLUME}", "{POOL}/volumes/.gone-v") = 0',
    f"9 fsync(6<{POOL}/volumes>) = 0",
    f'9 unlink("{POOL}/volumes/.gone-v/v.img") = 0',
    f'9 rmdir("{POOL}/volumes/.gone-v") = 0',
)
START = '9 rmdir("/answered/start") = -1 ENOENT (No such file or directory)'
ANSWER = '9 rmdir("/answered/CreateVolume") = -1 ENOENT (No such file or directory)'
LIFE = (
    START, *IMAGE_MADE, *RECORD_WRITTEN, *FORMATTED, *RECORD_WRITTEN, ANSWER,
    *VOLUME_MADE, ANSWER, *VOLUME_REMOVED, ANSWER,
)  # fmt: skip


def late(*lines: str) -> list[str]:
    return list(sync_trace.late(POOL, sync_trace.events(lines, POOL)))


def test_a_life_in_which_each_step_is_synced_breaks_no_rule() -> None:
    assert late(*LIFE) == []


@pytest.mark.parametrize("place", [n for n, line in enumerate(LIFE) if "fsync" in line])
def test_a_life_without_one_of_its_syncs_breaks_a_rule(place: int) -> None:
    assert late(*LIFE[:place], *LIFE[place + 1 :])


def test_a_record_that_is_synced_after_its_rename_breaks_a_rule() -> None:
    opened, written, synced, named, gone, listed = RECORD_WRITTEN
    assert late(START, opened, written, named, synced, gone, listed, ANSWER)


def test_a_record_before_its_image_breaks_no_rule_but_an_image_without_its_sync_does() -> None:
    assert late(START, *RECORD_WRITTEN, *IMAGE_MADE, ANSWER) == []
    assert late(START, *IMAGE_MADE[:2], *RECORD_WRITTEN, *IMAGE_MADE[2:], ANSWER)


def test_a_sync_that_began_before_the_write_ended_does_not_count() -> None:
    opened, written, _, named, gone, listed = RECORD_WRITTEN
    crossed = (
        f"11 fsync(6<{ASIDE}> <unfinished ...>",
        written,
        "11 <... fsync resumed>) = 0",
    )
    assert late(START, opened, *crossed, named, gone, listed, ANSWER)


def test_a_removed_name_is_to_be_synced_and_a_temporary_one_is_not() -> None:
    assert late(START, f'9 unlink("{RECORD}") = 0', ANSWER)
    assert late(START, f'9 unlink("{RECORD}") = 0', RECORD_WRITTEN[-1], ANSWER) == []
    assert late(START, f'9 unlink("{ASIDE}") = 0', ANSWER) == []


def test_what_is_outside_of_the_pool_need_not_be_synced() -> None:
    assert late(START, '9 write(4</p/run/boot/x.json>, "x", 1) = 1', ANSWER) == []
    assert late(START, '9 write(4</p/state/records.reserve>, "x", 1) = 1', ANSWER) == []
