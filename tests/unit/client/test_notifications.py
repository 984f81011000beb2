"""Messages about jobs' ends: from a launch's field to the receiver, and what a keeper sends that no shim could."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from runtime.cli.main import main
from runtime.client.jobs import notifications
from runtime.client.jobs.explain import explain, read_facts
from runtime.client.jobs.gc import find_garbage, remove
from runtime.client.jobs.handle import JobHandle
from runtime.client.jobs.notifications import UnsentMessage, read_unsent
from runtime.client.jobs.reconcile import keep_target
from runtime.config import Settings
from runtime.jobs.plan import owner_name
from runtime.jobs.spec import InvalidSpec, parse_spec, secret_refs
from runtime.system import system
from tests.shim_support import PATIENCE_S, processes_with, wait_for
from tests.unit.client.test_reconcile import lose, settings, start  # noqa: F401
from tests.unit.shim.test_shim_notify import SECRET, Receiver

NAME = "NOTIFY_TEST_URL"


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with Receiver() as running:
        monkeypatch.setenv(NAME, f"{running.url}/{SECRET}")
        yield running


def notify(**changes: Any) -> Any:
    return parse_spec({"command": ["true"], "notify": [{"webhook": f"env://{NAME}", **changes}]}).notify


def ended(job: JobHandle) -> JobHandle:
    job.wait(timeout=PATIENCE_S)
    wait_for(lambda: not processes_with(job.id), "the end of the shim")
    return job


def pass_quiet_time(monkeypatch: pytest.MonkeyPatch, seconds: float = notifications.QUIET_S) -> None:
    now = time.time() + seconds
    monkeypatch.setitem(vars(system), "time", lambda: now)


def everything(root: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("sink", "said"),
    [
        ({}, "has none or several of `webhook`, `topic` and `command`, expected exactly one"),
        ({"webhook": "env://A", "command": ["a"]}, "has none or several of"),
        ({"webhook": f"https://hooks.slack.com/{SECRET}"}, "has a `webhook` that is no reference: its URL is a secret"),
        ({"webhook": SECRET}, "has a `webhook` that is no reference: its URL is a secret"),
        ({"topic": "ends"}, "has the topic `ends`, expected projects/PROJECT/topics/TOPIC"),
        ({"command": [""]}, "has a `command` that no process can be started with"),
    ],
)
def test_sink_that_is_no_sink_is_refused_and_not_shown(sink: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSpec) as found:
        parse_spec({"command": ["true"], "notify": [sink]})

    [problem] = found.value.problems
    assert problem.path == "notify[0]"
    assert problem.message.startswith(said)
    assert SECRET not in str(found.value)


def test_secret_in_the_arguments_of_a_sink_is_refused_and_not_shown(settings: Settings) -> None:  # noqa: F811
    sinks = parse_spec({"command": ["true"], "notify": [{"command": ["tell", f"--token={SECRET}"]}]}).notify

    with pytest.raises(InvalidSpec) as found:
        start(settings, "true", notify=sinks)

    assert [each.path for each in found.value.problems] == ["notify"]
    assert SECRET not in str(found.value)


def test_webhook_is_a_secret_of_the_job_by_its_place() -> None:
    spec = parse_spec({"command": ["true"], "notify": [{"command": ["a"]}, {"webhook": "file://~/hook"}]})

    assert [(each.name, each.source) for each in secret_refs(spec)] == [("RUNTIME_NOTIFY_1", "file://~/hook")]


def test_job_tells_its_webhook_and_leaves_no_url(settings: Settings, receiver: Receiver) -> None:  # noqa: F811
    job = ended(start(settings, "true", notify=notify()))

    [body] = receiver.bodies
    assert (body["job"], body["state"], body["target"]) == (job.id, "succeeded", "local")
    assert read_unsent(job.files) == []
    assert SECRET not in everything(settings.data_dir)


def test_message_that_the_shim_could_not_send_is_explained_and_sent_by_a_keeper(
    settings: Settings,  # noqa: F811
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    receiver.answers = [404]
    job = ended(start(settings, "exit 3", notify=notify()))
    event = read_unsent(job.files, job.id)[0].event
    said = "notification 0 was not sent: the receiver answered HTTP 404; `runtime keep` sends it again"
    assert said in explain(read_facts(job)).evidence

    keep_target(job, settings)
    assert receiver.bodies == []

    pass_quiet_time(monkeypatch)
    told: list[str] = []
    keep_target(job, settings, progress=told.append)
    keep_target(job, settings, progress=told.append)

    assert told == [f"{job.id}: sent notification 0"]
    assert receiver.bodies == [event]
    assert read_unsent(job.files) == []
    assert SECRET not in everything(settings.data_dir)


def test_message_that_a_keeper_cannot_send_either_waits_longer_each_time(
    settings: Settings,  # noqa: F811
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    receiver.answers = [404, 404, 404]
    job = ended(start(settings, "true", notify=notify()))
    monkeypatch.delenv(NAME)
    pass_quiet_time(monkeypatch)
    told: list[str] = []

    keep_target(job, settings, progress=told.append)

    problem = f"secret `RUNTIME_NOTIFY_0` is to come from the variable `{NAME}`, which is not set here"
    assert told == [f"{job.id}: notification 0 was not sent: {problem}"]
    assert [each.problem for each in read_unsent(job.files)] == [problem]


@pytest.mark.parametrize(
    ("began", "at", "due"),
    [
        (0, 0, False),
        (-119, -119, False),
        (-121, -121, True),
        (-900, -200, False),
        (-900, -451, True),
        (-90000, -1e4, False),
    ],
)
def test_pause_before_another_try_doubles_and_ends_after_a_day(began: float, at: float, due: bool) -> None:
    assert UnsentMessage(event={}, sink=0, began=began, at=at, problem="").is_due(0.0) is due


def test_message_that_was_sent_before_its_shim_died_is_not_sent_again(
    settings: Settings,  # noqa: F811
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    receiver.answers = [404]
    job = ended(start(settings, "true", notify=notify()))
    [claim] = read_unsent(job.files)
    job.files.write(f"jobs/{job.id}/notify/{claim.event['id']}.0.sent", b"")
    pass_quiet_time(monkeypatch)

    keep_target(job, settings)

    assert (receiver.bodies, read_unsent(job.files)) == ([], [])


def test_keeper_that_ends_a_job_sends_its_message_once(settings: Settings, receiver: Receiver) -> None:  # noqa: F811
    job = start(settings, "sleep 600", notify=notify())
    lose(job)
    job.files.create(f"jobs/{job.id}/cancel", b"{}")

    keep_target(job, settings)
    keep_target(job, settings)

    assert [(each["job"], each["state"]) for each in receiver.bodies] == [(job.id, "cancelled")]


def test_command_of_another_machine_is_not_run_by_a_keeper(
    settings: Settings,  # noqa: F811
    tmp_path: Path,
) -> None:
    sinks = parse_spec({"command": ["true"], "notify": [{"command": ["touch", str(tmp_path / "told")]}]}).notify
    job = start(settings, "sleep 600", notify=sinks)
    lose(job)
    job.files.create(f"jobs/{job.id}/cancel", b"{}")

    keep_target(job, settings)

    assert [each.problem for each in read_unsent(job.files)] == [notifications.OF_MACHINE]
    assert not (tmp_path / "told").exists()


def test_claims_go_with_their_job(settings: Settings, receiver: Receiver) -> None:  # noqa: F811
    receiver.answers = [404]
    job = ended(start(settings, "true", notify=notify()))

    [garbage] = find_garbage(job, owner=owner_name(), older_than=timedelta(0), now=system.now())
    assert remove(garbage, job, owner=owner_name()) == []
    assert job.files.names("notify") == []


def test_dry_run_names_the_reference_and_reads_no_value(
    receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUNTIME_DATA_DIR", str(tmp_path / "data"))
    fields = {"command": ["true"], "code": {"mode": "none"}, "notify": [{"webhook": f"env://{NAME}"}]}
    (tmp_path / "job.yaml").write_text(json.dumps(fields))

    assert main(["launch", "-f", "job.yaml", "--on", "local", "--dry-run", "-o", "json"]) == 0

    said = "".join(capsys.readouterr())
    assert f"env://{NAME}" in said
    assert SECRET not in said


NAMED = """
[notify.oncall]
webhook = "env://NOTIFY_TEST_URL"
on = "failed"

