"""The packages that go with submitted tasks: lock files and frozen lists, and what no other machine could install."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from runtime.client.tasks.environment import take_packages
from runtime.client.tasks.packages import freeze, read_lock
from runtime.client.tasks.task_snapshot import SubmittedCode
from runtime.config import load_settings
from runtime.errors import InvalidValue, NotPossible, RequestRefused, StoreUnsafe
from runtime.records.memory import MemoryRecords
from runtime.snapshots.environment import Packages, fetch_packages, put_packages

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def install(site: Path, name: str, version: str, **url: object) -> None:
    """Have a package installed in a folder, by the files that `importlib.metadata` reads."""
    info = site / f"{name.replace('-', '_') or 'nameless'}-{version.replace('/', '_')}.dist-info"
    write(info / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if url:
        write(info / "direct_url.json", json.dumps(url))


# requirements


def test_requirements_with_exact_versions_become_the_packages_of_this_python(tmp_path: Path) -> None:
    lock = write(
        tmp_path / "requirements.txt",
        "# made by pip-compile\n--index-url https://pypi.lab.org/simple\n\nnumpy==2.1.0 \\\n    --hash=sha256:aa \\\n"
        "    --hash=sha256:bb  # via scipy\ntorch == 2.4.0+cpu ; python_version >= '3.9'\n"
        "tool @ git+https://github.com/lab/tool@0a1b2c3\nextra[all]===1.0rc1\n",
    )

    packages = read_lock(lock)

    assert packages == Packages(
        manager="pip",
        python=HERE,
        files={
            "requirements.txt": "--index-url https://pypi.lab.org/simple\n"
            "numpy==2.1.0      --hash=sha256:aa      --hash=sha256:bb\n"
            "torch == 2.4.0+cpu ; python_version >= '3.9'\n"
            "tool @ git+https://github.com/lab/tool@0a1b2c3\nextra[all]===1.0rc1\n"
        },
    )


def test_pin_of_one_submission_takes_the_place_of_the_lists(tmp_path: Path) -> None:
    lock = write(tmp_path / "r.txt", "Num_Py==1.26\nscipy==1.14\n")

    assert (
        read_lock(lock, ["num.py==2.1", "six==1.17"]).files["requirements.txt"]
        == "scipy==1.14\nnum.py==2.1\nsix==1.17\n"
    )


@pytest.mark.parametrize(
    "line",
    [
        "-e .",
        "-e git+https://github.com/lab/tool@0a1b2c3#egg=tool",
        "--editable=/srv/tool",
        "-r more.txt",
        "-c constraints.txt",
        "./tool-1.0-py3-none-any.whl",
        "tool @ file:///srv/tool",
        "tool @ ../tool",
        "numpy",
        "numpy>=2",
        "numpy==2.*",
        "numpy==2.1,<3",
        "--config-settings x=y",
        "--global-option=--evil",
        "numpy==2.1 --global-option=--evil",
        "numpy==2.1 --config-settings=x",
        "--index-url https://me:token@pypi.lab.org/simple",
        "tool @ https://token@pypi.lab.org/tool-1.tar.gz",
    ],
)
def test_line_that_another_machine_could_not_install_alike_is_refused(tmp_path: Path, line: str) -> None:
    lock = write(tmp_path / "requirements.txt", f"six==1.17.0\n{line}\n")

    with pytest.raises(NotPossible) as refused:
        read_lock(lock)

    assert "token" not in refused.value.render()


@pytest.mark.parametrize("name", ["environment.yml", "poetry.lock", "pdm.lock", "missing.txt"])
def test_file_that_is_no_lock_file_of_ours_is_refused(tmp_path: Path, name: str) -> None:
    if name != "missing.txt":
        write(tmp_path / name, "")

    with pytest.raises(NotPossible):
        read_lock(tmp_path / name)


@pytest.mark.parametrize(
    "text", ["numpy", "-e ..", "--index-url=x", "a @ file:///x", "numpy==2.1\nevil", "numpy==2 --pre"]
)
def test_pin_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidValue):
        read_lock(write(tmp_path / "r.txt", "six==1.17\n"), [text])


# uv


UV = 'version = 1\n\n[[package]]\nname = "p"\nversion = "1"\nsource = { virtual = "." }\n'


def test_lock_of_uv_goes_with_its_project_file(tmp_path: Path) -> None:
    write(tmp_path / "pyproject.toml", "[project]\n")

    packages = read_lock(write(tmp_path / "uv.lock", UV))

    assert packages == Packages(manager="uv", python=HERE, files={"uv.lock": UV, "pyproject.toml": "[project]\n"})


@pytest.mark.parametrize("kind", ["path", "directory", "editable"])
def test_lock_of_uv_with_a_package_of_this_machine_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    write(tmp_path / "pyproject.toml", "[project]\n")
    more = f'[[package]]\nname = "helper"\nversion = "1"\nsource = {{ {kind} = "../helper" }}\n'

    with pytest.raises(NotPossible, match=r"helper \(\.\./helper\)"):
        read_lock(write(tmp_path / "uv.lock", f"{UV}\n{more}"))


def test_lock_of_uv_with_a_password_or_no_toml_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "pyproject.toml", "[project]\n")
    more = '[[package]]\nname = "q"\nversion = "1"\nsource = { registry = "https://me:token@pypi.lab.org/simple" }\n'

    with pytest.raises(NotPossible) as password:
        read_lock(write(tmp_path / "uv.lock", f"{UV}\n{more}"))
    write(
        tmp_path / "elsewhere" / "pyproject.toml", '[[tool.uv.index]]\nurl = "https://me:token@pypi.lab.org/simple"\n'
    )
    with pytest.raises(NotPossible):
        read_lock(write(tmp_path / "elsewhere" / "uv.lock", UV))
    with pytest.raises(NotPossible):
        read_lock(write(tmp_path / "uv.lock", "<<<<<<< HEAD\n"))
    with pytest.raises(NotPossible):
        read_lock(write(tmp_path / "uv.lock", "package = 3\n"))

    assert "token" not in password.value.render()


# frozen


def test_frozen_list_has_every_package_once_with_its_version_but_not_the_project_and_what_workers_have(
    tmp_path: Path,
) -> None:
    project, first, second = tmp_path / "project", tmp_path / "first", tmp_path / "second"
    install(first, "numpy", "2.1.0")
    install(second, "NumPy", "1.0")
    install(second, "torch", "2.4.0+cpu")
    install(second, "pip", "23.0")
    install(second, "research-runtime", "0.1", url="file:///srv/runtime", dir_info={"editable": True})
    install(second, "the-project", "1", url=f"file://{project}", dir_info={"editable": True})
    install(project, "old-style", "1")
    install(second, "tool", "1", url="https://github.com/lab/tool.git", vcs_info={"vcs": "git", "commit_id": "0a1b2c3"})
    install(second, "made", "1", url="https://lab.org/made-1.whl", archive_info={}, subdirectory="py")

    packages = freeze(project, path=[str(first), str(second), str(project)])

    assert packages == Packages(
        manager="pip",
        python=HERE,
        complete=True,
        files={
            "requirements.txt": "made @ https://lab.org/made-1.whl#subdirectory=py\nnumpy==2.1.0\n"
            "tool @ git+https://github.com/lab/tool.git@0a1b2c3\ntorch==2.4.0+cpu\n"
        },
    )


@pytest.mark.parametrize(
    ("name", "version", "url"),
    [
        ("helper", "1", {"url": "file:///srv/helper", "dir_info": {"editable": True}}),
        ("helper", "1", {"url": "file:///srv/helper-1.whl", "archive_info": {}}),
        ("helper", "1", {"url": "https://github.com/lab/helper", "vcs_info": {"vcs": "git"}}),
        ("helper", "1", {"url": "https://me:token@lab.org/helper-1.whl", "archive_info": {}}),
        ("helper", "1", {"url": "https://lab.org/helper 1.whl\n-e ..", "archive_info": {}}),
        ("helper", "1", {"url": "/srv/helper"}),
        ("-e ..", "1", {}),
        ("--index-url=evil", "1", {}),
        ("helper", "1 --pre", {}),
    ],
)
def test_installed_package_that_no_index_has_is_refused_by_name(
    tmp_path: Path, name: str, version: str, url: dict[str, object]
) -> None:
    install(tmp_path / "site", name, version, **url)

    with pytest.raises(NotPossible) as refused:
        freeze(None, path=[str(tmp_path / "site")])

    assert name in refused.value.render()
    assert "token" not in refused.value.render()


def test_frozen_list_with_a_pin_lets_pip_find_what_the_pin_needs(tmp_path: Path) -> None:
    install(tmp_path, "numpy", "1.0")

    packages = freeze(None, ["numpy==2.1"], path=[str(tmp_path)])

    assert (packages.files["requirements.txt"], packages.complete) == ("numpy==2.1\n", False)


# submitting


def test_environment_of_the_project_goes_with_tasks_unless_a_submission_names_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "runtime.toml", 'environment = "locks/tasks.txt"\n')
    write(tmp_path / "locks" / "tasks.txt", "six==1.17\n")
    (tmp_path / "deep").mkdir()
    monkeypatch.chdir(tmp_path / "deep")
    write(Path("own.txt"), "six==1.16\n")
    records, settings, code = MemoryRecords(), load_settings(), SubmittedCode()

    taken = {wanted: take_packages(wanted, records, settings, code).id for wanted in (None, "own.txt", "none", False)}

    project = read_lock(tmp_path / "locks" / "tasks.txt")
    assert taken == {None: project.id, "own.txt": read_lock(Path("own.txt")).id, "none": None, False: None}
    assert fetch_packages(project.id, records) == project
    assert take_packages(project.id, None, settings, code).id == project.id


def test_pin_without_an_environment_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(RequestRefused):
        take_packages("none", None, load_settings(), SubmittedCode(), extra=["six==1.17"])


@pytest.mark.parametrize(
    "content",
    [
        b"{}",
        b"[]",
        b"\xff",
        b'{"schema":1,"manager":"sh","python":"3.11","complete":false,"files":{"requirements.txt":""}}',
        b'{"schema":1,"manager":"pip","python":"3.11; rm","complete":false,"files":{"requirements.txt":""}}',
        b'{"schema":1,"manager":"pip","python":"3.11","complete":false,"files":{"requirements.txt":"","../x":""}}',
        b'{"schema":1,"manager":"pip","python":"3.11","complete":false,"files":{"requirements.txt":1}}',
        b'{"schema":2,"manager":"pip","python":"3.11","complete":false,"files":{"requirements.txt":""}}',
    ],
)
def test_stored_packages_that_are_none_are_refused(content: bytes) -> None:
    import hashlib

    records = MemoryRecords()
    records.put_blob(content, prefix="environments")

    with pytest.raises(NotPossible):
        fetch_packages(f"sha256:{hashlib.sha256(content).hexdigest()}", records)


def test_stored_packages_with_other_bytes_than_their_name_says_are_not_used() -> None:
    records = MemoryRecords()
    packages = Packages(manager="pip", python="3.11", files={"requirements.txt": ""})
    put_packages(packages, records)
    key = f"environments/{packages.id.removeprefix('sha256:')}"
    records.blobs.put(key, b"{}")

    with pytest.raises(StoreUnsafe):
        fetch_packages(packages.id, records)


def test_lock_file_that_is_none_says_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "uv.lock").write_text("version = 1\n")

    for name, said in (
        ("folder", f"cannot read the lock file `{tmp_path}/folder`: it is no regular file"),
        ("gone.txt", f"cannot read the lock file `{tmp_path}/gone.txt`: no such file"),
        ("uv.lock", f"cannot read what `uv.lock` is a lock of, `{tmp_path}/pyproject.toml`: no such file"),
    ):
        with pytest.raises(NotPossible) as refused:
            read_lock(tmp_path / name)
        assert refused.value.message == said


def test_lock_file_that_begins_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_bytes(b"\xef\xbb\xbfidna==3.7\r\n")

    assert list(read_lock(tmp_path / "requirements.txt").files.values()) == ["idna==3.7\n"]
