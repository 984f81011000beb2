"""The start-up script of a machine, run on the oldest, the newest and our own Python of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from runtime.jobs.hosts.bucket import BucketFiles
from runtime.jobs.startup_script import build_boot, render_stub, write_boot
from runtime.shim import bootstrap
from runtime.shim.cloud import Amazon
from runtime.testing.metadata import MetadataServer
from tests.fakes.faults import Fault, FaultProxy, FaultyServer
from tests.fakes.gcs import GcsServer
from tests.services_support import MotoServer
from tests.shim_support import JOB, PATIENCE_S, find_pythons, make_job, wait_for
from tests.unit.shim.test_shim import needed_python

PYTHONS = find_pythons()
OWN = f"{sys.version_info[0]}.{sys.version_info[1]}"
OLDEST = min(PYTHONS, key=lambda version: int(version[2:]))
NEWEST = max(PYTHONS, key=lambda version: int(version[2:]))
CONTENTS = {"shim.py": b"import sys\nprint('shim', *sys.argv[1:], flush=True)\n", "more.py": b"1\n"}
NAMES = {"gs": "token", "s3": "security"}


@dataclass
class Machine:
    """A machine that is started again and again: its own disk, and the script that it was made with."""

    root: Path
    python: str
    records: str
    server: FaultyServer
    metadata: MetadataServer
    environ: dict[str, str]
    contents: dict[str, bytes] = field(default_factory=lambda: dict(CONTENTS))
    patience_s: float = PATIENCE_S
    args: Sequence[str] = ("--native", "n-1")

    @property
    def folder(self) -> Path:
        return self.root / "var"

    def launch(self) -> Machine:
        write_boot(self.contents, BucketFiles(self.records))
        return self

    def begin(self) -> subprocess.Popen[str]:
        script = render_stub(self.records, JOB, self.contents, self.args, folder=str(self.folder))
        for name, value in {"FIRST_PAUSE_S, LAST_PAUSE_S": "0.02, 0.1", "PATIENCE_S": self.patience_s}.items():
            line = next(line for line in script.splitlines() if line.startswith(f"{name} = "))
            script = script.replace(line, f"{name} = {value}")
        (self.root / "startup-script").write_text(script)
        return subprocess.Popen(
            [self.python, str(self.root / "startup-script")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={"PATH": os.environ["PATH"], "TMPDIR": str(self.root), **self.environ},
        )

    def boot(self) -> tuple[int, str, list[str]]:
        """Run the script; return its exit code, its output, and its lines on the console."""
        return self.end(self.begin())

    def end(self, begun: subprocess.Popen[str]) -> tuple[int, str, list[str]]:
        try:
            out, said = begun.communicate(timeout=PATIENCE_S)
        finally:
            begun.kill()
        return begun.returncode, out, said.splitlines()

    def started(self) -> tuple[int, str, list[str]]:
        """Return what a boot without trouble comes to."""
        words = [str(self.folder / JOB), "--bucket", self.records, *self.args]
        return 0, f"shim {' '.join(words)}\n", []

    def fetched(self) -> list[str]:
        return [request.path for request in self.server.log if request.method == "GET" and "/boot/" in request.path]


@pytest.fixture
def metadata() -> Iterator[MetadataServer]:
    with MetadataServer() as running:
        yield running


@pytest.fixture(params=["gs", pytest.param("s3", marks=pytest.mark.service)])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, FaultyServer, Any]]:
    if request.param == "gs":
        google = GcsServer().start()
        google.make_bucket("lab")
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", google.url)
        yield "gs://lab/run time", google, {"STORAGE_EMULATOR_HOST": google.url}
        google.stop()
        return
    import boto3

    moto: MotoServer = request.getfixturevalue("moto_server")
    boto3.client("s3", endpoint_url=moto.url, region_name="us-east-1").create_bucket(Bucket="lab")
    proxy = FaultProxy(moto.address).start()
    yield "s3://lab/run time", proxy, {"AWS_ENDPOINT_URL": proxy.url}
    proxy.stop()


@pytest.fixture(
    params=[
        pytest.param(version, marks=[] if version == OWN else [pytest.mark.service], id=f"python{version}")
        for version in dict.fromkeys((OWN, OLDEST, NEWEST))
    ]
)
def machine(
    request: pytest.FixtureRequest, tmp_path: Path, store: tuple[str, FaultyServer, Any], metadata: MetadataServer
) -> Machine:
    records, server, environ = store
    environ = {**environ, **metadata.environment}
    return Machine(tmp_path, PYTHONS[request.param], records, server, metadata, environ)


def test_machine_fetches_its_programs_and_becomes_the_shim(machine: Machine) -> None:
    machine.launch()

    assert machine.boot() == machine.started()

    assert {path.name: path.read_bytes() for path in machine.folder.iterdir()} == CONTENTS
    assert machine.folder.stat().st_mode & 0o777 == 0o700
    asked = [request for request in machine.server.log if request.method == "GET" and "/boot/" in request.path]
    signed = {request.headers["authorization"].partition("/")[0] for request in asked}
    assert signed == {"Bearer google-1" if machine.records.startswith("gs") else "AWS4-HMAC-SHA256 Credential=A"}


def test_second_boot_needs_no_network(machine: Machine) -> None:
    machine.launch()
    assert machine.boot() == machine.started()
    before = len(machine.server.log), len(machine.metadata.requests)
    machine.metadata.close()
    machine.server.stop()

    assert machine.boot() == machine.started()

    assert (len(machine.server.log), len(machine.metadata.requests)) == before


@pytest.mark.parametrize("damage", ["half of it", "gone"])
def test_file_that_is_not_whole_is_fetched_again_and_the_others_are_not(machine: Machine, damage: str) -> None:
    machine.launch()
    machine.boot()
    before = len(machine.fetched())
    if damage == "gone":
        (machine.folder / "shim.py").unlink()
    else:
        (machine.folder / "shim.py").write_bytes(CONTENTS["shim.py"][:10])

    assert machine.boot() == machine.started()

    assert len(machine.fetched()) == before + 1


def test_other_bytes_than_the_launched_ones_are_refused(machine: Machine) -> None:
    machine.launch()
    [name] = write_boot({"shim.py": CONTENTS["shim.py"]}, BucketFiles(machine.records))
    BucketFiles(machine.records).write(name, b"import os; os.system('evil')\n")

    code, out, said = machine.boot()

    assert (code, out) == (1, "")
    assert said == ["boot: gives up: shim.py has other bytes than the ones that were launched"]
    assert not (machine.folder / "shim.py").exists()


def test_object_that_is_missing_is_not_waited_for(machine: Machine) -> None:
    code, out, said = machine.boot()

    assert (code, out, len(said)) == (1, "", 1)
    assert said[0].startswith(f"boot: gives up: {machine.records}/boot/")
    assert "the bucket answers 404" in said[0]
    assert len(machine.fetched()) == 1


def test_credentials_that_come_late_are_waited_for(machine: Machine) -> None:
    machine.launch()
    machine.metadata.keys, machine.metadata.google_token = None, ""
    begun = machine.begin()
    wait_for(lambda: sum(NAMES[machine.records[:2]] in path for _, path in machine.metadata.requests) > 2, "requests")

    machine.metadata.keys, machine.metadata.google_token = (
        {"AccessKeyId": "A", "SecretAccessKey": "S", "Token": "T"},
        "t",
    )

    code, out, said = machine.end(begun)
    assert (code, out) == machine.started()[:2]
    why = "no credentials of the machine: HTTP Error 404: Not Found"
    assert said == [f"boot: cannot fetch more.py: {why}; tries again"]


@pytest.mark.parametrize("fault", [Fault.CUT_OFF, Fault.RESET, Fault.REFUSE_503, Fault.REFUSE_403, Fault.REFUSE_429])
def test_answer_that_fails_for_a_while_is_asked_for_again(machine: Machine, fault: Fault) -> None:
    machine.launch()
    machine.server.fail_next("GET", [fault] * 3)

    code, out, said = machine.boot()

    assert (code, out) == machine.started()[:2]
    assert said
    assert {path.name: path.read_bytes() for path in machine.folder.iterdir()} == CONTENTS


def test_network_that_comes_late_is_waited_for(machine: Machine) -> None:
    machine.launch()
    late = MetadataServer(listen=False)
    machine.environ.update(late.environment)
    begun = machine.begin()
    assert begun.stderr
    first = begun.stderr.readline()

    late.listen()

    assert machine.end(begun)[:2] == machine.started()[:2]
    late.close()
    assert "Connection refused" in first


def test_machine_without_credentials_gives_up_in_one_line(machine: Machine) -> None:
    machine.launch()
    machine.metadata.keys, machine.metadata.google_token = None, ""
    machine.patience_s = 0.2

    code, out, said = machine.boot()

    why = "cannot fetch more.py: no credentials of the machine: HTTP Error 404: Not Found"
    assert (code, out, said[-1]) == (1, "", f"boot: gives up: {why}")


def test_job_runs_to_its_end_on_a_machine_that_knows_only_the_script(machine: Machine) -> None:
    made = make_job(machine.root / "launcher", sys.executable, "echo $RUNTIME_ATTEMPT > $RUNTIME_OUTPUT_DIR/it")
    files = BucketFiles(machine.records)
    files.write(f"jobs/{JOB}/order.json", json.dumps(made.order).encode())
    machine.contents = build_boot()
    machine.environ.update(
        {name: value for name, value in os.environ.items() if name.startswith("AWS_")} | machine.environ
    )
    machine.launch()

    code, _, said = machine.boot()

    assert (code, said) == (0, [])
    assert files.read(f"jobs/{JOB}/runs/0/output/a0001/it") == b"1\n"
    assert files.names("done") == [f"{JOB}.0.succeeded.0.1"]


# parts


def test_signature_is_the_shims_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE",
        "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI",
        "AWS_SESSION_TOKEN": "T",
        "AWS_REGION": "eu-west-3",
    }.items():
        monkeypatch.setenv(name, value)
    amazon = Amazon()
    path = "/lab/a%20b/boot/0"
    expected = amazon.sign("GET", path, "", {}, None)
    host = amazon.endpoint.partition("://")[2]

    made = bootstrap.sign(("AKIDEXAMPLE", "wJalrXUtnFEMI", "T"), "eu-west-3", host, path, expected["x-amz-date"])

    assert made["Authorization"] == expected["Authorization"]


@pytest.mark.parametrize(
    ("environ", "region"), [({}, "eu-west-3"), ({"RUNTIME_RECORDS_AWS_REGION": "us-west-2"}, "us-west-2")]
)
def test_region_of_the_records_is_passed_on_to_the_shim(tmp_path: Path, environ: dict[str, str], region: str) -> None:
    contents = {"shim.py": b"import os; print(os.environ['RUNTIME_RECORDS_AWS_REGION'])"}
    (tmp_path / "shim.py").write_bytes(contents["shim.py"])
    script = render_stub("s3://lab/runtime", JOB, contents, region="eu-west-3", folder=str(tmp_path))

    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True)

    assert done.stdout == f"{region}\n"


def test_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    script = render_stub("s3://lab/runtime", JOB, CONTENTS, folder=str(tmp_path / "file" / "var"))

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "Not a directory" in done.stderr


def test_script_needs_nothing_newer_than_python_3_6() -> None:
    assert needed_python(Path(bootstrap.__file__)) <= (3, 6)
