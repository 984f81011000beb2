"""Where jobs stand: one question to the backend, and the results once more."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from runtime.end_reasons import EndReason
from runtime.errors import InfrastructureFailure, StoreUnavailable
from runtime.jobs import ledger
from runtime.jobs.hosts.base import Host
from runtime.jobs.hosts.local import LocalHost
from runtime.jobs.ledger import IndexStatus, JobStatus, LedgerEntry, NativeJob
from runtime.jobs.plan import NativeState, Target
from runtime.jobs.spec import JobState
from runtime.launchers.job_status import ask, judge_job, judge_jobs
from runtime.launchers.local.launcher import LocalLauncher
from runtime.system import system

FIRST, SECOND = "j-0123456789abcdef01234567", "j-1123456789abcdef01234567"
TARGET = Target(name="hpc", kind="local")


class Backend(LocalLauncher):
    """A backend that answers what it is told to."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.answers: list[NativeState] = []
        self.problem: InfrastructureFailure | None = None
        self.meanwhile: Any = lambda: None

    def states(self, target: Target, native_ids: Sequence[str], host: Host) -> list[NativeState]:
        self.asked.append(list(native_ids))
        self.meanwhile()
        if self.problem is not None:
            raise self.problem
        return self.answers

    def say(self, native_id: str, state: JobState, index: int | None = None, **fields: Any) -> None:
        self.answers.append(NativeState(native_id=native_id, index=index, state=state, **fields))


class Root:
    """Jobs in a record root, each with one native job."""

    def __init__(self, folder: Path) -> None:
        self.backend = Backend()
        self.host = LocalHost(str(folder / "records"))

    def launch(self, job: str, *native_ids: str, indices: int = 1, epochs: bool = False, **more: str) -> None:
        files, folder = self.host.files, ledger.job_folder(job)
        files.make_folder(folder)
        parts = 1 if epochs else len(native_ids)
        intent = {"name": "train", "owner": "ada", "target": "hpc", "kind": "local", "at": "2026-01-01T00:00:00Z"}
        files.write(
            f"{folder}/intent.json", json.dumps({**intent, **more, "indices": indices, "parts": ["p"] * parts}).encode()
        )
        for number, native_id in enumerate(native_ids):
            part, epoch = (0, number + 1) if epochs else (number, 1)
            native = NativeJob(name="n", native_id=native_id, part=part, epoch=epoch, at=ledger.now())
            ledger.record_native(files, job, native)

    def end(self, job: str, reason: EndReason = EndReason.SUCCEEDED, index: int = 0) -> None:
        ended = IndexStatus(index=index, state=ledger.state_of(reason), reason=reason, exit_code=0)
        ledger.record_end(self.host.files, job, ended)

    def entries(self, *jobs: str) -> list[LedgerEntry]:
        return ledger.read_many_entries(self.host.files, jobs)

    def judge(self, *jobs: str, **options: Any) -> list[JobStatus]:
        options = {"tell": None, **options}
        found = judge_jobs(self.entries(*jobs), TARGET, self.backend, self.host, **options)
        return [status for status, _ in found]

    def states(self, *jobs: str) -> list[JobState]:
        return [status.state for status in self.judge(*jobs)]


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(tmp_path)


def test_all_open_jobs_are_asked_about_in_one_question_and_ended_ones_not(root: Root) -> None:
    root.launch(FIRST, "7")
    root.launch(SECOND, "8")
    root.launch("j-2", "9")
    root.end("j-2")
    root.backend.say("8", JobState.PENDING)
    root.backend.say("7", JobState.RUNNING)

    assert root.states(FIRST, SECOND, "j-2") == [JobState.RUNNING, JobState.PENDING, JobState.SUCCEEDED]
    assert [sorted(asked) for asked in root.backend.asked] == [["7", "8"]]


def test_backend_is_not_asked_if_every_job_has_ended(root: Root) -> None:
    root.launch(FIRST, "7")
    root.end(FIRST, EndReason.APP_FAILED)

    assert root.states(FIRST) == [JobState.FAILED]
    assert root.backend.asked == []


def test_ended_job_whose_native_jobs_are_known_is_not_asked_about(root: Root) -> None:
    root.launch(FIRST, "7")
    root.end(FIRST)
    entry = ledger.read_entry(root.host.files, FIRST)
    assert entry is not None
    assert entry.natives

    assert judge_job(entry, TARGET, root.backend, root.host)[0].state is JobState.SUCCEEDED
    assert root.backend.asked == []


