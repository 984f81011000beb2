"""Launching on a backend that the test plays: how often a job is submitted, and what is left when it is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from runtime.client.jobs.handle import JobHandle, find_job
from runtime.client.jobs.job_cache import forget_job
from runtime.client.jobs.launch import launch
from runtime.client.jobs.prepare import LaunchOptions
from runtime.client.jobs.retry import retry_job
from runtime.config import Project, Settings
from runtime.end_reasons import EndReason
from runtime.errors import NotPossible
from runtime.jobs import ledger
from runtime.jobs.hosts.base import AgentFiles, FileToWrite, Host, HostUnavailable
from runtime.jobs.hosts.local import LocalFiles, LocalHost
from runtime.jobs.ledger import IndexStatus
from runtime.jobs.lock import Lock
from runtime.jobs.plan import LaunchPlan, NativePart, NativeState, Target
from runtime.jobs.spec import Array, Code, CodeMode, JobSpec, JobState, SecretRef
from runtime.launchers.local.launcher import LocalLauncher
from runtime.launchers.slurm.launcher import SlurmLauncher
from tests.services_support import replace_sleep

LOST = {"state": JobState.FAILED, "reason": EndReason.LOST}
TOKEN = SecretRef(name="TOKEN", source="env://CANARY")


class Backend:
    """Takes the place of what starts processes: it counts submissions, and its jobs stand as the test says."""

    def __init__(self, folder: Path) -> None:
        self.settings = Settings(
            project=Project(
                root=folder,
                targets={
                    "hpc": {"kind": "slurm", "records": str(folder / "records"), "max_array_size": 2},
                    "other": {"kind": "local", "records": str(folder / "other")},
                },
            ),
            data_dir=folder / "data",
            cache_dir=folder / "cache",
            config_dir=folder / "config",
        )
        self.submitted: list[str] = []
        self.said: list[str] = []
        self.stands: dict[str, object] = {"state": JobState.RUNNING}
        self.index: int | None = None
        self.refuses: Callable[[], bool] = lambda: False
        self.found: dict[str, str] = {}
        self.sought: list[str] = []

    def submit(self, plan: LaunchPlan, part: NativePart, host: Host) -> str:
        if self.refuses():
            raise NotPossible("no such partition")
        self.submitted.append(part.name)
        return str(len(self.submitted))

    def find(self, target: Target, names: Sequence[str], host: Host) -> dict[str, str]:
        self.sought += names
        return {name: self.found[name] for name in names if name in self.found}

    def states(self, target: Target, native_ids: Sequence[str], host: Host) -> list[NativeState]:
        return [NativeState(native_id=each, index=self.index, **self.stands) for each in native_ids]  # type: ignore[arg-type]

    def launch(self, *on: str, again: bool = False, **fields: Any) -> JobHandle:
        spec = JobSpec(command=("true",), code=Code(mode=CodeMode.NONE), **fields)
        options = LaunchOptions(base=self.settings.project.root, again=again)
        with launch(spec, on or "local", settings=self.settings, options=options, progress=self.said.append) as job:
            return job


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Backend:
    made = Backend(tmp_path)
    for launcher in (LocalLauncher, SlurmLauncher):
        monkeypatch.setattr(launcher, "submit", lambda _, *given: made.submit(*given))
        monkeypatch.setattr(launcher, "find", lambda _, *given: made.find(*given))
        monkeypatch.setattr(launcher, "states", lambda _, *given: made.states(*given))
    monkeypatch.setenv("CANARY", "canary-815")
    return made


def end(job: JobHandle, index: int = 0) -> None:
    reason = EndReason.SUCCEEDED
    ended = IndexStatus(index=index, state=ledger.state_of(reason), reason=reason, exit_code=0, attempt=1)
    ledger.record_end(job.files, job.id, ended)


@pytest.mark.parametrize(
    ("state", "reason", "index", "count"),
    [
        (JobState.FAILED, EndReason.LOST, None, 2),
        (JobState.FAILED, EndReason.NODE_FAILED, None, 2),
        (JobState.FAILED, EndReason.APP_FAILED, None, 1),
        (JobState.RUNNING, None, None, 1),
        (JobState.UNKNOWN, None, None, 1),
        # A run that its backend shows by itself is gone, and not the native job that serves all of them.
        (JobState.FAILED, EndReason.LOST, 0, 1),
    ],
)
def test_same_launch_starts_a_job_again_only_if_its_native_job_is_gone(
    backend: Backend, state: JobState, reason: EndReason | None, index: int | None, count: int
) -> None:
    job = backend.launch()
    backend.stands, backend.index = {"state": state, "reason": reason}, index

    again = backend.launch()

    assert (again.id, again.new, len(backend.submitted)) == (job.id, False, count)
    assert [each.epoch for each in job.entry().natives] == list(range(1, count + 1))


def test_job_that_is_gone_and_is_launched_a_third_time_has_a_third_epoch(backend: Backend) -> None:
    job = backend.launch()
    backend.stands = LOST
    for _ in range(2):
        backend.launch()

    assert [(each.native_id, each.epoch) for each in job.entry().natives] == [("1", 1), ("2", 2), ("3", 3)]
    assert backend.said[-2:] == [f"`{n}` is gone; started {n + 1} on local to go on" for n in (1, 2)]


@pytest.mark.parametrize(("written", "kept"), [(b'{"changed": true}', True), (b"", False)])
def test_job_that_is_gone_goes_on_by_the_order_in_its_folder_with_a_whole_shim(
    backend: Backend, written: bytes, kept: bool
) -> None:
    job = backend.launch()
    folder = backend.settings.data_dir / "jobs" / ledger.job_folder(job.id)
    order = json.loads((folder / "order.json").read_bytes())
    (folder / "order.json").write_bytes(written)
    (folder / "shim.py").unlink()
    backend.stands = LOST

    backend.launch()

    later = json.loads((folder / "order.json").read_bytes())
    del order["origin"]  # of the program that launched it first
    assert later == ({"changed": True} if kept else order) | {"epoch": 2, "starts": {"0": 2}}
    assert (folder / ledger.EPOCH).read_text() == "2"
    assert ((folder / "shim.py").stat().st_size > 1000, (folder / "shim.py").stat().st_mode & 0o777) == (True, 0o700)


@pytest.mark.parametrize(
    ("marks", "ended", "count"),
    [
        (["cancel"], [], 1),
        (["cancel.6"], [5], 1),
        (["cancel.5", "cancel.6"], [], 1),
        ([], [5, 6], 1),
        (["cancel.6"], [], 2),
        ([], [5], 2),
    ],
)
def test_job_that_is_gone_is_started_again_for_runs_that_neither_ended_nor_were_cancelled(
    backend: Backend, marks: list[str], ended: list[int], count: int
) -> None:
    array = Array(count=2, offset=5)
    job = backend.launch(array=array)
    for name in marks:
        job.files.write(f"{ledger.job_folder(job.id)}/{name}", b"{}")
    for index in ended:
        end(job, index)
    backend.stands = LOST

    backend.launch(array=array)

    assert len(backend.submitted) == count


@pytest.mark.parametrize("before", [False, True])
def test_launch_whose_lock_was_taken_over_submits_nothing(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, *, before: bool
) -> None:
    write_many = AgentFiles.write_many

    def stand_still(files: AgentFiles, wanted: Sequence[FileToWrite]) -> None:
        take_over(files, wanted[0].name, lambda: write_many(files, wanted), before=before)

    monkeypatch.setattr(AgentFiles, "write_many", stand_still)

    with pytest.raises(NotPossible, match="took this job over"):
        backend.launch()

    orders = list((backend.settings.data_dir / "jobs").rglob("order.json"))
    assert (backend.submitted, len(orders)) == ([], 0 if before else 1)


@pytest.mark.parametrize("before", [False, True])
def test_launch_that_takes_a_job_up_and_whose_lock_was_taken_over_submits_nothing(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, *, before: bool
) -> None:
    job = backend.launch()
    backend.stands, write = LOST, AgentFiles.write

    def stand_still(files: AgentFiles, name: str, *given: Any, **more: Any) -> None:
        if name.endswith("/order.json"):
            take_over(files, name, lambda: write(files, name, *given, **more), before=before)
        else:
            write(files, name, *given, **more)

    monkeypatch.setattr(AgentFiles, "write", stand_still)

    with pytest.raises(NotPossible, match="took this job over"):
        backend.launch()

    order = json.loads(job.files.read(f"{ledger.job_folder(job.id)}/order.json") or b"{}")
    assert (len(backend.submitted), order["epoch"]) == (1, 1 if before else 2)


def take_over(files: AgentFiles, name: str, write: Callable[[], None], *, before: bool) -> None:
    """Have another launcher take the job's lock over, before or after a write."""
    if not before:
        write()
    files.create(f"{'/'.join(name.split('/')[:2])}/lock.2", b"{}")
    if before:
        write()


