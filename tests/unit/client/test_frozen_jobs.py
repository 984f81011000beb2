"""Jobs whose packages are those of the Python that launches them."""

from __future__ import annotations

import importlib
import io
import os
import sys
import tarfile
from pathlib import Path
from typing import Any

import pathspec
import pytest

import runtime
from runtime.cli.launch import build_request
from runtime.cli.main import main
from runtime.client.jobs.prepare import LaunchOptions, LaunchRequest, PreparedLaunch, prepare
from runtime.config import load_settings
from runtime.errors import InvalidValue, NotPossible
from runtime.jobs.run_config import FROZEN_LOCK
from runtime.jobs.spec import EnvironmentManager, parse_spec
from runtime.snapshots.snapshot import add_file, digest_files, make_snapshot, read_entries
from tests.services_support import PATIENCE_S
from tests.unit.client.test_packages import install
from tests.unit.worker.test_worker_environments import make_wheel

BODY = """
def which():
    import tinytool

    return tinytool.VERSION
"""
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project, and a Python with one package beside the standard library."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "main.py").write_text("import tinytool; print(tinytool.VERSION)\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("RUNTIME_DATA_DIR", str(tmp_path / "data"))
    install(tmp_path / "site", "tinytool", "1.0")
    # Restored with its contents, also after a test that adds to it.
    monkeypatch.syspath_prepend(tmp_path / "site")
    sys.path[:] = [each for each in sys.path if "site-packages" not in each]
    return folder


def plan(fields: dict[str, Any], **options: Any) -> PreparedLaunch:
    request = LaunchRequest({"command": ["python", "main.py"], **fields})
    settings = load_settings()
    return prepare(request, request.choose_targets(["local"], settings)[0], settings, LaunchOptions(**options))


def files_of(prepared: PreparedLaunch) -> dict[str, str]:
    assert prepared.snapshot is not None
    with tarfile.open(fileobj=io.BytesIO(prepared.snapshot.archive)) as opened:
        return {each.name: (opened.extractfile(each) or io.BytesIO()).read().decode() for each in opened}


@pytest.mark.parametrize("written", ["frozen", {"manager": "frozen"}])
def test_frozen_list_goes_along_in_the_snapshot_and_names_every_package(project: Path, written: Any) -> None:
    prepared = plan({"environment": written})

    assert files_of(prepared) == {FROZEN_LOCK: "tinytool==1.0\n", "main.py": (project / "main.py").read_text()}
    made = prepared.plan.order["environment"]
    assert (made["manager"], made["lock"], made["python"], made["complete"]) == ("pip", FROZEN_LOCK, HERE, True)
    assert plan({"environment": written}).plan.job.id == prepared.plan.job.id
    assert plan({}).plan.job.id != prepared.plan.job.id


def test_pin_comes_before_the_list_whose_own_needs_are_installed_then(project: Path) -> None:
    prepared = plan({"environment": {"manager": "frozen", "extras": ["tinytool==2.0", "other==1"]}})

    assert files_of(prepared)[".runtime-pinned.txt"] == "tinytool==2.0\nother==1\n"
    assert "complete" not in prepared.plan.order["environment"]


