"""Objects that a machine brings at its start, in every kind of record root, and the scripts that bring them."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from email import message_from_string
from pathlib import Path

import pytest

from runtime.errors import NotPossible
from runtime.jobs.hosts.base import Files
from runtime.jobs.hosts.bucket import BucketFiles
from runtime.jobs.hosts.local import LocalHost
from runtime.jobs.startup_script import build_boot, render_stub, render_user_data, write_boot
from runtime.shim.bundle import build_shim
from tests.fakes.gcs import GcsServer

JOB = "j-0123456789abcdef01234567"
CONTENTS = {"shim.py": b"print('shim')\n", "more.py": b"print('more')\n"}
NAMES = sorted(f"boot/{hashlib.sha256(data).hexdigest()}" for data in CONTENTS.values())


@pytest.fixture(params=["folder", "bucket"])
def files(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Files]:
    if request.param == "folder":
        yield LocalHost(str(tmp_path)).files
        return
    server = GcsServer().start()
    server.make_bucket("lab")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    yield BucketFiles("gs://lab/runtime")
    server.stop()


def test_boot_objects_are_written_under_their_digests_and_again_without_harm(files: Files) -> None:
    assert write_boot(CONTENTS, files) == NAMES
    assert write_boot(CONTENTS, files) == NAMES

    assert [files.read(name) for name in NAMES] == sorted(
        CONTENTS.values(), key=lambda data: hashlib.sha256(data).hexdigest()
    )
    assert [f"boot/{name}" for name in files.names("boot")] == NAMES


def test_boot_object_with_other_bytes_is_refused_and_left_alone(files: Files) -> None:
    files.create(NAMES[0], b"other bytes")

    with pytest.raises(NotPossible) as refused:
        write_boot(CONTENTS, files)

    assert refused.value.message == f"`{NAMES[0]}` in `{files.root}` has other bytes than its name says"
    assert files.read(NAMES[0]) == b"other bytes"


def test_boot_of_a_machine_is_the_shim_and_whatever_its_launcher_adds() -> None:
    assert build_boot({"more.py": b"1"}) == {"shim.py": build_shim(), "more.py": b"1"}


def test_script_of_a_real_job_fits_into_user_data() -> None:
    records = "s3://" + "b" * 63 + "/" + "p" * 200
    args = ["--native", "n" * 100, "--part", "1000", "--indices", "0-99999", "--scratch", "/mnt/disks/scratch"]

    script = render_stub(records, JOB, build_boot({"keeper.py": b"1"}), args, region="ap-southeast-4")

    assert len(script.encode()) < 12_000
    assert len(render_user_data(script).encode()) < 12_000


def test_script_is_the_same_for_the_same_job_and_holds_its_values() -> None:
    def render() -> str:
        return render_stub("gs://lab/runtime/", JOB, CONTENTS, ["--native", "it's"], folder="/srv/job")

    script = render()

    assert script == render()
    assert script.startswith("#!/usr/bin/env python3\n")
    call = ast.parse(script).body[-1]
    assert isinstance(call, ast.Expr)
    assert isinstance(call.value, ast.Call)
    [inner] = call.value.args
    assert isinstance(inner, ast.Call)
    assert ast.literal_eval(inner.args[0]) == {
        "records": "gs://lab/runtime",
        "job": JOB,
        "files": {name: hashlib.sha256(data).hexdigest() for name, data in CONTENTS.items()},
        "args": ["--native", "it's"],
        "region": None,
        "folder": "/srv/job",
    }


def test_user_data_has_the_script_run_at_every_boot() -> None:
    script = render_stub("s3://lab/runtime", JOB, CONTENTS)

    message = message_from_string(render_user_data(script))
    parts = [(part.get_content_type(), part.get_payload()) for part in message.walk() if not part.is_multipart()]

    assert parts == [
        ("text/cloud-config", "#cloud-config\ncloud_final_modules: [[scripts-user, always]]\n"),
        ("text/x-shellscript", script),
    ]