def test_part_that_the_backend_has_already_is_not_submitted_again(backend: Backend) -> None:
    backend.refuses = lambda: len(backend.submitted) == 1
    with pytest.raises(NotPossible):
        backend.launch("hpc", array=Array(count=4))
    first, second = backend.sought
    backend.refuses = lambda: False
    # The answer to the second submission was lost.
    backend.found = {second: "77"}

    job = backend.launch("hpc", array=Array(count=4))

    assert (job.new, backend.submitted) == (True, [first])
    assert [(each.name, each.native_id, each.part) for each in job.entry().natives] == [
        (first, "1", 0),
        (second, "77", 1),
    ]


@pytest.mark.parametrize(("parts", "kept"), [(0, 0), (1, 1)])
def test_refused_part_leaves_a_secret_only_to_parts_that_were_taken(backend: Backend, parts: int, kept: int) -> None:
    backend.refuses = lambda: len(backend.submitted) == parts

    with pytest.raises(NotPossible):
        backend.launch("hpc", array=Array(count=4), secrets=(TOKEN,))

    found = [path for path in (backend.settings.project.root / "records").rglob("secrets/*") if path.is_file()]
    assert [(path.read_text(), path.stat().st_mode & 0o777) for path in found] == [("canary-815", 0o600)] * kept