[targets.quiet]
kind = "local"
defaults = {notify = ["oncall"]}
"""


@pytest.mark.parametrize(
    ("notify", "on"),
    [
        ("oncall", "failed"),
        (["oncall"], "failed"),
        ([{"sink": "oncall", "on": "succeeded"}], "succeeded"),
        (None, "failed"),
    ],
)
def test_job_names_a_sink_of_the_projects_settings(
    notify: Any, on: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUNTIME_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv(NAME, SECRET)
    (tmp_path / "runtime.toml").write_text(NAMED)
    fields = {"command": ["true"], "code": {"mode": "none"}, **({"notify": notify} if notify else {})}
    (tmp_path / "job.yaml").write_text(json.dumps(fields))
    target = "local" if notify else "quiet"

    assert main(["launch", "-f", "job.yaml", "--on", target, "--dry-run", "-o", "json"]) == 0

    [plan] = json.loads(capsys.readouterr().out)
    assert plan["spec"]["notify"] == [{"webhook": f"env://{NAME}", "on": on}]


def test_job_that_names_no_sink_of_the_settings_is_refused_with_the_known_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUNTIME_DATA_DIR", str(tmp_path / "data"))
    (tmp_path / "runtime.toml").write_text(NAMED)

    assert main(["launch", "--on", "local", "--set", "notify=oncal", "--dry-run", "--", "true"]) == 2

    said = capsys.readouterr().err
    assert "no sink named `oncal` in the project's settings" in said
    assert "known sinks: oncall" in said
