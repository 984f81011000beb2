"""The ledger of launched jobs: what its files say, and the verdict on a job by all evidence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from runtime.end_reasons import EndReason
from runtime.errors import NotPossible, RequestRefused, UnknownName
from runtime.jobs import ledger
from runtime.jobs.hosts.local import LocalFiles
from runtime.jobs.ledger import BackendRefusal, IndexStatus, LedgerEntry, NativeJob, RunOutcome, judge
from runtime.jobs.plan import NativeState
from runtime.jobs.run_config import begin_epoch, find_unnoted
from runtime.jobs.spec import JobState

AT = datetime(2026, 1, 1, tzinfo=UTC)
JOB = "j-0123456789abcdef01234567"
OTHER = "j-1123456789abcdef01234567"
INTENT = {"name": "train", "owner": "ada", "target": "hpc", "kind": "slurm", "at": "2026-01-01T00:00:00Z"}


def started(part: int = 0, epoch: int = 1, native_id: str = "7") -> NativeJob:
    return NativeJob(name="n", native_id=native_id, part=part, epoch=epoch, at=AT)


def entry_of(
    *, natives: Sequence[NativeJob] = (started(),), parts: int = 1, offset: int = 0, **fields: Any
) -> LedgerEntry:
    """Return the entry of a job with one run, unless the fields say otherwise."""
    return LedgerEntry(
        **{
            "id": JOB,
            "name": "train",
            "owner": "ada",
            "target": "hpc",
            "kind": "slurm",
            "launched_at": AT,
            "snapshot": None,
            "indices": 1,
            "natives": tuple(natives),
            "outcomes": {},
            "intent": {"parts": [{}] * parts, "offset": offset},
            **fields,
        }
    )


def said(state: JobState, index: int | None = None, **fields: Any) -> NativeState:
    return NativeState(native_id="7", index=index, state=state, **fields)


def judged(entry: LedgerEntry, *natives: NativeState, begun: frozenset[int] | None = None) -> list[IndexStatus]:
    return list(judge(entry, natives, begun=begun, indices=True).indices)


# the verdict on one run


def test_committed_result_counts_before_a_cancel_and_before_the_backend() -> None:
    outcome = RunOutcome(job=JOB, index=0, reason=EndReason.OOM, code=137, attempt=3)

    [status] = judged(entry_of(outcomes={0: outcome}, cancelled=True), said(JobState.RUNNING))

    assert status == IndexStatus(index=0, state=JobState.FAILED, reason=EndReason.OOM, attempt=3, exit_code=137)


@pytest.mark.parametrize(
    ("native", "state"),
    [
        (None, JobState.CANCELLED),
        (said(JobState.FAILED, reason=EndReason.OOM), JobState.CANCELLED),
        (said(JobState.SUCCEEDED), JobState.CANCELLED),
        (said(JobState.RUNNING), JobState.RUNNING),
        (said(JobState.PENDING), JobState.PENDING),
        (said(JobState.UNKNOWN), JobState.UNKNOWN),
    ],
)
def test_cancelled_job_is_cancelled_once_its_native_job_no_longer_lives(
    native: NativeState | None, state: JobState
) -> None:
    natives = [] if native is None else [native]

    assert [each.state for each in judged(entry_of(cancelled=True), *natives)] == [state]


def test_cancel_of_one_index_leaves_the_others() -> None:
    entry = entry_of(indices=3, cancelled_indices=frozenset({1}))

    states = [each.state for each in judged(entry, *(said(JobState.FAILED, index) for index in range(3)))]

    assert states == [JobState.FAILED, JobState.CANCELLED, JobState.FAILED]


def test_job_that_was_not_submitted_is_pending_refused_or_cancelled() -> None:
    refused = BackendRefusal(reason=EndReason.CONFIG_INVALID, message="no such partition")

    [pending] = judged(entry_of(natives=()))
    [bad] = judged(entry_of(natives=(), refused=refused))
    [cancelled] = judged(entry_of(natives=(), cancelled=True))

    assert (pending.state, pending.reason, pending.message) == (JobState.PENDING, None, "not submitted yet")
    assert (bad.state, bad.reason, bad.message) == (JobState.FAILED, EndReason.CONFIG_INVALID, "no such partition")
    assert cancelled.state is JobState.CANCELLED


def test_refusal_says_nothing_of_a_job_that_was_accepted_later() -> None:
    refused = BackendRefusal(reason=EndReason.CONFIG_INVALID, message="no such partition")

    [status] = judged(entry_of(refused=refused))

    assert (status.state, status.reason) == (JobState.FAILED, EndReason.LOST)


def test_job_whose_launch_was_cut_off_between_its_parts_waits_for_the_rest() -> None:
    two_of_three = [started(0), started(1), started(1, epoch=2)]

    assert judged(entry_of(natives=two_of_three, parts=3))[0].message == "not submitted yet"
    [gone] = judged(entry_of(natives=[*two_of_three, started(2)], parts=3))
    assert (gone.state, gone.reason, gone.message) == (JobState.FAILED, EndReason.LOST, "gone without a result")


@pytest.mark.parametrize(
    ("order", "unnoted"),
    [
        ({}, {}),
        ({"epoch": 2}, {}),  # of an earlier release, which did not name the parts
        ({"epoch": 3}, {0: 3, 1: 3, 2: 3}),
        ({"epoch": "3", "starts": ["0"]}, {}),
        ({"epoch": 3, "starts": {"0": "3", "9": 3}}, {}),
        (begin_epoch({}, 2, [1]), {}),
        (begin_epoch({}, 2, [1, 2]), {2: 2}),
        (begin_epoch({"starts": ["0"]}, 2, [2]), {2: 2}),
        (begin_epoch(begin_epoch({}, 2, [1, 2]), 3, [0]), {0: 3, 2: 2}),
    ],
)
def test_parts_that_were_begun_and_not_written_down_are_known(order: dict[str, Any], unnoted: dict[int, int]) -> None:
    entry = entry_of(natives=[started(0), started(1), started(1, epoch=2), started(2)], parts=3)

    assert find_unnoted(order, entry) == unnoted


@pytest.mark.parametrize(
    ("native", "reason", "message"),
    [
        (said(JobState.SUCCEEDED, raw="COMPLETED"), EndReason.LOST, "COMPLETED"),
        (said(JobState.SUCCEEDED, reason=EndReason.SUCCEEDED), EndReason.LOST, ""),
        (said(JobState.FAILED, raw="FAILED"), EndReason.LOST, "FAILED"),
        (said(JobState.FAILED, reason=EndReason.OOM, raw="OOM", message="too large"), EndReason.OOM, "too large"),
    ],
)
def test_native_end_without_a_result_is_the_backends_reason_and_never_a_success(
    native: NativeState, reason: EndReason, message: str
) -> None:
    [status] = judged(entry_of(), native)

    assert (status.state, status.reason, status.message) == (JobState.FAILED, reason, message)


def test_exit_code_of_the_backend_is_told() -> None:
    [status] = judged(entry_of(), said(JobState.FAILED, reason=EndReason.APP_FAILED, exit_code=3))

    assert status.exit_code == 3


def test_only_a_pending_job_has_a_reason_before_its_end() -> None:
    waits = said(JobState.PENDING, reason=EndReason.IMAGE_FAILED, message="no such image")
    runs = said(JobState.RUNNING, reason=EndReason.IMAGE_FAILED, message="on node 3")

    pending, running = judge(entry_of(), [waits], indices=True), judge(entry_of(), [runs], indices=True)

    assert (pending.reason, pending.indices[0].message) == (EndReason.IMAGE_FAILED, "no such image")
    assert (running.reason, running.indices[0].reason, running.indices[0].message) == (None, None, "on node 3")


@pytest.mark.parametrize("backwards", [False, True])
def test_living_native_job_counts_more_than_the_ones_before_it(backwards: bool) -> None:
    natives = [said(JobState.FAILED, reason=EndReason.NODE_FAILED), said(JobState.RUNNING)]

    [status] = judged(entry_of(), *(natives[::-1] if backwards else natives))

    assert status.state is JobState.RUNNING


def test_state_of_an_index_counts_more_than_that_of_the_whole() -> None:
    states = [each.state for each in judged(entry_of(indices=3), said(JobState.PENDING), said(JobState.RUNNING, 1))]

    assert states == [JobState.PENDING, JobState.RUNNING, JobState.PENDING]


def test_runs_that_a_native_job_takes_in_turn_wait_until_they_have_begun() -> None:
    runs, waits = said(JobState.RUNNING), said(JobState.PENDING, message="Resources")
    entry = entry_of(indices=3, cancelled_indices=frozenset({0, 2}))

    in_turn = judged(entry, runs, begun=frozenset({0}))
    assert [each.state for each in in_turn] == [JobState.RUNNING, JobState.PENDING, JobState.CANCELLED]
    assert in_turn[1].message == ledger.ITS_TURN

    assert [each.state for each in judged(entry, runs)] == [JobState.RUNNING] * 3
    assert [each.message for each in judged(entry, waits, begun=frozenset({0}))] == ["Resources"] * 3
    told = [said(JobState.RUNNING, index) for index in range(3)]
    assert [each.state for each in judged(entry, *told, begun=frozenset({0}))] == [JobState.RUNNING] * 3


def test_reason_of_an_array_is_that_of_its_first_failed_index() -> None:
    ends = (EndReason.CANCELLED, EndReason.OOM, EndReason.TIMEOUT)
    outcomes = {
        index: RunOutcome(job=JOB, index=index, reason=end, code=1, attempt=1) for index, end in enumerate(ends, 4)
    }
    entry = entry_of(indices=3, offset=4, outcomes=outcomes)

    status = judge(entry, [])

    assert (status.state, status.reason, status.indices) == (JobState.FAILED, EndReason.OOM, ())
    assert status.counts == {JobState.CANCELLED: 1, JobState.FAILED: 2}
    assert judge(entry_of(indices=4, offset=4, outcomes=outcomes), [said(JobState.RUNNING, 7)]).reason is None


def test_index_of_a_job_lies_between_its_first_and_its_last() -> None:
    entry = entry_of(indices=3, offset=4)
    assert [ledger.check_index(entry, index) for index in (4, 6)] == [4, 6]

    for index in (3, 7):
        with pytest.raises(UnknownName, match="4 to 6"):
            ledger.check_index(entry, index)
    with pytest.raises(UnknownName, match="no array"):
        ledger.check_index(entry_of(), 1)


# files


@pytest.fixture
def files(tmp_path: Path) -> LocalFiles:
    return LocalFiles(str(tmp_path / "records"))


def launch(files: LocalFiles, job: str = JOB, *, indices: int = 1, parts: int = 1) -> None:
    files.make_folder(ledger.job_folder(job))
    intent = {**INTENT, "indices": indices, "parts": [{}] * parts}
    files.write(f"{ledger.job_folder(job)}/intent.json", json.dumps(intent).encode())


def both(files: LocalFiles, job: str = JOB) -> list[LedgerEntry | None]:
    """Read an entry by itself, and with all others."""
    return [ledger.read_entry(files, job), next(iter(ledger.read_many_entries(files, [job])), None)]


def test_entry_is_the_same_read_alone_and_with_many(files: LocalFiles) -> None:
    launch(files, parts=2)
    launch(files, OTHER)
    for part in (0, 1):
        ledger.record_native(files, JOB, started(part, native_id=str(part)))
    ledger.leave_mark(files, JOB, "cancel", b"")

    alone, many = both(files)

    assert alone == many
    assert alone is not None
    assert (alone.natives, alone.cancelled, alone.refused) == ((started(0, 1, "0"), started(1, 1, "1")), True, None)
    assert (alone.name, alone.owner, alone.launched_at, alone.first_index) == ("train", "ada", AT, 0)
    assert [entry and (entry.natives, entry.cancelled) for entry in both(files, OTHER)] == [((), False)] * 2


def test_refusal_is_read_until_a_native_job_was_started(files: LocalFiles) -> None:
    launch(files)
    ledger.record_refusal(files, JOB, RequestRefused("no such partition"))
    refusals = [entry.refused for entry in both(files) if entry]
    assert [refused and refused.reason for refused in refusals] == [EndReason.CONFIG_INVALID] * 2
    assert refusals[0] == refusals[1]

    ledger.record_native(files, JOB, started())
    assert [judge(entry, []).reason for entry in both(files) if entry] == [EndReason.LOST] * 2


def test_refusal_that_a_crash_cut_off_is_none(files: LocalFiles) -> None:
    launch(files)
    for content in (b"", b'{"reason": "oo', b'{"reason": "odd", "message": ""}', b"{}", b"[]"):
        files.write(f"{ledger.job_folder(JOB)}/{ledger.REFUSED}", content)
        assert [entry.refused for entry in both(files) if entry] == [None, None]


def test_retried_job_has_the_native_jobs_of_all_its_epochs_and_the_newest_of_each_part_counts(
    files: LocalFiles,
) -> None:
    launch(files, parts=2)
    for native in (started(0, 1, "1"), started(1, 1, "2"), started(0, 10, "4"), started(0, 2, "3")):
        ledger.record_native(files, JOB, native)

    alone, many = both(files)

    assert alone == many
    assert alone is not None
    assert {native.native_id for native in alone.natives} == {"1", "2", "3", "4"}
    assert [native.native_id for native in ledger.newest_natives(alone)] == ["4", "2"]
    assert ledger.read_natives(files, [alone]) == {JOB: alone.natives}


def test_native_jobs_of_many_are_read_in_one_go(files: LocalFiles) -> None:
    launch(files, parts=2)
    launch(files, OTHER)
    for part in (0, 1):
        ledger.record_native(files, JOB, started(part))
    entries = ledger.read_many_entries(files, [JOB, OTHER])

    assert ledger.read_natives(files, entries) == {JOB: (started(0), started(1)), OTHER: ()}


def test_array_with_an_index_that_has_not_ended_has_its_marks_and_one_that_has_ended_needs_none(
    files: LocalFiles,
) -> None:
    launch(files, indices=2)
    ledger.leave_mark(files, JOB, "cancel.1", b"")
    ledger.leave_mark(files, JOB, "cancel.odd", b"")
    ledger.record_native(files, JOB, started())
    ledger.record_end(
        files, JOB, IndexStatus(index=0, state=JobState.SUCCEEDED, reason=EndReason.SUCCEEDED, exit_code=0)
    )

    alone, many = both(files)
    assert alone == many
    assert alone is not None
    assert (set(alone.outcomes), alone.cancelled_indices, alone.cancelled) == ({0}, frozenset({1}), False)
    assert alone.natives == (started(),)

    ledger.record_end(files, JOB, IndexStatus(index=1, state=JobState.FAILED, reason=EndReason.OOM))
    [entry] = ledger.read_many_entries(files, [JOB])
    assert judge(entry, []).state is JobState.FAILED


def test_job_that_is_none_or_whose_intent_is_damaged(files: LocalFiles) -> None:
    assert both(files) == [None, None]

    files.make_folder(ledger.job_folder(JOB))
    files.write(f"{ledger.job_folder(JOB)}/intent.json", b"{")
    assert ledger.read_many_entries(files, [JOB]) == []
    with pytest.raises(NotPossible, match="damaged"):
        ledger.read_entry(files, JOB)


def test_only_ids_of_jobs_are_listed(files: LocalFiles) -> None:
    for name in (JOB, OTHER, "j-xyz", f"{JOB}.tmp", "notes"):
        files.make_folder(f"jobs/{name}")

    assert sorted(ledger.list_jobs(files)) == [JOB, OTHER]


def test_end_that_only_the_backend_knows_is_committed_once_with_its_attempt(files: LocalFiles) -> None:
    launch(files)
    for attempt in (1, 2, 10):
        files.make_folder(f"{ledger.job_folder(JOB)}/runs/0/a{attempt}")
    assert ledger.list_attempts(files, JOB, 0) == [1, 2, 10]

    ledger.record_end(files, JOB, IndexStatus(index=0, state=JobState.FAILED, reason=EndReason.NODE_FAILED))
    ledger.record_end(files, JOB, IndexStatus(index=0, state=JobState.FAILED, reason=EndReason.OOM, exit_code=9))

    expected = RunOutcome(job=JOB, index=0, reason=EndReason.NODE_FAILED, code=1, attempt=10)
    assert ledger.read_outcomes(files) == ledger.read_outcomes(files, JOB) == {JOB: {0: expected}}
    assert ledger.read_outcomes(files, OTHER) == {}


def test_end_without_a_reason_is_lost_and_keeps_its_exit_code(files: LocalFiles) -> None:
    launch(files)

    ledger.record_end(files, JOB, IndexStatus(index=0, state=JobState.FAILED, exit_code=0))

    assert ledger.read_outcomes(files)[JOB][0] == RunOutcome(job=JOB, index=0, reason=EndReason.LOST, code=0, attempt=0)


def test_mark_that_is_there_stays(files: LocalFiles) -> None:
    launch(files)

    ledger.leave_mark(files, JOB, "cancel", b"first")
    ledger.leave_mark(files, JOB, "cancel", b"second")

    assert files.read(f"{ledger.job_folder(JOB)}/cancel") == b"first"


# runs that a native job takes in turn, and ends before the command


def test_begun_runs_are_looked_for_only_if_one_native_job_runs_many(files: LocalFiles) -> None:
    launch(files, indices=3)
    runs = f"{ledger.job_folder(JOB)}/runs"
    entry = entry_of(indices=3)
    whole = [said(JobState.RUNNING)]
    assert ledger.find_begun(files, entry, whole) is None  # everything is folded

    for name in ("0", "odd"):
        files.make_folder(f"{runs}/{name}")
    files.write(f"{runs}/1.ended", b"")

    assert ledger.find_begun(files, entry, whole) == frozenset({0, 1})
    assert ledger.find_begun(files, entry_of(), whole) is None
    assert ledger.find_begun(files, entry, [said(JobState.PENDING)]) is None
    assert ledger.find_begun(files, entry, [said(JobState.RUNNING, 0)]) is None


def test_native_job_that_failed_before_its_command_began_failed_in_its_setup(files: LocalFiles) -> None:
    launch(files, indices=4)
    runs = f"{ledger.job_folder(JOB)}/runs"
    files.make_folder(f"{runs}/1/a1")  # open
    for attempt in ("a1", "a2"):
        files.make_folder(f"{runs}/2/{attempt}")
    files.write(f"{runs}/2/a2/end.1", b"")  # ended
    outcome = RunOutcome(job=JOB, index=3, reason=EndReason.APP_FAILED, code=1, attempt=1)
    failed = [said(JobState.FAILED, index, reason=EndReason.APP_FAILED, exit_code=index) for index in range(4)]

    named = ledger.name_unbegun(files, entry_of(indices=4, outcomes={3: outcome}), failed)

    ends = [EndReason.SETUP_FAILED, EndReason.APP_FAILED, EndReason.SETUP_FAILED, EndReason.APP_FAILED]
    assert [each.reason for each in named] == ends
    assert named[0].message == "it ended before its command began"
    assert named[2].message == "it ended with exit code 2 before its command began"
    assert [named[1], named[3]] == [failed[1], failed[3]]


def test_end_for_another_reason_or_of_a_living_job_or_of_a_whole_array_keeps_its_name(files: LocalFiles) -> None:
    launch(files, indices=2)
    states = [
        said(JobState.FAILED, 0, reason=EndReason.OOM),
        said(JobState.RUNNING, 0),
        said(JobState.FAILED, None, reason=EndReason.APP_FAILED),
    ]
    assert ledger.name_unbegun(files, entry_of(indices=2), states) == states

    [named] = ledger.name_unbegun(files, entry_of(offset=5), states[2:])
    assert named.reason is EndReason.SETUP_FAILED


def test_time_of_a_native_job_survives_its_file(files: LocalFiles) -> None:
    launch(files)
    native = NativeJob(name="n", native_id="7", part=0, epoch=1, at=AT + timedelta(hours=3, seconds=7))
    ledger.record_native(files, JOB, native)

    assert [entry.natives for entry in both(files) if entry] == [(native,)] * 2