def test_job_that_is_gone_with_its_secret_gets_it_again_for_its_owner_alone(backend: Backend) -> None:
    job = backend.launch(secrets=(TOKEN,))
    (secret,) = (backend.settings.data_dir / "jobs").rglob("secrets/TOKEN")
    secret.unlink()
    backend.stands = LOST

    backend.launch(secrets=(TOKEN,))

    assert (secret.read_text(), secret.stat().st_mode & 0o777) == ("canary-815", 0o600)
    assert len(job.entry().natives) == 2


def test_launch_that_was_cut_off_after_its_job_had_ended_leaves_no_secret(backend: Backend) -> None:
    job = backend.launch(secrets=(TOKEN,))
    # The launcher died before it could say that all is started, and the shim ended without a trace of the secret.
    job.files.remove(f"{ledger.job_folder(job.id)}/launched")
    folder = backend.settings.data_dir / "jobs" / ledger.job_folder(job.id)
    for name in ("intent.json", "spec.json"):
        (folder / name).write_bytes((folder / name).read_bytes() + b" ")
    end(job)

    again = backend.launch(secrets=(TOKEN,))

    assert (again.id, len(backend.submitted)) == (job.id, 1)
    assert {(folder / name).read_bytes()[-2:] for name in ("intent.json", "spec.json")} == {b"\n "}, "the first stays"
    assert list((backend.settings.data_dir / "jobs").rglob("secrets/TOKEN")) == []


