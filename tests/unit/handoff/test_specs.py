"""specs/handoff.md: every clause is numbered once, and has a test that fails when it is broken."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
UNIT = "tests/unit/handoff"
INTEGRATION = "tests/integration"
CLAIM = f"{INTEGRATION}/runtime_handler/test_claim.py"
VOLUME = "tests/unit/examples_kata/test_runtime_volume.py"
RESOLVE = f"{INTEGRATION}/runtime_handler/test_resolve.py"

TESTS = {
    1: (f"{UNIT}/test_layout.py", "an_entry_is_named_by_the_digest_of_the_target_path"),
    2: (f"{UNIT}/test_layout.py", "what_is_built_and_what_is_removed_is_invisible_and_ours"),
    3: (f"{UNIT}/test_store.py", "names_that_are_nobodys_are_told_and_survive_a_withdrawal"),
    4: (f"{INTEGRATION}/handoff/test_owners.py", "what_a_stranger_owns_is_an_error_for_every_reader"),
    5: (f"{UNIT}/test_record.py", "what_is_not_a_record_is_unreadable_and_says_where"),
    6: (f"{UNIT}/test_record.py", "a_newer_schema_is_named_whatever_else_it_brings"),
    7: (f"{UNIT}/test_record.py", "a_record_in_another_entry_is_refused"),
    8: (f"{UNIT}/test_record.py", "words_of_the_host_are_left_out_and_ro_becomes_readonly"),
    9: (f"{UNIT}/test_record.py", "a_credential_is_refused_and_its_value_is_nowhere_in_the_error"),
    10: (f"{UNIT}/test_store.py", "a_record_that_cannot_be_read_is_never_absent_and_never_replaced"),
    11: (f"{UNIT}/test_store.py", "an_entry_without_a_record_is_absent_and_gives_way_to_a_new_one"),
    14: (f"{UNIT}/test_crashes.py", "a_publish_killed_anywhere_leaves_all_or_nothing_and_can_be_repeated"),
    15: (f"{UNIT}/test_store.py", "other_content_never_replaces_what_a_sandbox_has"),
    16: (f"{UNIT}/test_crashes.py", "a_rewrite_killed_anywhere_leaves_the_old_or_the_new_record"),
    17: (f"{UNIT}/test_store.py", "no_withdrawal_begins_while_a_sandbox_has_the_volume"),
    18: (f"{UNIT}/test_crashes.py", "a_withdrawal_killed_anywhere_leaves_the_entry_or_none_and_can_be_repeated"),
    19: (f"{UNIT}/test_store.py", "names_that_are_nobodys_are_told_and_survive_a_withdrawal"),
    20: (f"{UNIT}/test_store.py", "a_sweep_removes_what_a_crash_left_and_nothing_else"),
    21: (f"{UNIT}/test_claims.py", "only_the_lock_file_that_the_proxy_made_is_locked"),
    22: (f"{UNIT}/test_claims.py", "a_claimant_that_locked_a_withdrawn_entry_begins_anew"),
    23: (CLAIM, "a_device_that_was_attached_anew_is_not_taken_for_the_one_that_was_meant"),
    24: (CLAIM, "a_claim_that_went_to_another_sandbox_is_not_written_over"),
    25: (CLAIM, "a_claim_lives_in_the_hypervisor_and_dies_with_it"),
    26: (f"{UNIT}/test_claims.py", "asking_whether_a_lock_is_held_does_not_take_it"),
    27: (CLAIM, "a_restarted_handler_adopts_the_claims_of_its_own_sandboxes"),
    28: (CLAIM, "a_device_that_the_host_has_mounted_is_not_claimed"),
    29: (CLAIM, "a_claim_names_its_sandbox_and_fences_the_device"),
    30: (f"{INTEGRATION}/handoff/test_watch.py", "nothing_is_missed_when_the_kernels_queue_overflows"),
    31: (f"{INTEGRATION}/handoff/test_watch.py", "an_entrys_whole_life_is_seen"),
    32: ("tests/unit/runtime_handler/test_resolve.py", "the_longest_target_wins"),
    33: (RESOLVE, "a_sealed_target_without_an_entry_is_refused_and_never_shared"),
    36: (VOLUME, "record_limits_are_set_before_mount"),
    37: (VOLUME, "resume_sets_the_current_limits_of_the_record"),
    38: (CLAIM, "a_group_that_a_kubelet_gave_to_the_seal_is_the_volumes"),
}  # fmt: skip

ELSEWHERE = {
    12: "the kernel that mounts: the runtime's guest",
    13: "the proxy's process lock",
    34: "the kernel that mounts: the runtime's guest",
    35: "the proxy's call of a runtime's command",
}


def test_clauses_are_numbered_without_gaps_and_none_is_forgotten() -> None:
    text = (ROOT / "specs" / "handoff.md").read_text(encoding="utf-8")
    numbers = [int(number) for number in re.findall(r"^- \*\*H-(\d+)\*\*", text, re.MULTILINE)]
    assert sorted(numbers) == list(range(1, len(numbers) + 1))
    assert sorted([*TESTS, *ELSEWHERE]) == sorted(numbers)


@pytest.mark.parametrize("clause", sorted(TESTS))
def test_a_clauses_test_is_there(clause: int) -> None:
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