def test_snapshot_that_is_given_keeps_the_list_with_which_it_was_taken(project: Path) -> None:
    first = plan({"environment": "frozen"})

    again = plan({"environment": "frozen"}, snapshot=first.snapshot)

    assert again.snapshot == first.snapshot
    assert again.plan.order["environment"] == first.plan.order["environment"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"code": {"mode": "none"}}, "sends its list along with the code, and `code.mode` is `none`"),
        ({"environment": {"manager": "frozen", "lock": "x.txt"}}, "`environment.lock` does not go with `frozen`"),
        ({"environment": {"manager": "frozen", "python": "3.11"}}, "`environment.python` does not go with `frozen`"),
        ({"environment": {"manager": "frozen", "name": "x"}}, "`environment.name` does not go with `frozen`"),
        ({"image": "debian:12"}, "the job runs in an `image`"),
    ],
)
def test_frozen_list_that_could_not_be_sent_is_refused(project: Path, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(NotPossible) as refused:
        plan({"environment": "frozen", **fields})

    assert said in refused.value.message


def test_package_of_a_folder_is_refused_by_its_name(project: Path, tmp_path: Path) -> None:
    install(tmp_path / "site", "mine", "1.0", url={"url": f"file://{tmp_path}/elsewhere", "dir_info": {}})

    with pytest.raises(NotPossible, match="mine"):
        plan({"environment": "frozen"})


def test_file_of_the_project_that_is_named_like_the_list_stays_out(project: Path) -> None:
    first = plan({"environment": "frozen"})
    assert pathspec, "loaded before the project's own packages hide it"
    for name in (".runtime-frozen.txt", ".runtime-pinned.txt"):
        (project / name).write_text("six==1.15.0\n")

    again = plan({"environment": "frozen"})

    assert again.snapshot == first.snapshot
    plain = plan({}).snapshot
    assert plain is not None
    assert ".runtime-frozen.txt" in plain.names


@pytest.mark.parametrize("lock", ["nope.txt", "./nope.txt"])
def test_lock_file_that_does_not_go_along_is_refused_at_launch(project: Path, lock: str) -> None:
    fields = {"environment": {"manager": "pip", "lock": lock}}
    with pytest.raises(NotPossible, match="and the snapshot has no such file"):
        plan(fields)

    (project / "nope.txt").symlink_to("../outside.txt")
    with pytest.raises(NotPossible, match=r"has no such file: it is a link to `[.][.]/outside.txt`"):
        plan(fields)
    (project / "real.txt").touch()
    (project / "nope.txt").unlink()
    (project / "nope.txt").symlink_to("real.txt")

    assert plan(fields).plan.order["environment"]["lock"] == lock


def test_development_machine_takes_no_frozen_list(project: Path) -> None:
    with pytest.raises(NotPossible, match="a development machine runs each new snapshot"):
        plan({"environment": "frozen"}, hold=True)


@pytest.mark.parametrize(
    ("words", "environment"),
    [
        (["--environment", "frozen"], ("frozen", None, ())),
        (["--with", "six==1.17"], ("frozen", None, ("six==1.17",))),
        (["--environment", "uv.lock"], ("uv", "uv.lock", ())),
        (["--environment", "locks/a.txt"], ("pip", "locks/a.txt", ())),
        (["--environment", "conda.yml"], ("conda", "conda.yml", ())),
        (["--environment", "none"], ("none", None, ())),
    ],
)
def test_command_line_names_a_list_or_a_lock_file(words: list[str], environment: tuple[Any, ...]) -> None:
    from runtime.cli.launch import read_environment

    given = dict(zip(words[::2], words[1::2], strict=True))
    pins = [given["--with"]] if "--with" in given else None
    request = build_request(None, ["true"], read_environment(given.get("--environment"), pins), [], [], [], [])

    made = parse_spec(request._job, source="the test").environment  # type: ignore[arg-type]
    assert (made.manager, made.lock, made.extras) == (EnvironmentManager(environment[0]), *environment[1:])


def test_command_line_with_another_file_is_refused() -> None:
    from runtime.cli.launch import read_environment

    with pytest.raises(InvalidValue):
        read_environment("train.py", None)


def test_file_that_is_added_to_a_snapshot_is_one_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\0" * 20_000)
    snapshot = make_snapshot(tmp_path)

    more = add_file(snapshot, "b", b"x" * 512)

    entries = read_entries(more.archive, more.id, str(tmp_path / "to"))
    assert [os.path.basename(entry[0]) for entry in entries] == ["b", "a"]  # noqa: PTH119
    assert len(more.archive) % 10_240 == 0
    assert digest_files(more)["a"] == digest_files(snapshot)["a"]
    assert list(digest_files(more)) == ["b", "a"]


def test_job_runs_with_the_packages_of_the_python_that_launched_it(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in ("1.0", "2.0"):
        make_wheel(tmp_path / "wheels", version)
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)

    job = runtime.launch({"command": ["python", "main.py"], "environment": "frozen"}, "local")
    monkeypatch.syspath_prepend(project)
    (project / "frozen_body.py").write_text(BODY)
    body = importlib.import_module("frozen_body")
    called = runtime.launch(body.which, "local", environment="frozen", name="called")

    assert job.wait(timeout=PATIENCE_S).state.value == "succeeded", b"".join(job.logs())
    assert b"".join(job.logs()) == b"1.0\n"
    assert called.result(timeout=PATIENCE_S) == "1.0"


def test_help_names_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--help"]) == 0
    assert "--environment" in capsys.readouterr().out
