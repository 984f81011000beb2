"""Finding a project's workflows and converting arguments to calls."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.config import Project
from runtime.errors import RequestRefused, UnknownName
from runtime.tasks.model import CommandEntry, FunctionEntry, WorkflowEntry
from runtime.tasks.workflows import BadArguments, HelpAsked, UnknownModule, bind_arguments, load

_numbers = itertools.count()

MODULE = '''
import dataclasses, enum

class Colour(enum.Enum):
    RED = 1
    BLUE = 2

@dataclasses.dataclass
class Model:
    layers: int = 2
    name: str = "m"

def train(path: str, lr: float = 0.1, tags: list[str] = [], colour: Colour = Colour.RED,
          model: Model | None = None, verbose: bool = False, names: dict[str, int] | None = None):
    """Train one model."""
    return dict(path=path, lr=lr, tags=tags, colour=colour.name, model=model, verbose=verbose, names=names)

async def later(x: int):
    return x + 1

def untyped(x, y=3):
    return x, y

workflows = {"train": train, "later": later, "untyped": untyped}
'''


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Write an importable module with a unique name to the working directory, and return the name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text: str = MODULE, *, under: str = "") -> str:
        name = f"lab{next(_numbers)}"
        # Modules stay imported, so each test needs its own package.
        monkeypatch.delitem(sys.modules, under, raising=False)
        if under:
            folder = tmp_path / under
            folder.mkdir(exist_ok=True)
            (folder / "__init__.py").touch()
            (folder / f"{name}.py").write_text(text)
        else:
            (tmp_path / f"{name}.py").write_text(text)
        return name

    return write


def project(tmp_path: Path, **fields: Any) -> Project:
    return Project(root=tmp_path, file=tmp_path / "pyproject.toml", **fields)


def run(name: str, workflow: str, *args: str, settings: Project | None = None) -> Any:
    return load(WorkflowEntry(name, workflow, args), project=settings or Project(root=Path.cwd()))()


def test_arguments_reach_the_function_with_their_types(write_module: Callable[..., str]) -> None:
    name = write_module()
    module = __import__(name)

    called = run(
        name, "train", "--path=/data/it's {a} b", "--lr", "1e-3", "--tags+=a", "--tags+=b", "--colour=BLUE",
        '--model={"layers": 4}', "--verbose=true", '--names={"a": 1}',
    )  # fmt: skip

    assert called == {
        "path": "/data/it's {a} b",
        "lr": 0.001,
        "tags": ["a", "b"],
        "colour": "BLUE",
        "model": module.Model(layers=4),
        "verbose": True,
        "names": {"a": 1},
    }


@pytest.mark.parametrize(
    ("args", "tags"), [(['--tags=["x", "y"]'], ["x", "y"]), (["--tags", "[x]"], ["x"]), (["--tags+=x\ny"], ["x\ny"])]
)
def test_lists_are_taken_as_json_or_one_by_one(
    write_module: Callable[..., str], args: list[str], tags: list[str]
) -> None:
    assert run(write_module(), "train", "--path=p", *args)["tags"] == tags


def test_text_that_looks_like_a_number_stays_text(write_module: Callable[..., str]) -> None:
    name = write_module()

    assert [run(name, "train", f"--path={text}")["path"] for text in ("007", "1e3", "true", "null", "")] == [
        "007", "1e3", "true", "null", "",
    ]  # fmt: skip


def test_coroutine_is_run_to_its_end_and_untyped_parameters_are_taken(write_module: Callable[..., str]) -> None:
    name = write_module()

    assert run(name, "later", "--x=2") == 3
    assert run(name, "untyped", "--x=2") == (2, 3)


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ([], "`--path` missing"),
        (["--path=p", "--lr=x"], "`--lr`: expected a `float`"),
        (["--path=p", "--lrr=1"], "it has no option `--lrr`"),
        (["p"], "it takes no argument `p` without a name"),
        (["--path=p", "--colour=GREEN"], "`--colour`: "),
        (["--path=p", '--model={"layer": 4}'], "`--model`: "),
        (["--path"], "--path"),
        (["--path=p", "--config=/nowhere.yaml"], "--config"),
        (["--help"], "they ask for help"),
        (["--path=p", "--model.help"], "they ask for help"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_and_nothing_is_printed(
    write_module: Callable[..., str], capfd: pytest.CaptureFixture[str], args: list[str], problem: str
) -> None:
    name = write_module()

    with pytest.raises(BadArguments) as refused:
        load(WorkflowEntry(name, "train", tuple(args)), project=Project(root=Path.cwd()))

    assert problem in refused.value.message
    assert f"workflow `{name} train`" in refused.value.message
    assert refused.value.exit_code == 2
    assert capfd.readouterr() == ("", "")


def test_misspelt_option_is_answered_with_the_nearest(write_module: Callable[..., str]) -> None:
    with pytest.raises(BadArguments) as refused:
        run(write_module(), "train", "--path=p", "--verbos=true")

    assert refused.value.hint == "did you mean `--verbose`?"
    assert refused.value.facts == ("its options: --colour, --lr, --model, --names, --path, --tags, --verbose",)


def test_help_is_text_for_whoever_asked(write_module: Callable[..., str]) -> None:
    module = __import__(write_module())

    with pytest.raises(HelpAsked) as asked:
        bind_arguments(module.train, ["--help"], name="p train")

    assert "usage: runtime run p train --path PATH" in asked.value.text
    assert "Train one model." in asked.value.text


def test_a_type_of_the_users_that_refuses_a_value_is_a_bad_argument(write_module: Callable[..., str]) -> None:
    name = write_module(
        "import dataclasses\n@dataclasses.dataclass\nclass Even:\n    n: int\n    def __post_init__(self):\n"
        "        if self.n % 2: raise ValueError('odd numbers are out')\n"
        "def go(even: Even): return even.n\nworkflows = {'go': go}\n"
    )

    assert run(name, "go", '--even={"n": 2}') == 2
    with pytest.raises(BadArguments, match="odd numbers are out"):
        run(name, "go", '--even={"n": 3}')


def test_project_is_found_under_the_packages_of_the_settings(write_module: Callable[..., str], tmp_path: Path) -> None:
    name = write_module(under="rslpkg")

    assert run(name, "later", "--x=1", settings=project(tmp_path, workflow_packages=("rslpkg",))) == 2


def test_module_of_the_same_name_without_the_workflow_does_not_hide_the_packages(
    write_module: Callable[..., str], tmp_path: Path
) -> None:
    name = write_module(under="rslpkg")
    (tmp_path / f"{name}.py").write_text("workflows = {'other': print}\n")

    assert run(name, "later", "--x=1", settings=project(tmp_path, workflow_packages=("rslpkg",))) == 2


def test_unknown_workflow_lists_what_there_is(write_module: Callable[..., str]) -> None:
    name = write_module()

    with pytest.raises(UnknownName) as refused:
        run(name, "trian")

    assert (refused.value.name, refused.value.known) == ("trian", ["later", "train", "untyped"])
    assert refused.value.hint == "did you mean `train`?"


def test_unknown_project_says_where_it_was_looked_for(tmp_path: Path) -> None:
    settings = project(tmp_path, workflow_packages=("rslpkg",))

    with pytest.raises(UnknownModule) as refused:
        run("nosuchlab", "train", settings=settings)

    assert refused.value.tried == ("nosuchlab", "rslpkg.nosuchlab")


@pytest.mark.parametrize(
    ("text", "error"),
    [("import surely_not_installed\n", ModuleNotFoundError), ("1/0\n", ZeroDivisionError), ("def f(:\n", SyntaxError)],
)
def test_what_fails_inside_the_users_module_is_reported_as_it_is(
    write_module: Callable[..., str], text: str, error: type[Exception]
) -> None:
    with pytest.raises(error):
        run(write_module(text), "train")


def test_missing_submodule_of_the_project_itself_is_not_taken_for_a_missing_project(
    write_module: Callable[..., str], tmp_path: Path
) -> None:
    name = write_module(under="broken")
    (tmp_path / "broken" / f"{name}.py").write_text(f"import broken.{name}x\n")

    with pytest.raises(ModuleNotFoundError):
        run(f"broken.{name}", "train")


DECORATED = """
from runtime.tasks.workflows import workflow

