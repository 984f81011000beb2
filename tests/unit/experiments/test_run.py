"""`run_experiment`, `map`, and `launch` and `submit` of functions: the same on this process, as jobs and in a queue."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import runtime
from runtime.cli.main import main
from runtime.client.jobs.prepare import LaunchOptions
from runtime.client.values import CallFailed, RemoteTraceback
from runtime.errors import InvalidTask, InvalidValue, NotPossible, RequestRefused, UnknownName
from runtime.experiments.run import takes_run
from runtime.jobs.spec import InvalidSpec
from tests.experiments_support import open_lab, open_workers
from tests.services_support import PATIENCE_S, wait_until

MODULE = """\
import functools, os, time
from pathlib import Path

class Small(ValueError):
    def __init__(self, n):
        super().__init__("%d is small" % n)
        self.n = n

def double(n):
    print("double", n)
    return 2 * n

def negate(n):
    return -n

def check(n):
    if n < 2:
        raise Small(n)
    return n

def fit(run, variant):
    run.report(step=1, loss=variant["lr"])
    (run.output / "weights").write_text("w")
    (run.checkpoint / "state").write_text("s")
    return [run.name, run.variant["lr"], run.output.joinpath("weights").read_text(), run.should_stop()]

def tell(run, variant):
    import runtime
    same = runtime.current_attempt()
    told = [[each.name, each.index, each.attempt, each.argv, each.git, each.gpus] for each in (run, same)]
    run.progress(1, total=2, text="half", loss=1)
    return told, run.variant, same.variant, run.ids

def pair_of(n):
    return (n, {n})

def same(value):
    return value

def token(n):
    return os.urandom(8).hex()

class Trainer:
    def __init__(self, lr=0.1):
        self.lr = lr

    def scale(self, x=3):
        return self.lr * x

    @classmethod
    def make(cls, x):
        return [cls.__name__, x]

class Sub(Trainer):
    pass

def louder(function):
    return functools.wraps(function)(lambda x: [function(x)])

def thrice(n):
    return 3 * n

loud = louder(thrice)
first = thrice

def thrice(n):
    return n

def leave(code):
    raise SystemExit(code)

def interrupt(text):
    raise KeyboardInterrupt(*text)

def hang(n):
    print("hangs", flush=True)
    time.sleep(600)

def where():
    return [os.getcwd(), Path(__file__).parent.name]
"""


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of a project, in the working directory."""
    with open_lab("lab_of_test", MODULE, tmp_path, monkeypatch) as lab:
        yield lab


@pytest.fixture
def worker() -> Iterator[Callable[[], None]]:
    """Starts a worker of the built-in stack."""
    with open_workers() as start:
        yield start


TARGETS = ("here", "local", "queue:")


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest, lab: Any, worker: Callable[[], None]) -> str:
    if request.param == "queue:":
        worker()
    return str(request.param)


def value_of(found: Any, target: str) -> Any:
    return found if target == "here" else found.result(timeout=PATIENCE_S)


# every target


def test_map_has_the_values_in_the_order_of_its_items(lab: Any, target: str) -> None:
    calls = runtime.map(lab.double, range(3), target=target)

    assert calls.results(timeout=PATIENCE_S) == [0, 2, 4]
    assert (len(calls), calls[1].result()) == (3, 2)
    if target != "here":
        assert calls[2].logs() == "double 2\n"


@pytest.mark.daily(2)
def test_lambda_and_values_that_json_lacks_go_through(lab: Any, target: str) -> None:
    offset = 10

    calls = runtime.map(lambda n: (n[0] + offset, {n}), [(1,), (2,)], name="odd", target=target)

    assert calls.results(timeout=PATIENCE_S) == [(11, {(1,)}), (12, {(2,)})]


@pytest.mark.daily(1)
def test_numbers_that_json_lacks_go_through(lab: Any, target: str) -> None:
    calls = runtime.map(lab.negate, [float("inf"), 10**5000], target=target)

    assert calls.results(timeout=PATIENCE_S) == [float("-inf"), -(10**5000)]


def test_run_has_the_same_context_on_every_target(lab: Any, target: str) -> None:
    found = runtime.run_experiment(lab.fit, {"lr": 0.5}, name="sac", target=target)

    assert value_of(found, target) == ["sac", 0.5, "w", False]


