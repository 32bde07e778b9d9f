"""The handoff directory against its specification and its layout."""

import re
from pathlib import Path

import pytest

from crust.handoff import layout
from crust.handoff.layout import Layout
from tests.support.records.records import TARGET

ROOT = Path(__file__).parents[3]
UNIT = "tests/unit/handoff"
INTEGRATION = "tests/integration"
CLAIM = f"{INTEGRATION}/runtime_handler/test_claim.py"
KEEPER = f"{INTEGRATION}/runtime_handler/test_keeper.py"
KEPT_VM = "tests/integration/runtime_handler/test_kept_vm.py"
CEPH = f"{INTEGRATION}/ceph/claims/test_claims.py"
MOVES = "tests/e2e/test_ceph_image.py"
VOLUME = "tests/unit/examples_kata/test_runtime_volume.py"
KERNEL = f"{INTEGRATION}/proxy/test_kernel.py"

TESTS = {
    1: (f"{UNIT}/test_specs.py", "entry_is_named_by_digest_of_target_path"),
    2: (f"{UNIT}/test_specs.py", "names_for_building_and_removing_are_hidden_and_temporary"),
    3: (f"{UNIT}/test_store.py", "unknown_names_are_reported_and_kept_by_unpublish"),
    4: (f"{INTEGRATION}/handoff/test_watch.py", "directory_or_file_of_another_user_is_an_error_for_every_reader"),
    5: (f"{UNIT}/test_record.py", "keys_of_later_version_are_ignored_unless_required"),
    6: (f"{UNIT}/test_record.py", "newer_schema_is_reported_whatever_else_differs"),
    7: (f"{UNIT}/test_record.py", "record_in_another_entry_is_refused"),
    8: (f"{UNIT}/test_record.py", "host_options_are_dropped_and_ro_becomes_readonly"),
    9: (f"{UNIT}/test_record.py", "credential_is_refused_and_absent_from_the_error"),
    10: (f"{UNIT}/test_store.py", "unreadable_record_is_never_absent"),
    11: (f"{UNIT}/test_store.py", "entry_without_record_is_absent_and_a_publish_replaces_it"),
    13: ("tests/unit/proxy/test_restart.py", "second_proxy_on_one_handoff_directory_is_refused"),
    14: (f"{UNIT}/test_crashes.py", "publish_killed_anywhere_leaves_complete_entry_or_none"),
    15: (f"{UNIT}/test_store.py", "other_content_never_replaces_the_record_of_a_live_sandbox"),
    16: (f"{UNIT}/test_crashes.py", "rewrite_killed_anywhere_leaves_old_or_new_record"),
    17: (f"{UNIT}/test_store.py", "begin_unpublish_is_refused_while_a_sandbox_has_the_volume"),
    18: (f"{UNIT}/test_crashes.py", "unpublish_killed_anywhere_leaves_the_entry_or_none"),
    19: (f"{UNIT}/test_store.py", "unknown_names_are_reported_and_kept_by_unpublish"),
    20: (f"{UNIT}/test_store.py", "remove_orphans_removes_only_what_a_crash_left"),
    21: (f"{UNIT}/test_claims.py", "lock_file_of_somebody_else_is_refused"),
    22: (f"{UNIT}/test_claims.py", "acquire_of_an_entry_replaced_meanwhile_starts_again"),
    23: (CLAIM, "claim_refuses_a_device_that_was_attached_again"),
    24: (CLAIM, "report_does_not_overwrite_another_sandboxs_claim"),
    25: (CLAIM, "claim_lives_as_long_as_the_hypervisor"),
    26: (f"{UNIT}/test_claims.py", "is_held_does_not_take_the_lock"),
    27: (CLAIM, "adopted_claim_cannot_end_before_it_is_written"),
    28: (CLAIM, "a_device_that_the_host_has_mounted_is_not_claimed"),
    29: (CLAIM, "claim_names_its_sandbox_and_holds_the_device_exclusively"),
    30: (f"{INTEGRATION}/handoff/test_watch.py", "queue_overflow_causes_a_hint_and_no_change_is_lost"),
    31: (f"{INTEGRATION}/handoff/test_watch.py", "each_change_of_an_entry_is_a_hint"),
    32: ("tests/unit/runtime_handler/test_claims_of_authors.py", "longest_target_wins"),
    33: (KERNEL, "sub_path_that_a_kubelet_prepares_leads_to_the_volume"),
    36: (VOLUME, "record_limits_are_set_before_mount"),
    37: (VOLUME, "resume_sets_the_current_limits_of_the_record"),
    38: (CLAIM, "group_that_a_kubelet_gave_to_the_guard_mount_becomes_the_volumes"),
    39: (f"{INTEGRATION}/host/mounts/test_mount_api.py", "mount_guard_without_names_takes_owner_mode_and_label"),
    41: ("tests/unit/proxy/csi/test_refusals.py", "unreadable_entry_blocks_what_may_be_its"),
    42: (f"{UNIT}/test_store.py", "files_of_runtime_are_neither_reported_nor_kept"),
    40: (f"{UNIT}/test_record.py", "group_without_a_policy_is_changed_only_on_root_mismatch"),
    43: (KEEPER, "claim_outlives_the_daemon_and_ends_with_the_vm"),
    44: (KEEPER, "keeper_is_small_ignores_the_daemons_signals_and_imports_no_package"),
    45: (KEEPER, "keeper_or_standby_killed_releases_nothing"),
    46: (KEPT_VM, "vm_is_killed_if_another_sandbox_had_the_volume_and_gave_it_back"),
    47: ("tests/e2e/microvm/test_format.py", "blank_disk_is_formatted_once"),
    49: ("tests/e2e/microvm/test_format.py", "wrong_passphrase_is_an_error_that_says_so_and_changes_nothing"),
    50: (f"{UNIT}/test_record.py", "record_with_two_kinds_of_source_or_none_is_refused"),
    51: (CEPH, "of_two_takers_one_gets_the_image"),
    52: (CEPH, "holder_fenced_before_it_recorded_its_client_gets_an_error"),
    53: (CEPH, "writes_of_a_fenced_client_fail_and_the_next_node_has_what_was_synced"),
    54: (MOVES, "key_of_the_images_user_is_in_no_file_command_line_environment_or_log"),
    55: (MOVES, "wrong_key_stops_before_the_hypervisor"),
    56: (f"{INTEGRATION}/runtime_handler/test_keeper_files.py", "it_goes_with_what_ends_first"),
    35: (MOVES, "grown_image_grows_in_the_guest_alone"),
    48: ("tests/e2e/test_daemons_killed.py", "example_microvm_runtime_breaks_no_duty"),
}  # fmt: skip

