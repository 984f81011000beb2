"""Secrets that the machine reads itself, from fakes of Secret Manager and of the metadata server, by real shims."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.shim import machine_secrets
from runtime.testing.metadata import MetadataServer
from tests.fakes.gcs import GcsServer
from tests.fakes.google import GoogleServer
from tests.shim_support import each_python, wait_for
from tests.unit.shim.test_shim_bucket import URL, BucketJob, maker

CANARY = b"canary-4711"
PATIENCE = {"SECRETS_S": 2.0, "SECRETS_PAUSE_S": 0.01}
RESOURCE = "projects/p/secrets/hf-token"
ACCOUNT = "worker@p.iam.gserviceaccount.com"
READ = "secretmanager.projects.secrets.versions.access"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[GcsServer]:
    running = GcsServer().start()
    running.make_bucket("lab")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", running.url)
    yield running
    running.stop()


@pytest.fixture
def google() -> Iterator[GoogleServer]:
    running = GoogleServer().start()
    yield running
    assert running.refused == []
    running.stop()


@pytest.fixture
def machine() -> Iterator[MetadataServer]:
    with MetadataServer() as running:
        yield running


Make = Callable[..., BucketJob]


@pytest.fixture
def make(bucket: GcsServer, google: GoogleServer, machine: MetadataServer, tmp_path: Path) -> Make:
    def make_one(script: str, *, python: str = sys.executable, **changes: Any) -> BucketJob:
        made = maker(tmp_path, python, URL)(script, machine_secrets={"HF_TOKEN": RESOURCE}, **changes)
        made.environ = {**google.environment, **machine.environment}
        made.constants = dict(PATIENCE)
        return made

    return make_one


def message(made: BucketJob) -> str:
    return str(json.loads((made.folder / "runs/0/result").read_text())["message"])


def read_log(made: BucketJob, attempt: int = 1) -> str:
    folder = made.folder / f"runs/0/a{attempt:04d}"
    return "".join(path.read_text() for path in sorted(folder.glob("rank0.*log")))


def list_with(folder: Path, value: bytes) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and value in path.read_bytes()]


@pytest.mark.parametrize("python", each_python())
def test_value_reaches_the_command_and_is_in_no_file_object_or_message(
    make: Make, google: GoogleServer, bucket: GcsServer, tmp_path: Path, python: str
) -> None:
    google.put_secret("hf-token", CANARY)
    made = make('echo ${#HF_TOKEN} ${HF_TOKEN#canary-}; : >"$CLOCK"; sleep 600', python=python)
    running = tmp_path / "running"
    shim = made.start(CLOCK=str(running))
    wait_for(running.exists, "the command")

    left = list_with(tmp_path, CANARY)
    made.files.write(f"jobs/{made.folder.name}/cancel", b"")
    code = made.finish(shim)

    assert (code, left, read_log(made)) == (1, [], "11 4711\n")
    assert list_with(tmp_path, CANARY) == []
    assert [name for name, stored in bucket.buckets["lab"].items() if CANARY in stored.data] == []
    assert CANARY.decode() not in made.stderr


def test_new_version_reaches_the_next_attempt(make: Make, google: GoogleServer) -> None:
    google.put_secret("hf-token", b"old")
    made = make("echo $HF_TOKEN; [ $RUNTIME_ATTEMPT = 2 ]", retry={"failure": 1}, retries="backend")
    assert made.run() == 10

    google.put_secret("hf-token", b"old", b"new")

    assert made.run() == 0
    assert [read_log(made, attempt) for attempt in (1, 2)] == ["old\n", "new\n"]


def deny(google: GoogleServer, machine: MetadataServer) -> None:
    google.deny(READ, "secretmanager.versions.access", on=RESOURCE)


def forget(google: GoogleServer, machine: MetadataServer) -> None:
    google.versions[RESOURCE] = []


def disable(google: GoogleServer, machine: MetadataServer) -> None:
    for version in google.versions[RESOURCE]:
        version["state"] = "DISABLED"


def spoil(google: GoogleServer, machine: MetadataServer) -> None:
    google.put_secret("hf-token", CANARY + b"\xff\0")


def take_account(google: GoogleServer, machine: MetadataServer) -> None:
    machine.google_token = ""


def break_google(google: GoogleServer, machine: MetadataServer) -> None:
    google.fail(READ, 503, "UNAVAILABLE", "The service is currently unavailable.")


WHAT = f"secret `HF_TOKEN` from {RESOURCE}"


@pytest.mark.parametrize(
    ("arrange", "said"),
    [
        (deny, f"cannot read {WHAT}: {ACCOUNT} may not, it needs roles/secretmanager.secretAccessor there (HTTP 403: "),
        (forget, f"cannot read {WHAT} as {ACCOUNT}: it does not exist, or has no enabled version (HTTP 404: "),
        (disable, f"cannot read {WHAT} as {ACCOUNT}: it does not exist, or has no enabled version (HTTP 404: "),
        (spoil, f"{WHAT} is no text that a variable can carry"),
        (take_account, f"cannot read {WHAT}: no credentials: "),
        (break_google, f"cannot read {WHAT} as {ACCOUNT} (HTTP 503: The service is currently unavailable)"),
    ],
)
def test_secret_that_cannot_be_read_fails_the_set_up_with_its_name_and_the_account(
    make: Make,
    google: GoogleServer,
    machine: MetadataServer,
    arrange: Callable[[GoogleServer, MetadataServer], None],
    said: str,
) -> None:
    google.put_secret("hf-token", CANARY)
    arrange(google, machine)
    made = make("echo begun")

    assert made.run() == 1

    assert made.results() == {0: ("setup_failed", 1, 1)}
    assert message(made).startswith(said)
    assert CANARY.decode() not in message(made) + made.stderr


def test_machine_without_a_metadata_server_fails_the_set_up(make: Make, google: GoogleServer) -> None:
    google.put_secret("hf-token", CANARY)
    made = make("echo begun")
    made.environ["GCE_METADATA_HOST"] = "127.0.0.1:9"

    assert made.run() == 1

    assert message(made).startswith(f"cannot read {WHAT}: no credentials: 127.0.0.1:9 does not answer: ")


def test_error_that_passes_and_a_disabled_newest_version_are_no_obstacle(
    google: GoogleServer, machine: MetadataServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    google.put_secret("hf-token", b"first", b"second", b"third")
    google.versions[RESOURCE][2]["state"] = "DISABLED"
    google.fail(READ, 429, "RESOURCE_EXHAUSTED", "Quota exceeded.", times=2)
    monkeypatch.setattr(machine_secrets, "SECRETS_PAUSE_S", 0.01)
    for name, value in {**google.environment, **machine.environment}.items():
        monkeypatch.setenv(name, value)

    assert machine_secrets.read_secrets({"HF_TOKEN": RESOURCE}) == {"HF_TOKEN": "second"}

    assert {request.headers["authorization"] for request in google.log} == {"Bearer google-1"}
