"""Verbs on jobs with damaged files in their record: each goes on without what the file said, or names the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime.end_reasons import EndReason
from runtime.jobs import ledger
from runtime.jobs.hosts.local import LocalFiles
from runtime.jobs.ledger import IndexStatus
from runtime.jobs.log_follower import read_limit
from runtime.jobs.spec import JobState
from runtime.shim.logs import LOG_BYTES
from tests.jobs_support import Terminal, open_terminal
from tests.shim_support import processes_with, wait_for

DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut off": lambda content: content[: len(content) // 2],
    "zeros": lambda content: bytes(len(content)),
    "no object": lambda content: b"[1]\n",
    "empty object": lambda content: b"{}\n",
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Terminal]:
    with open_terminal(tmp_path, monkeypatch, capsys) as terminal:
        yield terminal


@pytest.mark.parametrize("damage", ["cut off", "zeros", "empty object"])
@pytest.mark.daily(1)
def test_no_damaged_file_of_a_record_makes_a_verb_fail_unexpectedly(run: Terminal, damage: str) -> None:
    script = "echo said; echo out > $RUNTIME_OUTPUT_DIR/o; [ $SEED = 0 ] || exec sleep 600; exit 3"
    job = run.launch(script, "--seeds", "2", "--max-parallel", "2", "--set", "capture.model=model")
    folder = run.folder(job)
    wait_for((folder / "runs/0.ended").exists, "the end of the first run")
    wait_for((folder / "runs/1/output/a0001/o").exists, "the second run")
    names = ["intent.json", "spec.json", "order.json", "native/001.000000.json", "owners/1.0", "artefacts/command"]
    names += ["runs/0.ended", "runs/1/a0001/start.json", "runs/1/a0001/processes.json"]

    for name in names:
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(DAMAGE[damage](whole))
        for words in (
            ["status", "--on", "local", "--all"],
            ["status", job],
            ["status", job, "--index", "0"],
            ["explain", job, "--index", "0"],
            ["logs", job],
            ["results", job, "-o", "json"],
            ["artifacts", "list", job],
            ["fetch", job, str(run.tree.parent / "home"), "--overwrite"],
            ["wait", job, "--timeout", "10ms"],
            ["gc", "--older-than", "1s", "--dry-run"],
            ["interrupt", job, "--as", "oom", "--index", "0"],
            ["retry", job, "--index", "0"],
            ["cancel", job, "--index", "0"],
        ):
            said = run(*words)
            assert "unexpected" not in said.err, (name, words, said.err)
            assert said.code in (0, 1, 2, 124), (name, words, said.err)
        if name == "order.json":
            assert run("explain", job, "--index", "0").out.startswith("run 0 of job")
            assert run("logs", job, "--index", "0").out == "said\n"
        (folder / name).write_bytes(whole)
    assert run("cancel", job, "--yes").code == 0


@pytest.mark.parametrize("damage", DAMAGE)
def test_folded_job_that_is_damaged_makes_no_verb_fail_unexpectedly(run: Terminal, damage: str) -> None:
    job = run.finish("echo said; exit 3")
    wait_for(lambda: not processes_with(f"jobs/{job}"), "the end of its shim")
    path = run.folder(job) / "ended"
    path.write_bytes(DAMAGE[damage](path.read_bytes()))

    for verb in ("status", "explain", "logs", "results", "fetch", "wait", "retry", "cancel"):
        said = run(verb, job)
        assert "unexpected" not in said.err, (verb, said.err)
        assert said.code in (0, 1, 2), (verb, said.err)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"log_bytes": "many"}', b"{}"])
def test_limit_of_a_log_is_the_usual_one_if_the_order_is_damaged(tmp_path: Path, content: bytes) -> None:
    files = LocalFiles(str(tmp_path))
    files.write("jobs/j-1/order.json", content)

    assert read_limit(files, "j-1") == LOG_BYTES


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"reason": "succeeded"}'])
def test_end_that_only_the_backend_knows_is_announced_beside_a_damaged_result(tmp_path: Path, content: bytes) -> None:
    files = LocalFiles(str(tmp_path))
    files.write("jobs/j-1/runs/0/result", content)

    ledger.record_end(files, "j-1", IndexStatus(index=0, state=JobState.FAILED, reason=EndReason.LOST))

    assert files.names("done", "") == ["j-1.0.lost.1.0"]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("file", ["native/001.000000.json", "intent.json"])
@pytest.mark.daily(3)
def test_job_that_runs_with_a_damaged_record_is_named_by_every_overview(run: Terminal, file: str, damage: str) -> None:
    job = run.launch("exec sleep 600", "--name", "train")
    run.wait(job, "running")
    path = run.folder(job) / file
    path.write_bytes(DAMAGE[damage](path.read_bytes()))

    for words in ((), ("--on", "local"), ("--state", "running"), ("--all",)):
        said = run("status", *words)

        assert said.code == 0
        assert f"unreadable: job `{job}` on local, which may run: `{run.folder(job)}/" in said.out
        assert "no such jobs" not in said.out
        assert "nothing was submitted yet" not in said.out
    assert run("status", "-o", "json").json["targets"][0]["unreadable"][0]["job"] == job


@pytest.mark.parametrize("text", ["id", "name"])
def test_cancel_of_a_job_with_a_damaged_record_says_what_ends_it_and_that_ends_it(run: Terminal, text: str) -> None:
    job = run.launch("exec sleep 600", "--name", "train")
    run.wait(job, "running")
    path = run.folder(job) / "native/001.000000.json"
    path.write_bytes(b"")

    refused = run("cancel", job if text == "id" else "train")

    assert refused.code == 2
    assert refused.err.splitlines()[0].startswith(f"error: nothing can be told of job `{job}`")
    assert f"an empty file `{run.folder(job)}/cancel` ends it if it runs" in refused.err.splitlines()[-1]
    (run.folder(job) / "cancel").touch()
    wait_for(lambda: not processes_with(f"jobs/{job}"), "the end of its shim")
    assert (run.data / "jobs/done" / f"{job}.0.cancelled.1.1").exists()


def test_job_of_another_target_whose_record_was_damaged_stays_known_by_its_name(run: Terminal) -> None:
    records = run.tree.parent / "box"
    (run.tree / "runtime.toml").write_text(f'[targets.box]\nkind = "local"\nrecords = "{records}"\n')
    job = run("launch", "--on", "box", "--name", "train", "--", "sleep", "600").out.strip()
    wait_for(lambda: run("status", job, "-o", "json").json["state"] == "running", "its start")
    assert run("status", "--on", "box").code == 0
    native = records / "jobs" / job / "native/001.000000.json"
    whole = native.read_bytes()
    native.write_bytes(b"{}")

    assert f"unreadable: job `{job}` on box" in run("status", "--on", "box").out
    assert run("status").out.count(job[:10]) == 1  # as it was last seen
    assert f"job `{job}`: `{native.parent}" in run("wait", "train").err
    native.write_bytes(whole)
    assert run("cancel", "train").code == 0