def test_map_gives_a_function_that_needs_it_the_run_of_each_item(lab: Any, target: str) -> None:
    calls = runtime.map(lab.fit, [{"lr": 0.5}, {"lr": 0.25}], name="sac", target=target)

    assert calls.results(timeout=PATIENCE_S) == [["sac", 0.5, "w", False], ["sac", 0.25, "w", False]]


def test_run_is_given_to_functions_that_need_it_and_an_item_and_to_no_others() -> None:
    class Trainer:
        def fit(self, run: Any, variant: Any, more: int = 1) -> None: ...

        def score(self, run: Any) -> None: ...

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        return functools.wraps(function)(lambda *args: [function(*args)])

    def inject(function: Callable[..., Any]) -> Callable[..., Any]:
        return functools.wraps(function)(lambda item: function(None, item))

    take: list[Callable[..., Any]] = [lambda run, item: 0, Trainer().fit, decorate(Trainer().fit)]
    take += [functools.partial(lambda run, item, scale: 0, scale=2), functools.partial(Trainer().fit, more=2)]
    others: list[Callable[..., Any]] = [
        lambda run: 0,
        lambda run, scale=1: 0,
        lambda a, b: 0,
        Trainer().score,
        len,
        Trainer,
    ]
    others += [lambda *args: 0, inject(Trainer().fit), functools.partial(Trainer().fit, 1)]
    assert ([takes_run(each) for each in take], [takes_run(each) for each in others]) == ([True] * 5, [False] * 9)


