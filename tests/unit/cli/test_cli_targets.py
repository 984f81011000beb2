"""`runtime targets`: the list, one target in detail, and the probe job that checks it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.jobs.hosts.local import LocalFiles
from runtime.jobs.spec_fields import leaf_fields
from tests.jobs_support import Terminal, open_terminal


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Terminal]:
    with open_terminal(tmp_path, monkeypatch, capsys) as terminal:
        yield terminal


def verdicts(text: str) -> dict[str, str]:
    """Return step → verdict; a step with several lines counts as its worst."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        verdict, step, *_ = line.split("\t")
        found[step] = "fail" if "fail" in (verdict, found.get(step)) else verdict
    return found


def test_list_has_local_and_the_projects_own(run: Terminal) -> None:
    (run.tree / "runtime.toml").write_text(
        '[targets.hpc]\nkind = "slurm"\nhost = "login.example.org"\nrecords = "/scratch/runtime"\n'
    )

    assert run("targets", "list").out.splitlines() == [
        "local\tlocal\t-\t-\tbuilt in",
        f"hpc\tslurm\thost login.example.org\t/scratch/runtime\t{run.tree}/runtime.toml",
    ]


def test_show_has_every_field_of_a_job_and_every_interruption(run: Terminal) -> None:
    seen = run("targets", "show", "local", "-o", "json").json

    assert set(leaf_fields()) <= set(seen["fields"])
    assert seen["fields"]["account"]["kept"] == "refused"
    assert seen["fields"]["image"]["kept"] == "native"
    assert {name: each["kept"] for name, each in seen["interrupts"].items()} == {
        "node-loss": "native",
        "oom": "shim",
        "preempt": "client",
        "timeout": "shim",
    }
    assert "time_limit" in run("targets", "show", "local").out


def test_show_of_an_unknown_target_says_which_there_are(run: Terminal) -> None:
    said = run("targets", "show", "hpc")

    assert (said.code, said.err.splitlines()[0]) == (2, "error: no target named `hpc`")


def test_check_of_a_target_that_works_proves_every_step_and_leaves_nothing(run: Terminal) -> None:
    said = run("targets", "check", "local")

    assert said.code == 0, said.out
    assert list(verdicts(said.out)) == [
        "settings",
        "records",
        "space",
        "launch",
        "interpreter",
        "run",
        "read back",
        "scratch",
        "gpus",
        "clock",
        "cleanup",
    ]
    assert set(verdicts(said.out).values()) <= {"ok", "warn"}
    assert list((run.data / "jobs" / "jobs").iterdir()) == []
    assert list((run.data / "jobs" / "done").iterdir()) == []
    left = sorted(path.relative_to(run.data / "jobs").as_posix() for path in (run.data / "jobs").rglob("*"))
    assert left == ["done", "jobs", "open", "open/local", "record-root", "snapshots"]


def test_check_of_an_interpreter_that_is_not_there_fails_at_the_launch(run: Terminal) -> None:
    (run.tree / "runtime.toml").write_text('[targets.odd]\nkind = "local"\npython = "/no/python"\n')

    said = run("targets", "check", "odd")

    assert (said.code, verdicts(said.out)["launch"]) == (1, "fail")
    assert (
        "cannot start `/no/python` on this machine: no such file or directory\tset `python` of the target" in said.out
    )


def test_check_of_setup_lines_that_fail_says_what_they_said(run: Terminal) -> None:
    (run.tree / "runtime.toml").write_text('[targets.odd]\nkind = "local"\nsetup = ["echo no module >&2; exit 4"]\n')

    said = run("targets", "check", "odd")

    assert (said.code, verdicts(said.out)["run"]) == (1, "fail")
    assert "log: no module" in said.out


def test_check_of_settings_that_are_none_stops_there(run: Terminal) -> None:
    (run.tree / "runtime.toml").write_text('[targets.odd]\nkind = "local"\npartition = "gpu"\n')

    said = run("targets", "check", "odd")

    assert (said.code, verdicts(said.out)) == (1, {"settings": "fail"})


@pytest.mark.parametrize("records", ["gs://lab/runtime", "s3://lab/runtime", "claim://data/runtime", "file:/data"])
@pytest.mark.parametrize(
    "settings", ['kind = "local"', 'kind = "ssh"\nhost = "box"', 'kind = "slurm"', 'kind = "slurm"\nhost = "login"']
)
def test_record_root_that_is_no_folder_is_refused(run: Terminal, settings: str, records: str) -> None:
    (run.tree / "runtime.toml").write_text(f'[targets.odd]\n{settings}\nrecords = "{records}"\n')
    kind = settings.split('"')[1]

    said = run("launch", "--on", "odd", "--", "true")

    assert (said.code, said.out) == (2, "")
    assert said.err.splitlines() == [
        f"error: `{records}` is no valid targets.odd.records",
        f"  allowed: a folder: a target of kind `{kind}` keeps its jobs in files, and in no bucket or claim",
        "hint: name a folder that its nodes can write, such as /scratch/lab/runtime",
    ]
    assert not any(run.tree.parent.rglob("j-*"))


def test_record_root_of_kubernetes_that_is_no_claim_and_no_bucket_is_refused(run: Terminal) -> None:
    pytest.importorskip("kubernetes")
    text = '[targets.odd]\nkind = "kubernetes"\nnamespace = "lab"\nrecords = "/lab/runtime"\n'
    (run.tree / "runtime.toml").write_text(text)

    said = run("launch", "--on", "odd", "--image", "debian:12", "--", "true")

    assert (said.code, said.out) == (2, "")
    assert said.err.splitlines() == [
        "error: `/lab/runtime` is no valid targets.odd.records",
        "  allowed: claim://NAME/PATH, a claim of the namespace that pods can write to, or gs://… or s3://…, a bucket",
    ]


def test_check_of_a_record_root_that_cannot_be_written_fails(run: Terminal) -> None:
    (run.tree / "runtime.toml").write_text('[targets.odd]\nkind = "local"\nrecords = "/proc/nothing"\n')

    said = run("targets", "check", "odd")

    assert said.code == 1
    assert verdicts(said.out) == {"settings": "ok", "connection": "fail"}


def test_check_of_a_record_root_that_lets_twins_through_fails(run: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_over(files: LocalFiles, name: str, data: bytes, *, mode: int = 0o600) -> bool:
        files.write(name, data, mode=mode)
        return True

    monkeypatch.setattr(LocalFiles, "create", write_over)

    assert verdicts(run("targets", "check", "local").out)["records"] == "fail"


def test_check_asks_for_gpus_that_a_plain_machine_refuses(run: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")

    said = run("targets", "check", "local", "--gpus", "1", "--wait", "20s")

    assert said.code == 1
    assert os.environ["PATH"] == "/usr/bin:/bin"


def test_check_waits_only_so_long(run: Terminal) -> None:
    (run.tree / "runtime.toml").write_text('[targets.slow]\nkind = "local"\nsetup = ["sleep 60"]\n')

    said = run("targets", "check", "slow", "--wait", "1s")

    assert (said.code, verdicts(said.out)["run"]) == (1, "fail")
    assert "it did not end within 1s" in said.out