ELSEWHERE = {
    12: "the kernel that mounts: the runtime's guest",
    34: "the kernel that mounts: the runtime's guest",
}


def test_clauses_are_numbered_without_gaps_and_none_is_forgotten() -> None:
    text = (ROOT / "specs" / "handoff.md").read_text(encoding="utf-8")
    numbers = [int(number) for number in re.findall(r"^- \*\*H-(\d+)\*\*", text, re.MULTILINE)]
    assert sorted(numbers) == list(range(1, len(numbers) + 1))
    assert sorted([*TESTS, *ELSEWHERE]) == sorted(numbers)


@pytest.mark.parametrize("clause", sorted(TESTS))
def test_test_of_clause_exists(clause: int) -> None:
    file, name = TESTS[clause]
    assert f"def test_{name}(" in (ROOT / file).read_text(encoding="utf-8")


def test_every_clause_that_the_code_or_a_decision_cites_exists() -> None:
    cited = {
        int(number)
        for folder in ("crust", "docs/decisions")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".md")
        for number in re.findall(r"\bH-(\d+)\b", path.read_text(encoding="utf-8"))
    }
    assert cited <= {*TESTS, *ELSEWHERE}


def test_entry_is_named_by_digest_of_target_path() -> None:
    entry = Layout("/r").entry(TARGET)
    assert entry.directory == f"/r/{TARGET.digest}"
    assert entry == Layout("/r").entry(TARGET.digest)
    assert entry.record == f"/r/{TARGET.digest}/mountInfo.json"
    assert entry.claim_lock == f"/r/{TARGET.digest}/claim.lock"


@pytest.mark.parametrize("key", ["", "abc", "../" + "a" * 61, "A" * 64, "a" * 63 + "/", "a" * 65])
def test_entry_refuses_a_name_that_is_not_a_digest(key: str) -> None:
    with pytest.raises(ValueError, match="not an entry's name"):
        Layout("/r").entry(key)


def test_names_for_building_and_removing_are_hidden_and_temporary() -> None:
    names = Layout("/r")
    for path in (names.new_staging(TARGET.digest), names.new_gone(TARGET.digest)):
        name = path.removeprefix("/r/")
        assert layout.is_hidden(name)
        assert layout.is_temporary(name)
    assert names.new_staging(TARGET.digest) != names.new_staging(TARGET.digest)


def test_names_are_legal_hidden_or_unknown() -> None:
    assert layout.is_entry(TARGET.digest)
    assert not layout.is_entry("lost+found")
    assert not layout.is_temporary(".other")
    unknown = [name for name in ("mountInfo.json", ".x", "sandbox-7") if layout.is_unknown(name)]
    assert unknown == ["sandbox-7"]