def test_run_says_where_it_comes_from_on_every_target(lab: Any, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    who = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main"]
    for words in (["init"], ["add", "."], ["commit", "-m", "first"]):
        subprocess.run([*who, *words], check=True, capture_output=True)
    with Path("lab_of_test.py").open("a") as opened:
        opened.write("\n# changed\n")
    monkeypatch.setattr(sys, "argv", ["sweep.py", "--token=canary", "--lr=1"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    (mine, context), *variants, ids = value_of(runtime.run_experiment(lab.tell, {"lr": 1}, target=target), target)

    *numbers, argv, [repository], gpus = mine
    assert (numbers, argv, gpus) == (["tell", 0, 1], ["sweep.py", "--lr=1"], [])
    assert repository["diff"].splitlines()[-1] == "+# changed"
    shown = [repository[name] for name in ("folder", "branch", "dirty", "staged_diff", "remote", "commit")]
    head = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert shown == [".", "main", True, "", None, head]
    wanted = {"here": set(), "local": {"RUNTIME_JOB_ID"}}.get(target, {"RUNTIME_TASK_ID", "RUNTIME_ATTEMPT_TOKEN"})
    assert {name for name in ids if name.startswith("RUNTIME_")} == wanted
    if target == "here":
        assert (context[0], context[3:], variants) == ("local", mine[3:], [{"lr": 1}, None])
    else:
        assert (context, variants) == (mine, [{"lr": 1}, {"lr": 1}])


@pytest.mark.parametrize("target", [each for each in TARGETS if each != "here"], indirect=True)
def test_same_call_from_another_command_line_is_the_same_work(
    lab: Any,
    worker: Callable[[], None],
    target: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    found = []
    for argv in (["a.py"], ["b.py", "--x"]):
        monkeypatch.setattr(sys, "argv", argv)
        found.append(value_of(runtime.run_experiment(lab.tell, 1, target=target, name="same"), target)[0][0][3])

    assert found == [["a.py"], ["a.py"]]
    assert "other" not in capfd.readouterr().err


def test_failed_call_says_what_was_raised(lab: Any, target: str) -> None:
    calls = runtime.map(lab.check, [1, 2], target=target, **({"max_failures": 1} if target == "queue:" else {}))

    problem = calls[0].exception(timeout=PATIENCE_S)
    assert calls[1].result(timeout=PATIENCE_S) == 2
    if target == "queue:":
        assert isinstance(problem, CallFailed)
        assert "lab_of_test.Small: 1 is small" in problem.message
        assert "in check\n" in (problem.traceback or "")
    else:
        assert type(problem) is lab.Small
        assert problem.n == 1
    if target == "local":
        assert isinstance(problem.__cause__, RemoteTraceback)
        assert "in check\n    raise Small(n)\nlab_of_test.Small: 1 is small\n" in str(problem.__cause__)


def test_nothing_to_map_is_no_call(lab: Any, target: str) -> None:
    assert runtime.map(lab.double, [], target=target).results() == []


@pytest.mark.parametrize("target", ["local", "queue:"])
def test_the_same_map_again_is_the_same_work(lab: Any, worker: Callable[[], None], target: str) -> None:
    worker()
    first = runtime.map(lab.double, [1, 2], target=target)
    assert first.results(timeout=PATIENCE_S) == [2, 4]

    again = runtime.map(lab.double, [1, 2], target=target)

    assert again.results(timeout=PATIENCE_S) == [2, 4]
    assert again[0].logs() == "double 1\n"
    assert repr(again).partition(": ")[0] == repr(first).partition(": ")[0]


@pytest.mark.parametrize("target", ["local", "queue:"])
def test_cancelled_call_ends_where_it_runs(lab: Any, worker: Callable[[], None], target: str) -> None:
    worker()
    calls = runtime.map(lab.hang, [1], target=target)
    assert wait_until(lambda: "hangs" in calls[0].logs())

    assert calls[0].cancel()

    with pytest.raises(CancelledError):
        calls[0].result()
    again = runtime.map(lab.hang, [1], target=target)
    with pytest.raises(CancelledError):
        again[0].result(timeout=PATIENCE_S)


# here


def test_field_of_a_job_is_refused_here(lab: Any) -> None:
    with pytest.raises(RequestRefused, match="`resources` is a field of jobs and tasks, and the target is `here`"):
        runtime.map(lab.double, [1], resources={"cpus": 1})
    with pytest.raises(RequestRefused, match="`retry`"):
        runtime.run_experiment(lab.fit, {}, retry={"failure": 1})


def test_coroutine_or_generator_function_is_refused_here_as_anywhere() -> None:
    async def wait(run: Any, variant: Any) -> float:
        return 1.0

    def steps(run: Any, variant: Any) -> Any:
        yield 1.0

    for function, kind in ((wait, "a coroutine function"), (steps, "a generator function")):
        with pytest.raises(RequestRefused, match=f"it is {kind}, and a call returns one value"):
            runtime.run_experiment(function, {})
        with pytest.raises(RequestRefused, match=f"it is {kind}, and a call returns one value"):
            runtime.map(function, [1])


def test_exception_of_an_experiment_here_is_raised_unchanged(lab: Any) -> None:
    def fail(run: Any, variant: Any) -> None:
        raise lab.Small(variant)

    with pytest.raises(lab.Small) as raised:
        runtime.run_experiment(fail, 0)

    assert raised.value.__cause__ is None


def test_runs_here_have_folders_of_their_own(lab: Any) -> None:
    def place(run: Any, variant: Any) -> Path:
        return Path(run.output)

    first, second = (runtime.run_experiment(place, name="sac") for _ in range(2))

    assert first != second
    assert first.parent.parent == second.parent.parent
    assert first.parent.parent.name == "sac"


# jobs


def test_launched_function_returns_what_it_is_called_with(lab: Any) -> None:
    job = runtime.launch(lab.double, "local", args=[4])

    assert job.result(timeout=PATIENCE_S) == 8
    assert job.exception() is None
    assert repr(job) == f"<job {job.id[:10]} on local>"
    assert runtime.launch(lab.double, "local", args=[4]).id == job.id
    assert runtime.launch(lab.double, "local", args=[5]).id != job.id


def test_fields_of_a_job_file_stand_beside_the_function(lab: Any) -> None:
    job = runtime.launch(lab.double, "local", args=[4], name="twice", array={"count": 2}, env={"A": "b"})

    assert job.result(timeout=PATIENCE_S) == [8, 8]
    assert job.result(index=1) == 8
    assert job.entry().name == "twice"
    with pytest.raises(UnknownName, match="run"):
        job.result(index=2)


def test_field_that_no_job_file_has_is_refused(lab: Any) -> None:
    with pytest.raises(InvalidSpec, match=r"`resource` is no field here.*"):
        runtime.launch(lab.double, "local", args=[4], resource={})
    with pytest.raises(RequestRefused, match="`command` has no place beside a function"):
        runtime.launch(lab.double, "local", command=["true"])


def test_job_of_an_experiment_has_its_name(lab: Any) -> None:
    options = LaunchOptions(experiment="sweep")

    job = runtime.launch(["sh", "-c", "echo $RUNTIME_EXPERIMENT"], "local", name="tell", options=options)

    job.wait(timeout=PATIENCE_S)
    assert b"".join(job.logs()) == b"sweep\n"


def test_arguments_of_a_command_are_refused(lab: Any) -> None:
    with pytest.raises(RequestRefused, match="`args` and `kwargs` are those of a function"):
        runtime.launch(["echo"], "local", args=["x"])


def test_command_has_no_value(lab: Any) -> None:
    job = runtime.launch(["true"], "local", name="command")

    with pytest.raises(CallFailed, match="left no value: it runs a command"):
        job.result(timeout=PATIENCE_S)


def test_result_waits_no_longer_than_asked(lab: Any) -> None:
    job = runtime.launch(lab.hang, "local", args=[1])
    try:
        with pytest.raises(TimeoutError, match="after 50ms"):
            job.result(timeout="50ms")
    finally:
        job.cancel()
    with pytest.raises(CallFailed, match="ended without a value: cancelled"):
        job.result(timeout=PATIENCE_S)


def test_values_of_another_user_are_not_loaded(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.client.jobs import call_results

    job = runtime.launch(lab.pair_of, "local", args=[4])
    assert job.result(timeout=PATIENCE_S) == (4, {4})
    monkeypatch.setattr(call_results, "owner_name", lambda: "mallory")

    with pytest.raises(NotPossible, match="loading them could run code of theirs"):
        job.result()


def test_function_starts_in_the_folder_that_it_is_launched_from(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("deep").mkdir()
    Path("deep/file").touch()
    monkeypatch.chdir("deep")

    folder, home = runtime.launch(lab.where, "local").result(timeout=PATIENCE_S)

    assert (Path(folder).name, home) == ("deep", Path(folder).parent.name)


def test_secret_among_the_arguments_is_refused(lab: Any) -> None:
    with pytest.raises(InvalidSpec, match=r"`call` has a value for `api_key`, which looks like a secret"):
        runtime.launch(lab.double, "local", kwargs={"api_key": "sk-abcdefghijklmnopqrstuvwxyz123456"})


# tasks


def test_submitted_function_has_a_result(lab: Any, worker: Callable[[], None]) -> None:
    worker()
    named = runtime.submit(lab.double, args=[4])
    packed = runtime.submit(lambda: {1, 2})
    odd = runtime.submit(lab.double, args=[(1, {2})])
    many = runtime.submit([{"function": "lab_of_test:double", "args": [n]} for n in (5, 6)])

    assert named.result(timeout=PATIENCE_S) == 8
    assert named.logs() == "double 4\n"
    assert packed.result(timeout=PATIENCE_S) == {1, 2}
    assert odd.result(timeout=PATIENCE_S) == (1, {2}, 1, {2})
    assert many.result(timeout=PATIENCE_S) == [10, 12]
    assert named.exception() is None


def test_submitted_function_that_fails_says_so(lab: Any, worker: Callable[[], None]) -> None:
    worker()
    made = runtime.submit(lab.check, args=[0], max_failures=1)

    problem = made.exception(timeout=PATIENCE_S)

    assert isinstance(problem, CallFailed)
    with pytest.raises(CallFailed, match="0 is small"):
        made.result()


def test_submission_is_cancelled_and_waited_for_no_longer_than_asked(lab: Any) -> None:
    made = runtime.submit(lab.double, args=[4])

    with pytest.raises(TimeoutError, match="0 of 1 task ended in 20ms"):
        made.result(timeout="20ms")
    made.cancel()
    with pytest.raises(CancelledError):
        made.result(timeout=PATIENCE_S)


def test_packed_function_needs_the_snapshot(lab: Any) -> None:
    for snapshot in (False, "sha256:" + "0" * 64):
        with pytest.raises(NotPossible, match="is packed in the snapshot that goes with the task"):
            runtime.submit(lambda: 1, snapshot=snapshot)
    with pytest.raises(NotPossible, match="is packed in the snapshot"):
        runtime.map(lambda n: n, [1], target="queue:", snapshot=False)


def test_field_that_no_task_has_is_refused(lab: Any) -> None:
    with pytest.raises(UnknownName, match="`nodes`"):
        runtime.map(lab.double, [1], target="queue:", nodes=2)


def test_secret_among_arguments_of_tasks_is_refused(lab: Any) -> None:
    with pytest.raises(InvalidTask, match="looks like a secret"):
        runtime.submit(lab.double, kwargs={"api_key": "sk-abcdefghijklmnopqrstuvwxyz123456"})


# the worker


def test_worker_opens_the_queue_by_itself(lab: Any) -> None:
    made = runtime.submit(lab.double, args=[4])

    program = (
        "import runtime\nfrom datetime import timedelta\n"
        "print(runtime.run_worker(options=runtime.WorkerOptions(idle_timeout=timedelta(seconds=0.2))).succeeded)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert done.stdout == "1\n", done.stderr
    assert made.result() == 8


def test_calls_of_a_queue_run_in_the_environment_that_they_were_made_with(
    lab: Any, worker: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    Path("empty.txt").write_text("# nothing but Python\n")
    worker()
    given: dict[str, Any] = {"target": "queue:", "environment": "empty.txt"}

    fit = runtime.run_experiment(lab.fit, {"lr": 0.5}, name="sac", **given)
    odd = runtime.map(lab.pair_of, [1, (2, 3)], name="odd", **given)
    packed = runtime.map(lambda n: n, [1], name="packed", max_failures=1, **given)
    runs = runtime.submit(lab.where, environment="empty.txt")

    assert fit.result(timeout=PATIENCE_S) == ["sac", 0.5, "w", False]
    assert odd.results(timeout=PATIENCE_S) == [(1, {1}), ((2, 3), {(2, 3)})]
    assert runs.result(timeout=PATIENCE_S)[0].startswith(str(tmp_path / "tmp"))
    assert runs.logs().startswith("$ ") or runs.logs() == ""
    assert "was packed by cloudpickle, which" in str(packed[0].exception(timeout=PATIENCE_S))
    assert len(list((tmp_path / "tmp").glob("runtime-environments-*/*.*"))) == 1
    with pytest.raises(InvalidValue):
        runtime.map(lab.pair_of, [1], target="queue:", environment={"manager": "uv"})


# what people see


def test_task_is_shown_by_the_function_that_it_calls(lab: Any) -> None:
    from runtime.tasks import calls as names
    from runtime.tasks import entry_text
    from runtime.worker.attempts import calls

    assert f"{calls.__name__}:{calls.call_packed.__qualname__}" == names.CALL_PACKED
    assert f"{calls.__name__}:{calls.call_request.__qualname__}" == names.CALL_REQUEST
    runtime.run_experiment(lab.fit, {"lr": 0.5}, name="sac", target="queue:")
    runtime.map(lambda n: n, [1], name="odd", target="queue:")
    with runtime.open_stack() as stack:
        leases = stack.queue().lease(2, worker="w", ttl=timedelta(minutes=1))
        shown = {entry_text.describe_entry(lease.task.entry, width=200) for lease in leases}

    assert "lab_of_test:fit()" in shown
    assert any(each.endswith("<lambda>()") for each in shown)


def test_calls_in_a_queue_end_wherever_the_program_has_gone(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("runtime.toml").write_text(f'queue = "sqlite:{tmp_path}/own.db"\n')
    calls = runtime.map(lab.double, [1, 2], target="queue:")
    runtime.run_worker(options=runtime.WorkerOptions(idle_timeout="0.1s"))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)

    assert calls.results(timeout=PATIENCE_S) == [2, 4]
    assert calls[0].logs() == "double 1\n"


def test_values_have_their_types_on_every_target(lab: Any, target: str) -> None:
    calls = runtime.map(lab.pair_of, [1], target=target)

    assert calls.results(timeout=PATIENCE_S) == [(1, {1})]


def test_marker_of_a_pickle_that_a_function_returns_is_only_a_dictionary(lab: Any, target: str) -> None:
    marked = {"$runtime.pickle": "gASVDwAAAAAAAACMBXBvc2l4lIwEZXhpdJSTlC4="}

    assert runtime.map(lab.same, [marked], target=target).results(timeout=PATIENCE_S) == [marked]


def test_submitted_callable_that_its_module_has_not_under_its_name_is_the_one_that_runs(
    lab: Any, worker: Callable[[], None]
) -> None:
    worker()
    works = [lab.Trainer(0.5).scale, lab.Sub.make, lab.loud, lab.first]

    calls = [runtime.submit(work, args=[4]) for work in works]

    assert [each.result(timeout=PATIENCE_S) for each in calls] == [2.0, ["Sub", 4], [12], 12]
    with pytest.raises(RequestRefused, match="its module has something else under that name"):
        runtime.map_tasks(lab.Trainer(0.5).scale, [[1]], output=str)


CACHED = """
import functools, runtime

class Model:
    @functools.lru_cache
    def predict(self, x):
        return x + 1

def train(run, variant):
    return Model()

if __name__ == "__main__":
    print(runtime.run_experiment(train, 1, name="cached", target="local").result(timeout="10m").predict(2))
"""


def test_value_of_a_class_of_the_script_with_a_cached_method_comes_back(lab: Any) -> None:
    Path("script.py").write_text(CACHED)

    done = subprocess.run(
        [sys.executable, "script.py"], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )

    assert (done.stdout, done.returncode) == ("3\n", 0), done.stderr


def test_marker_that_a_submitted_function_returns_is_only_a_dictionary(lab: Any, worker: Callable[[], None]) -> None:
    worker()
    marked = {"$runtime.pickle": "gASVDwAAAAAAAACMBXBvc2l4lIwEZXhpdJSTlC4="}

    assert runtime.submit(lab.same, args=[marked]).result(timeout=PATIENCE_S) == marked


@pytest.mark.parametrize("target", ["local", "queue:"])
def test_again_makes_new_work(lab: Any, worker: Callable[[], None], target: str) -> None:
    if target == "queue:":
        worker()
    first = runtime.map(lab.token, [1], target=target).results(timeout=PATIENCE_S)

    assert runtime.map(lab.token, [1], target=target).results(timeout=PATIENCE_S) == first
    assert runtime.map(lab.token, [1], target=target, again=True).results(timeout=PATIENCE_S) != first


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_interrupt_of_a_map_here_ends_the_map(lab: Any, kind: type[BaseException]) -> None:
    def stop(n: int) -> None:
        raise kind

    with pytest.raises(kind):
        runtime.map(stop, [1, 2])


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ({"function": "os:system"}, InvalidValue),
        ({"function": None}, InvalidValue),
        ({"target": None}, InvalidValue),
        ({"target": ""}, InvalidValue),
        ({"name": "../../x"}, InvalidValue),
        ({"name": "a/b"}, InvalidValue),
        ({"name": "x\0y"}, InvalidValue),
    ],
)
def test_call_of_nothing_that_could_run_is_refused(lab: Any, words: dict[str, Any], error: type[Exception]) -> None:
    given = {"function": lab.double, "items": [1], "target": "here", **words}
    function, items = given.pop("function"), given.pop("items")

    with pytest.raises(error):
        runtime.map(function, items, **given)
    with pytest.raises(error):
        runtime.run_experiment(function, 1, **given)


@pytest.mark.parametrize("target", [each for each in TARGETS if each != "here"], indirect=True)
def test_results_show_the_parameters_of_variants_that_json_lacks(
    lab: Any, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    variants: list[Any] = [{"lr": 0.5, "shape": (2, 3)}, {"lr": float("nan")}]
    calls = runtime.map(lab.fit, variants, name="odd", target=target)
    one = runtime.run_experiment(lab.fit, variants[0], name="one", target=target)
    assert calls[0].result(timeout=PATIENCE_S) == ["odd", 0.5, "w", False]
    one.result(timeout=PATIENCE_S)
    again = runtime.map(lab.fit, variants, name="odd", target=target)
    assert again[0].result(timeout=PATIENCE_S) == ["odd", 0.5, "w", False]
    assert calls[1].exception(timeout=PATIENCE_S) is None
    capsys.readouterr()

    found = []
    for name in ("odd", "one"):
        assert main(["results", name, "-o", "json"]) == 0
        found.append([each["params"] for each in json.loads(capsys.readouterr().out)])

    shown = {"lr": 0.5, "shape": [2, 3]}
    assert found == [[shown, {"lr": "nan"}], [shown]]


@pytest.mark.parametrize("target", ["local", "queue:"])
def test_secret_in_a_variant_that_json_lacks_is_refused(lab: Any, target: str) -> None:
    variant = {"password": "hunter2hunter2", "shape": (1, 2)}

    with pytest.raises((InvalidSpec, InvalidTask)) as refused:
        runtime.map(lab.same, [variant], target=target)

    assert "password" in refused.value.render()
    assert "hunter2" not in refused.value.render()


@pytest.mark.parametrize("target", [each for each in TARGETS if each != "here"], indirect=True)
def test_function_that_exits_returns_none_or_fails_with_its_text(lab: Any, target: str) -> None:
    once = {"max_failures": 1} if target == "queue:" else {}
    calls = runtime.map(lab.leave, [0, None, "no data"], target=target, **once)
    stopped = runtime.map(lab.interrupt, [[], ["by hand"]], target=target, **once)

    assert [calls[0].result(timeout=PATIENCE_S), calls[1].result(timeout=PATIENCE_S)] == [None, None]
    failed = [calls[2].exception(timeout=PATIENCE_S), *(each.exception(timeout=PATIENCE_S) for each in stopped)]
    assert [type(each) for each in failed] == [CallFailed] * 3
    for problem, said in zip(failed, ("no data", "KeyboardInterrupt", "KeyboardInterrupt: by hand"), strict=True):
        assert str(problem).splitlines()[0].endswith(said)


@pytest.mark.parametrize("target", ["here", "queue:", "queue:big"])
def test_launch_on_what_is_no_target_of_jobs_says_what_takes_it(lab: Any, target: str) -> None:
    with pytest.raises(RequestRefused, match="is no target of jobs") as refused:
        runtime.launch(lab.double, target, args=[1])

    assert "runtime.map" in (refused.value.hint or "")


def test_end_of_a_job_without_a_value_says_how_its_process_ended(lab: Any) -> None:
    with pytest.raises(CallFailed, match="app_failed, exit code 3"):
        runtime.map(lab.leave, [3], target="local").results(timeout=PATIENCE_S)


def test_packed_call_of_a_packed_call_goes_through(lab: Any, worker: Callable[[], None]) -> None:
    Path(".runtime-calls").write_text("{}")
    worker()

    assert runtime.map(lambda n: n + 1, [1], target="queue:").results(timeout=PATIENCE_S) == [2]


def test_cancelled_calls_of_a_queue_are_told_of_whether_they_wait_or_run(
    lab: Any, worker: Callable[[], None], tmp_path: Path
) -> None:
    told = tmp_path / "told"
    Path("runtime.toml").write_text(f"[notify.log]\ncommand = ['sh', '-c', 'printf \"%s\\n\" \"$(cat)\" >> {told}']\n")
    calls = runtime.map(lab.hang, [1, 2, 3], name="slow", target="queue:", notify="log", notify_on="cancelled,complete")
    unheard = runtime.map(lab.hang, [4], name="slow", target="queue:")
    worker()
    assert wait_until(lambda: calls[0].logs() == "hangs\n")

    calls[2].cancel()
    assert main(["cancel", "--yes", "slow"]) == 0

    def heard() -> list[dict[str, Any]]:
        return [json.loads(line) for line in told.read_text().splitlines() if line] if told.exists() else []

    assert wait_until(lambda: len(heard()) >= 4)
    ends = {each["task"]: each["state"] for each in heard() if "task" in each}
    assert len(heard()) == 4
    assert list(ends.values()) == ["cancelled"] * 3
    assert [each["counts"] for each in heard() if "counts" in each] == [{"cancelled": 4}]
    assert wait_until(unheard[0].done)


def test_calls_of_a_queue_tell_a_sink_of_the_settings_of_their_ends_and_that_all_have_ended(
    lab: Any, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    Path("runtime.toml").write_text(f"[notify.log]\ncommand = ['sh', '-c', 'printf \"%s\\n\" \"$(cat)\" >> {told}']\n")
    calls = runtime.map(lab.double, [1, 2], target="queue:", notify="log", notify_on=["succeeded", "complete"])

    runtime.run_worker(options=runtime.WorkerOptions(idle_timeout="0.1s"))

    assert calls.results(timeout=PATIENCE_S) == [2, 4]
    heard = [json.loads(line) for line in told.read_text().splitlines() if line]
    assert sorted("task" in each for each in heard) == [False, True, True]
    assert [each["counts"] for each in heard if "counts" in each] == [{"succeeded": 2}]
    with pytest.raises(UnknownName, match="no sink named `lag`"):
        runtime.map(lab.double, [3], target="queue:", notify="lag")
