"""Calls of `submit` that take what they have in common with an earlier one from it."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.client.tasks import kept_stacks
from runtime.client.tasks import submit as submitting
from runtime.client.tasks import task_snapshot as submitted_code
from runtime.client.tasks.kept_stacks import MOST_CALLS, close_kept
from runtime.client.tasks.repeated import RepeatedCall
from runtime.client.tasks.submit import Submission, submit
from runtime.errors import RuntimeFailure

SOURCE = "def train(*args, **kwargs):\n    return 1\n\n\ndef other(*args):\n    return 2\n"


class Project:
    """A project with one module, whose data lies beside it, and what was submitted from it."""

    def __init__(self, folder: Path, module: ModuleType) -> None:
        self.folder, self.module = folder, module
        self.short: list[str] = []
        """Ids of tasks that were put the short way."""

    def submit(self, *args: Any, **more: Any) -> Submission:
        return submit(self.module.train, args=args, **more)

    def bodies(self, file: str = "data/local.db") -> dict[str, dict[str, Any]]:
        connection = sqlite3.connect(self.folder.parent / file)
        rows = connection.execute("SELECT id, body FROM tasks ORDER BY seq").fetchall()
        connection.close()
        return {identity: json.loads(body) for identity, body in rows}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """A project from which the second call already keeps what the third needs, for an hour."""
    close_kept()
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "repeated_calls.py").write_text(SOURCE)
    monkeypatch.setenv("RUNTIME_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("LOGNAME", "ada")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(kept_stacks, "SETTLED_NS", -(10**18))
    monkeypatch.setattr(kept_stacks, "PLAIN_LOOKS", 1)
    monkeypatch.setattr(kept_stacks, "LOOK_EVERY_S", 3600.0)
    monkeypatch.setattr(submitted_code, "LOOK_EVERY_S", 3600.0)
    importlib.invalidate_caches()
    made = Project(folder, importlib.import_module("repeated_calls"))
    real = RepeatedCall.put

    def put(self: RepeatedCall, *given: Any) -> str | None:
        identity = real(self, *given)
        if identity is not None:
            made.short.append(identity)
        return identity

    monkeypatch.setattr(RepeatedCall, "put", put)
    yield made
    close_kept()
    sys.modules.pop("repeated_calls", None)


def warm_up(project: Project, calls: int = 6, **more: Any) -> None:
    for number in range(calls):
        project.submit("warm", number, **more)
    assert project.short, "no call was put the short way"
    project.short.clear()


def test_later_calls_are_put_the_short_way_and_their_tasks_are_those_of_the_long_way(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm_up(project)
    short = project.submit("x", 1, None, True, 2.5, experiment=None)
    assert project.short == list(short.ids or ())
    monkeypatch.setenv("RUNTIME_DATA_DIR", str(project.folder.parent / "beside"))
    long = project.submit("x", 1, None, True, 2.5)

    assert len(project.short) == 1
    assert short == long
    assert short.asked == long.asked
    mine, theirs = project.bodies()[short.tasks[0][0]], project.bodies("beside/local.db")[long.tasks[0][0]]  # type: ignore[index]
    assert mine.pop("submitted_at") <= theirs.pop("submitted_at")
    assert list(mine.items()) == list(theirs.items())


TEXTS = st.text(max_size=8) | st.sampled_from(
    ["--token=abc123abc", "--lr", 'a"b\\', "ghp_" + "a1" * 18, "\x7f", "ä", "\0"]
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2), max_leaves=3
)
NUMBERS = itertools.count()
NAMES = st.sampled_from(["lr", "seed", "api_key", "b", "a", "ä", "pass word"] * 2 + ["", 1, None, True, 1.5])


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    args=st.lists(VALUES, max_size=3),
    kwargs=st.dictionaries(NAMES, VALUES, max_size=3) | st.sampled_from([None, [], (), 0, "", False, b"", range(0)]),
    code=st.booleans(),
)
def test_any_arguments_give_the_same_task_or_the_same_error_either_way(
    project: Project, args: list[Any], kwargs: Any, code: bool
) -> None:
    def outcome(queue: str) -> Any:
        try:
            done = submit(project.module.train, args=args, kwargs=kwargs, queue=queue, snapshot=None if code else False)
        except (RuntimeFailure, TypeError) as problem:
            return type(problem), str(problem)
        body = project.bodies("data/local.db" if queue == "q" else "long.db")[done.tasks[0][0]]  # type: ignore[index]
        body.pop("submitted_at")
        return done.tasks, list(body.items())

    for _ in range(6):
        submit(project.module.train, args=["warm", next(NUMBERS)], queue="q", snapshot=None if code else False)
    assert project.short
    project.short.clear()
    short = outcome("q")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(submitting, "put_again", lambda *_: None)
        long = outcome(f"sqlite:{project.folder.parent}/long.db#q")

    assert repr(short) == repr(long)


def replace_in_module(project: Project) -> None:
    project.module.train = project.module.other


def reload(project: Project) -> None:
    (project.folder / "repeated_calls.py").write_text(SOURCE.replace("return 1", "return 10"))
    importlib.reload(project.module)


@pytest.mark.parametrize("change", [replace_in_module, reload])
def test_function_that_its_module_has_no_longer_is_packed(project: Project, change: Callable[[Project], None]) -> None:
    warm_up(project)
    before = project.module.train
    change(project)

    done = submit(before, args=[1])

    assert done.pickles
    assert project.short == []


def test_function_that_became_a_generator_is_refused(project: Project) -> None:
    warm_up(project)

    def generate(*_: object) -> Iterator[int]:
        yield 1

    project.module.train.__code__ = generate.__code__

    with pytest.raises(RuntimeFailure, match="generator"):
        project.submit(7)


def rename(project: Project) -> None:
    project.module.train.__qualname__ = "Trainer.train"


def move(project: Project) -> None:
    sys.modules["moved"] = project.module
    project.module.train.__module__ = "moved"


def shadow(project: Project) -> None:
    class Odd(ModuleType):
        @property
        def train(self) -> object:
            return None

    odd = Odd("repeated_calls")
    odd.__dict__.update(vars(project.module))
    sys.modules["repeated_calls"] = odd


def hide(project: Project) -> None:
    class Bare:
        __slots__ = ()

    sys.modules["repeated_calls"] = Bare()  # type: ignore[assignment]


def reassign_file(project: Project) -> None:
    project.module.__file__ = str(project.folder.parent / "elsewhere" / "repeated_calls.py")
    (project.folder.parent / "elsewhere").mkdir()


@pytest.mark.parametrize("change", [rename, move, shadow, hide, reassign_file])
def test_function_or_module_that_was_changed_goes_the_long_way(
    project: Project, change: Callable[[Project], None]
) -> None:
    warm_up(project)
    train = project.module.train
    change(project)

    submit(train, args=[1])

    assert project.short == []
    sys.modules.pop("moved", None)


def test_function_under_another_name_than_its_own_keeps_its_id(project: Project) -> None:
    (project.folder / "repeated_calls.py").write_text(
        "class A:\n    @staticmethod\n    def train(*args):\n        return 1\n\n\ntrain = A.train\n"
    )
    importlib.reload(project.module)

    for number in range(6):
        project.submit(number)

    assert {body["function"] for body in project.bodies().values()} == {"repeated_calls:A.train"}


def test_tasks_keep_the_environment_of_the_project(project: Project) -> None:
    (project.folder / "requirements.txt").write_text("six==1.16.0\n")
    (project.folder / "runtime.toml").write_text('environment = "requirements.txt"\n')

    done = [project.submit(number) for number in range(6)]

    assert {body["environment"] for body in project.bodies().values()} == {done[0].environment}
    assert project.short == []


def test_code_that_was_edited_just_before_goes_with_the_task(project: Project) -> None:
    warm_up(project)
    before = project.submit(1)

    (project.folder / "beside.py").write_text("# new\n")
    after = project.submit(2)

    assert project.short == list(before.ids or ())
    assert None is not before.snapshot != after.snapshot is not None


def test_settings_variables_folder_and_user_of_each_call_count(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm_up(project)
    monkeypatch.setenv("LOGNAME", "grace")
    graces = project.submit(1)
    monkeypatch.setenv("RUNTIME_QUEUE", "tiles")
    assert project.submit(2).queue == "tiles"
    monkeypatch.delenv("RUNTIME_QUEUE")
    (project.folder / "runtime.toml").write_text('queue = "beside"\n')
    assert project.submit(3).queue == "beside"
    (project.folder / "inner").mkdir()
    monkeypatch.chdir(project.folder / "inner")
    inner = project.submit(4)

    bodies = project.bodies()
    assert bodies[graces.ids[0]]["submitted_by"].startswith("grace@")  # type: ignore[index]
    assert bodies[inner.ids[0]]["folder"] == "inner"  # type: ignore[index]
    assert project.short == []


def test_known_task_is_told_as_one(project: Project) -> None:
    warm_up(project)

    first, again = project.submit("same"), project.submit("same")

    assert (first.new, first.known, again.new, again.known) == (1, 0, 0, 1)
    (project.folder / "beside.py").write_text("# other code\n")
    assert project.submit("same").kept_code == first.snapshot


def test_after_a_while_a_call_looks_at_everything_again(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_stacks, "LOOK_EVERY_S", 0.0)

    for number in range(6):
        project.submit(number)

    assert project.short == []


@pytest.mark.parametrize(
    "options",
    [
        {"key": "k"},
        {"timeout": 5},
        {"priority": True},
        {"max_failures": 1},
        {"delay": 60},
        {"secrets": []},
        {"outputs": []},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_are_never_left_out(project: Project, options: dict[str, Any]) -> None:
    warm_up(project)
    try:
        done = project.submit(1, **options)
    except RuntimeFailure:
        pass  # a priority is a number
    else:
        name = {"timeout": "timeout_s", "delay": "not_before"}.get(*options, *options)
        assert options[next(iter(options))] in ([], project.bodies()[done.ids[0]].get(name), 60)  # type: ignore[index]

    assert project.short == []


def test_functions_that_are_never_repeated_are_forgotten(project: Project) -> None:
    for number in range(2 * MOST_CALLS):
        project.submit(1, experiment=f"e{number}")
    (kept,) = kept_stacks._kept.values()

    assert len(kept._calls) == MOST_CALLS
    assert not any(kept._calls.values())


def test_closed_watch_is_never_asked(project: Project) -> None:
    # Below the folder of the settings, whose own watch would notice a change there.
    (project.folder / "inner").mkdir()
    (project.folder / "inner" / "a.py").write_text("# old\n")
    warm_up(project)
    (kept,) = kept_stacks._kept.values()
    ours, theirs = os.pipe()
    for code in kept._codes.values():
        assert code._watch is not None
        number = code._watch.fd
        code.close()
        os.dup2(ours, number)  # a file that says nothing has its number now
    (project.folder / "inner" / "a.py").write_text("# new\n")

    done = project.submit(1)

    assert project.short == []
    assert done.snapshot == project.submit(2).snapshot
    for descriptor in (ours, theirs, number):
        os.close(descriptor)