def test_launch_closes_its_host_and_gives_the_lock_back_if_it_is_refused(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[object] = []

    def close(host: LocalHost) -> None:
        closed.append(host)

    monkeypatch.setattr(LocalHost, "close", close)
    backend.refuses = lambda: True

    with pytest.raises(NotPossible, match="no such partition"):
        backend.launch()

    files = LocalFiles(str(backend.settings.data_dir / "jobs"))
    (job,) = ledger.list_jobs(files)
    assert len(closed) == 1
    assert files.names(ledger.job_folder(job), "lock.") == []


def test_same_launch_on_many_targets_stays_on_the_one_that_it_was_handed_to(backend: Backend) -> None:
    first = backend.launch("other")

    same, new = backend.launch("local", "other"), backend.launch("local", "other", again=True)

    assert (same.id, same.new, same.target.name) == (first.id, False, "other")
    assert (new.new, new.target.name, len(backend.submitted)) == (True, "local", 2)


def test_job_that_its_first_target_refuses_goes_to_the_next_and_is_forgotten_there(backend: Backend) -> None:
    refusals = iter([True])
    backend.refuses = lambda: next(refusals, False)

    job, same = backend.launch("local", "other"), backend.launch("local", "other")

    assert (job.target.name, same.id, len(backend.submitted)) == ("other", job.id, 1)
    assert [path.name for path in (backend.settings.data_dir / "launched").iterdir()] == [job.id]
    assert "target `local` does not accept it: no such partition" in backend.said


def test_job_that_was_refused_and_is_taken_later_is_no_longer_refused(backend: Backend) -> None:
    backend.refuses = lambda: True
    with pytest.raises(NotPossible):
        backend.launch()
    files = LocalFiles(str(backend.settings.data_dir / "jobs"))
    [refused] = ledger.read_many_entries(files, ledger.list_jobs(files))
    # A removal of the refused job was cut off.
    files.write(f"{ledger.job_folder(refused.id)}/{ledger.REMOVING}", b"")
    backend.refuses = lambda: False

    job = backend.launch()

    assert (refused.id, ledger.judge(refused, []).reason) == (job.id, EndReason.CONFIG_INVALID)
    assert (job.new, job.entry().refused, job.status().state) == (True, None, JobState.RUNNING)
    assert {ledger.REFUSED, ledger.REMOVING}.isdisjoint(files.names(ledger.job_folder(job.id)))


def test_mark_by_which_a_job_without_a_record_was_being_ended_does_not_cancel_the_same_launch(backend: Backend) -> None:
    job, files = backend.launch(), LocalFiles(str(backend.settings.data_dir / "jobs"))
    files.remove(ledger.job_folder(job.id))
    ledger.leave_mark(files, job.id, "cancel", b"{}")

    again = backend.launch()

    assert (again.id, again.new, again.entry().cancelled) == (job.id, True, False)


def test_job_that_this_machine_forgot_is_known_again_after_the_same_launch(backend: Backend) -> None:
    job = backend.launch()
    forget_job(job.id, backend.settings)

    backend.launch()

    assert find_job(job.id, settings=backend.settings).id == job.id
    assert [path.name for path in (backend.settings.data_dir / "launched").iterdir()] == [job.id]


@pytest.mark.parametrize("on", [("local",), ("local", "other")], ids=["one target", "several targets"])
def test_launch_says_once_what_differs_from_the_last_one_of_its_name(backend: Backend, on: tuple[str, ...]) -> None:
    backend.launch(*on)
    backend.launch(*on, env={"SEED": "1"})

    said = [line for line in backend.said if line.startswith("not the last launch")]
    assert [line.partition("): ")[2] for line in said] == ["different env"]


def test_intent_has_what_the_job_waits_for_and_whether_it_has_secrets(backend: Backend) -> None:
    plain, secret = backend.launch(), backend.launch(secrets=(TOKEN,))
    waiting = backend.launch("hpc", after=(plain.id,))

    written = [
        json.loads(job.files.read(f"{ledger.job_folder(job.id)}/intent.json") or b"")
        for job in (plain, secret, waiting)
    ]

    assert [each["secrets"] for each in written] == [False, True, False]
    assert [each.get("after") for each in written] == [None, None, [plain.id]]


@pytest.mark.parametrize("indices", [None, [0]])
def test_cancel_of_a_run_that_failed_without_a_result_leaves_it_failed(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, indices: list[int] | None
) -> None:
    monkeypatch.setattr(SlurmLauncher, "cancel", lambda *_: [])
    job = backend.launch("hpc")
    backend.stands = {"state": JobState.FAILED, "reason": EndReason.OOM, "exit_code": 137}
    before = job.status()

    left = job.cancel(indices=indices)

    after = job.status()
    assert (left, before.state, before.reason) == ([], JobState.FAILED, EndReason.OOM)
    assert (after.state, after.reason, after.entry.outcomes[0].code) == (JobState.FAILED, EndReason.OOM, 137)


@pytest.mark.parametrize("on", ["other", "hpc"])
@pytest.mark.parametrize("indices", [[], [1]])
def test_retry_of_runs_that_failed_leaves_cancelled_runs_of_a_dead_shim_ended(
    backend: Backend, on: str, indices: list[int]
) -> None:
    job = backend.launch(on, array=Array(count=4))
    for index, reason in enumerate([EndReason.SUCCEEDED, EndReason.APP_FAILED]):
        ledger.record_end(job.files, job.id, IndexStatus(index=index, state=ledger.state_of(reason), reason=reason))
    job.files.create(f"{ledger.job_folder(job.id)}/cancel", b"")
    backend.stands = LOST

    again = retry_job(job, backend.settings, indices=indices)

    ends = {index: each.reason for index, each in job.entry().outcomes.items()}
    assert again.indices == (1,)
    assert ends == {0: EndReason.SUCCEEDED, 2: EndReason.CANCELLED, 3: EndReason.CANCELLED}
    assert not job.entry().cancelled


@pytest.mark.parametrize("ended", [False, True])
def test_retry_that_waited_for_another_one_starts_nothing_beside_it(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    monkeypatch.setattr("runtime.jobs.log_follower.STILL_S", 0.1)
    job = backend.launch("other")
    backend.stands = LOST
    other = Lock(job.files, job.id, "another")
    other.take(patience_s=10)

    def go_on(_: str) -> None:
        ledger.record_native(
            job.files, job.id, ledger.NativeJob(name=job.id, native_id="2", part=0, epoch=2, at=ledger.now())
        )
        backend.stands = {"state": JobState.RUNNING}
        if ended:
            end(job)
            backend.stands = {"state": JobState.SUCCEEDED}
        other.release()

    with pytest.raises(NotPossible, match="nothing of job" if ended else "still lives"):
        retry_job(job, backend.settings, progress=go_on)

    assert backend.submitted == [job.id]


def test_launch_that_was_cut_off_and_is_repeated_leaves_a_retry_its_order(backend: Backend) -> None:
    job = backend.launch("other")
    folder = ledger.job_folder(job.id)
    job.files.remove(f"{folder}/launched")
    backend.stands = LOST
    retry_job(job, backend.settings)
    backend.stands = {"state": JobState.RUNNING}

    backend.launch("other")

    order = json.loads(job.files.read(f"{folder}/order.json") or b"{}")
    assert (order["epoch"], len(backend.submitted)) == (2, 2)
    assert job.files.read(f"{folder}/launched") is not None


def test_cancel_asks_a_backend_again_that_did_not_say_how_the_job_had_ended(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SlurmLauncher, "cancel", lambda *_: [])
    job = backend.launch("hpc")
    backend.stands = {"state": JobState.FAILED, "reason": EndReason.OOM, "exit_code": 137}
    states, refusals, slept = SlurmLauncher.states, [1, 2], []

    def refuse_twice(*args: Any) -> list[NativeState]:
        if refusals:
            raise HostUnavailable(f"no answer {refusals.pop()}")
        return states(*args)

    monkeypatch.setattr(SlurmLauncher, "states", refuse_twice)
    replace_sleep(monkeypatch, slept.append)
    job.cancel()

    assert (job.status().reason, slept[:2]) == (EndReason.OOM, [0.5, 2.0])


@pytest.mark.parametrize("on", ["other", "hpc"])
def test_result_of_a_shim_that_died_before_it_could_announce_it_counts(backend: Backend, on: str) -> None:
    job = backend.launch(on)
    result = {"reason": "succeeded", "code": 0, "attempt": 1, "at": 0.0}
    job.files.create(f"jobs/{job.id}/runs/0/result", json.dumps(result).encode())
    backend.stands = {"state": JobState.FAILED, "reason": EndReason.APP_FAILED, "exit_code": 137}

    status = job.status()

    assert (status.state, status.entry.outcomes[0].attempt) == (JobState.SUCCEEDED, 1)