def test_array_is_asked_about_until_its_last_run_has_ended(root: Root) -> None:
    root.launch(FIRST, "7", indices=2)
    root.end(FIRST, index=0)
    root.backend.say("7_1", JobState.RUNNING, 1)

    assert root.states(FIRST) == [JobState.RUNNING]
    assert root.backend.asked == [["7"]]


def test_only_the_native_job_of_the_latest_epoch_is_asked_about(root: Root) -> None:
    root.launch(FIRST, "7", "8", epochs=True)
    root.backend.say("8", JobState.RUNNING)

    assert root.states(FIRST) == [JobState.RUNNING]
    assert root.backend.asked == [["8"]]


def test_answer_about_an_index_goes_to_the_job_of_its_array(root: Root) -> None:
    root.launch(FIRST, "7", indices=2)
    root.launch(SECOND, "7_a")
    for native_id, index in (("7_0", 0), ("7_1", 1)):
        root.backend.say(native_id, JobState.RUNNING, index)
    root.backend.say("7_a", JobState.PENDING)
    root.backend.say("99", JobState.FAILED)

    found = judge_jobs(root.entries(FIRST, SECOND), TARGET, root.backend, root.host, tell=None)

    assert [[state.native_id for state in natives] for _, natives in found] == [["7_0", "7_1"], ["7_a"]]
    assert [status.state for status, _ in found] == [JobState.RUNNING, JobState.PENDING]


def test_answer_under_another_id_is_about_the_only_job_that_was_asked_about(root: Root) -> None:
    root.launch(FIRST, "7")
    root.launch(SECOND, "8")
    root.end(SECOND)
    root.backend.say("federated.7", JobState.RUNNING)

    assert root.states(FIRST, SECOND) == [JobState.RUNNING, JobState.SUCCEEDED]


@pytest.mark.parametrize("native", [None, JobState.FAILED, JobState.SUCCEEDED])
@pytest.mark.parametrize("others", [0, 1])
def test_result_that_is_committed_while_the_backend_is_asked_counts(
    root: Root, native: JobState | None, others: int
) -> None:
    jobs = (FIRST, SECOND)[: others + 1]
    for number, job in enumerate(jobs):
        root.launch(job, str(number))
        if native is not None:
            root.backend.say(str(number), native)

    def commit() -> None:
        for job in jobs:
            root.end(job)

    root.backend.meanwhile = commit

    assert root.states(*jobs) == [JobState.SUCCEEDED] * len(jobs)


def test_job_of_two_parts_one_of_which_the_backend_forgot_is_looked_at_again(root: Root) -> None:
    root.launch(FIRST, "7", "8", indices=2)
    root.backend.say("7", JobState.RUNNING, 0)
    root.backend.meanwhile = lambda: root.end(FIRST, index=1)

    [status] = root.judge(FIRST, indices=True)

    assert [each.state for each in status.indices] == [JobState.RUNNING, JobState.SUCCEEDED]


def test_array_one_run_of_which_has_ended_is_looked_at_again(root: Root) -> None:
    root.launch(FIRST, "7", indices=2)
    root.backend.say("7_0", JobState.SUCCEEDED, 0)
    root.backend.say("7_1", JobState.RUNNING, 1)
    root.backend.meanwhile = lambda: root.end(FIRST, index=0)

    [status] = root.judge(FIRST, indices=True)

    assert [each.state for each in status.indices] == [JobState.SUCCEEDED, JobState.RUNNING]


def test_native_job_that_ended_without_a_result_has_failed(root: Root) -> None:
    root.launch(FIRST, "7")
    root.launch(SECOND, "8")
    root.backend.say("7", JobState.FAILED, reason=EndReason.APP_FAILED)

    first, second = root.judge(FIRST, SECOND)

    assert (first.state, first.reason) == (JobState.FAILED, EndReason.SETUP_FAILED)
    assert (second.state, second.reason) == (JobState.FAILED, EndReason.LOST)


@pytest.mark.parametrize("told", [{"reason": EndReason.DUPLICATE}, {"reason": EndReason.APP_FAILED, "exit_code": 3}])
def test_job_stands_as_the_native_job_that_serves_it_and_not_as_its_twin(root: Root, told: dict[str, Any]) -> None:
    root.launch(FIRST, "7")
    root.host.files.write(f"{ledger.job_folder(FIRST)}/owners/1.0", b"8")
    states = {
        "7": NativeState(native_id="7", index=None, state=JobState.FAILED, **told),
        "8": NativeState(native_id="8", index=None, state=JobState.RUNNING),
    }

    def answer() -> None:
        root.backend.answers = [states[each] for each in root.backend.asked[-1]]

    root.backend.meanwhile = answer

    (status,) = root.judge(FIRST)

    assert (status.state, root.backend.asked) == (JobState.RUNNING, [["7"], ["8"]])