@workflow
def plain(x: int):
    return x

@workflow(name="named", project="my-lab")
def other(x: int):
    return -x
"""


def test_decorated_function_is_found_by_its_module_and_unchanged(write_module: Callable[..., str]) -> None:
    name = write_module(DECORATED)

    assert run(name, "plain", "--x=3") == 3
    assert __import__(name).plain(4) == 4


def test_decorated_function_is_found_by_a_package_that_imports_its_module(
    write_module: Callable[..., str], tmp_path: Path
) -> None:
    name = write_module(DECORATED, under="decopkg")
    (tmp_path / "decopkg" / "__init__.py").write_text(f"import decopkg.{name}\n")

    assert run("decopkg", "plain", "--x=3") == 3


def test_project_of_another_name_is_found_through_the_packages(
    write_module: Callable[..., str], tmp_path: Path
) -> None:
    name = write_module(DECORATED)

    assert run("my-lab", "named", "--x=3", settings=project(tmp_path, workflow_packages=(name,))) == -3


def test_entry_points_name_a_workflow_or_a_mapping(
    write_module: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = __import__(write_module())
    points = [
        SimpleNamespace(name="installed.later", load=lambda: module.later),
        SimpleNamespace(name="mapped", load=lambda: module.workflows),
    ]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points if "workflows" in group else [])

    assert run("installed", "later", "--x=1") == 2
    assert run("mapped", "later", "--x=1") == 2
    with pytest.raises(UnknownName) as refused:
        run("installed", "laterr")
    assert refused.value.known == ["later"]


def test_setup_runs_once_after_the_environment_files(
    write_module: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEPT", "mine")
    monkeypatch.setenv("FROM_FILE", "to be removed")
    monkeypatch.delenv("FROM_FILE")
    (tmp_path / ".env.test").write_text("FROM_FILE=yes\nKEPT=theirs\n")
    name = write_module(
        "import os\ncalls = []\ndef setup(): calls.append((os.environ['FROM_FILE'], os.environ['KEPT']))\n"
        "workflows = {'calls': lambda: calls}\n"
    )
    settings = project(tmp_path, workflow_setup=f"{name}:setup", env_files=(".env.test",))

    run(name, "calls", settings=settings)

    assert run(name, "calls", settings=settings) == [("yes", "mine")]


def test_environment_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestRefused, match="no file"):
        run("any", "any", settings=project(tmp_path, env_files=(".env.none",)))


def test_environment_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".env.odd").write_bytes(b"\xff\xfe\0")

    with pytest.raises(RequestRefused, match="it is no text"):
        run("any", "any", settings=project(tmp_path, env_files=(".env.odd",)))


def test_working_directory_is_importable_as_with_python_m(tmp_path: Path) -> None:
    """Runs in a separate process, since the tests' own path may contain the folder."""
    (tmp_path / "herelab.py").write_text(MODULE)
    code = (
        "import sys; sys.path = [p for p in sys.path if p]\n"
        "from runtime.tasks.model import WorkflowEntry\nfrom runtime.tasks.workflows import load\n"
        "assert 'jsonargparse' not in sys.modules\n"
        "print(load(WorkflowEntry('herelab', 'later', ('--x=1',)))())"
    )

    ran = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert (ran.stdout, ran.stderr) == ("2\n", "")


def test_function_entry_is_called_with_its_json(write_module: Callable[..., str]) -> None:
    name = write_module("class A:\n    @staticmethod\n    def f(a, *, b=1): return (a, b)\ndef g(): return 5\n")

    assert load(FunctionEntry(f"{name}:A.f", (1,), {"b": {"c": [2]}}))() == (1, {"c": [2]})
    assert load(FunctionEntry(f"{name}:g"))() == 5


def test_function_entry_that_does_not_fit_is_refused(write_module: Callable[..., str]) -> None:
    name = write_module("def f(a): return a\n")

    with pytest.raises(BadArguments, match="missing a required argument: 'a'"):
        load(FunctionEntry(f"{name}:f"))
    with pytest.raises(UnknownName) as unknown:
        load(FunctionEntry(f"{name}:ff"))
    assert unknown.value.hint == "did you mean `f`?"
    with pytest.raises(UnknownModule):
        load(FunctionEntry("nosuchlab:f"))


def test_command_is_not_a_call() -> None:
    with pytest.raises(TypeError):
        load(CommandEntry(("true",)))