@pytest.mark.parametrize(("native", "owner"), [("7", "7"), ("lab/j-1", "0f1e-uid"), ("j-1", "j-1+a4")])
def test_claim_of_the_same_native_job_names_no_twin(root: Root, native: str, owner: str) -> None:
    root.launch(FIRST, native)
    root.host.files.write(f"{ledger.job_folder(FIRST)}/owners/1.0", owner.encode())
    root.backend.say(native, JobState.FAILED, reason=EndReason.DUPLICATE)

    assert root.states(FIRST) == [JobState.FAILED]
    assert root.backend.asked == [[native]]


def test_twin_whose_other_is_forgotten_has_failed(root: Root) -> None:
    root.launch(FIRST, "7")
    root.host.files.write(f"{ledger.job_folder(FIRST)}/owners/1.0", b"8")
    root.backend.say("7", JobState.FAILED, reason=EndReason.DUPLICATE)

    (status,) = root.judge(FIRST)

    assert (status.state, status.reason) == (JobState.FAILED, EndReason.DUPLICATE)


def test_runs_that_a_native_job_has_not_begun_are_pending(root: Root) -> None:
    root.launch(FIRST, "7", indices=2)
    root.host.files.make_folder(f"{ledger.job_folder(FIRST)}/runs/0/a1")
    root.backend.say("7", JobState.RUNNING)

    status, natives = judge_job(root.entries(FIRST)[0], TARGET, root.backend, root.host, indices=True)

    assert [each.state for each in status.indices] == [JobState.RUNNING, JobState.PENDING]
    assert natives == root.backend.answers
    assert judge_job(root.entries(FIRST)[0], TARGET, root.backend, root.host)[0].indices == ()


def test_backend_that_does_not_answer_leaves_its_jobs_unknown_if_the_caller_takes_the_error(root: Root) -> None:
    root.launch(FIRST, "7")
    root.launch(SECOND, "8")
    root.backend.problem = StoreUnavailable("no answer")
    told: list[InfrastructureFailure] = []

    found = root.judge(FIRST, SECOND, tell=told.append, indices=True)

    assert [status.state for status in found] == [JobState.UNKNOWN] * 2
    assert [status.indices[0].message for status in found] == ["no answer"] * 2
    assert told == [root.backend.problem]
    with pytest.raises(StoreUnavailable):
        root.judge(FIRST)
    with pytest.raises(StoreUnavailable):
        judge_job(root.entries(FIRST)[0], TARGET, root.backend, root.host)


def test_no_question_about_nothing(root: Root) -> None:
    root.backend.problem = StoreUnavailable("no answer")

    assert ask([], TARGET, root.backend, root.host) == []


@pytest.mark.parametrize(
    ("raw", "began", "lives", "state"),
    [
        ("gone", {}, None, JobState.FAILED),
        ("rebooted", {}, None, JobState.FAILED),
        ("rebooted", {"target": "gpu2"}, None, JobState.UNKNOWN),
        ("rebooted", {"from": "another"}, None, JobState.UNKNOWN),
        ("rebooted", {"from": "another", "kind": "ssh"}, None, JobState.FAILED),
        ("rebooted", {}, True, JobState.RUNNING),
        ("elsewhere", {}, None, JobState.UNKNOWN),
        ("elsewhere", {}, False, JobState.FAILED),
        ("elsewhere", {}, True, JobState.RUNNING),
        ("gone", {}, True, JobState.FAILED),
    ],
)
def test_job_that_cannot_be_seen_has_ended_only_if_it_began_here_or_shows_no_life(
    root: Root, raw: str, began: dict[str, str], lives: bool | None, state: JobState
) -> None:
    root.launch(FIRST, "7", **{"from": system.node(), **began})
    root.backend.say("7", JobState.FAILED, reason=EndReason.NODE_FAILED, raw=raw)

    (status,) = root.judge(FIRST, lives=lambda entry: lives)

    assert status.state is state
    assert status.reason is (EndReason.NODE_FAILED if state is JobState.FAILED else None)
