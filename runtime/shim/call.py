"""Calls a Python function in an attempt of a job: a program of its own, which the shim starts with the job's Python.

    python call.py call.json
    python call.pyc call.bin        both made by the Python that runs them

It needs nothing but the standard library of any Python from 3.6 on, and cloudpickle where the function was packed by it. What
the function returns or raises becomes the file `value` of the attempt: a line of JSON about it, and then JSON or a pickle.
Only `.result()` of the job's owner loads a pickle.
"""

import importlib
import io
import itertools
import os
import sys

# A short call takes as long as its imports, so the others are made on use.

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any, Callable, Dict, List, Optional, Tuple

PROGRAM = "runtime.shim.call"
"""The name by which its own process knows this program, whose module is `__main__` there."""
SETUP_FAILED = "setup_failed"
"""As in `runtime.shim.ranks`, which this program does without."""
VALUE = "value"
OF_LINES = ("at", "step", "of")
"""Names in a line of reports that are about the line: its time, its step, and how many steps there will be."""
VALUE_SCHEMA = 1
PROTOCOL = 4
"""Pickle protocol: the newest that Python 3.6 reads."""
IDS = (
    *("RUNTIME_JOB_ID", "RUNTIME_TASK_ID", "RUNTIME_ATTEMPT_TOKEN"),
    *("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "RAY_JOB_ID", "HOSTNAME"),
)
"""Variables by which we and backends name what runs."""
NO_GPUS = ("-1", "all", "none", "void", "NoDevFiles")
"""Values of variables that name no GPU. Images for GPUs set `all`, also on machines that have none."""
MOST_BITS = 14000
"""Most digits of an integer in JSON; Python reads 4,300."""
MOST_TEXT = 100000
"""Letters of a traceback and of a message that are kept."""


class IncompatibleFunction(Exception):
    """A function that cannot be called by this Python, for a reason that no retry changes."""


class NoJson(Exception):
    """A returned value that a plain task of a queue cannot keep."""


class Run(object):
    """The run that a function is called in, the same on every target; also what `runtime.current_attempt` is made of."""

    def __init__(
        self,
        name: str,
        variant: "Any",
        folders: "Dict[str, str]",
        index: int = 0,
        attempt: int = 1,
        argv: "Optional[List[str]]" = None,
    ) -> None:
        """`folders` are `output`, `checkpoint` and the file `metrics`; `argv` is None if the file of `RUNTIME_ORIGIN` has it."""
        self.name, self.variant = name, variant
        self.index, self.attempt = index, attempt
        self._folders, self._asked, self._looks = folders, False, False
        self._reports = None  # type: Optional[ReportFile]
        self._argv, self._origin = argv, None  # type: Optional[List[str]], Optional[Dict[str, Any]]

    def __repr__(self) -> str:
        return "<run %d of %s, attempt %d>" % (self.index, self.name, self.attempt)

    # where it comes from, and where it is

    @property
    def argv(self) -> "List[str]":
        """The command line of the program that launched or submitted it, without arguments that look like secrets."""
        return list(self._find_origin().get("argv") or () if self._argv is None else self._argv)

    @property
    def git(self) -> "List[Dict[str, Any]]":
        """The git repositories of its code, as they were when it was launched or submitted."""
        return list(self._find_origin().get("git") or ())

    @property
    def ids(self) -> "Dict[str, str]":
        """Its ids, ours and the backend's, by the names of variables."""
        own = {name: os.environ[name] for name in IDS if name in os.environ}
        return dict(self._find_origin().get("ids") or {}, **own)

    @property
    def gpus(self) -> "List[str]":
        """The ids of its GPUs; empty if it has none."""
        for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
            given = [each.strip() for each in os.environ.get(name, "").split(",")]
            if given != [""]:
                return [] if given[0] in NO_GPUS else given
        return []

    def _find_origin(self) -> "Dict[str, Any]":
        if self._origin is None:
            self._origin = self._read_origin()
        return self._origin

    def _read_origin(self) -> "Dict[str, Any]":
        import json

        try:
            with io.open(os.environ["RUNTIME_ORIGIN"], encoding="utf-8") as opened:
                found = json.load(opened)
        except (KeyError, OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    # folders

    @property
    def output(self) -> "Path":
        """The attempt's own folder for results; made on first use."""
        return self._folder("output")

    @property
    def checkpoint(self) -> "Path":
        """A folder that all attempts of the run share; made on first use."""
        return self._folder("checkpoint")

    def _folder(self, name: str) -> "Path":
        from pathlib import Path

        path = Path(self._folders[name])
        path.mkdir(parents=True, exist_ok=True)
        return path

    # stopping

    def should_stop(self) -> bool:
        """Whether the function should save a checkpoint and return soon."""
        self._looks = True
        return self._asked

    def ask_to_stop(self, *_: object) -> None:
        self._asked = True

    def stop(self, *_: object) -> None:
        """Ask a function that has looked whether to stop, and end any other."""
        self._asked = True
        if not self._looks:
            raise SystemExit("stopped by SIGTERM")

    # reports

    def report(self, step: "Optional[float]" = None, **numbers: float) -> None:
        """Keep numbers by their names, at a step if there is one: a line of JSON in the file that `RUNTIME_METRICS` names."""
        self._keep(numbers, step)

    def progress(
        self, done: float, total: "Optional[float]" = None, text: "Optional[str]" = None, **numbers: float
    ) -> None:
        """Report that step `done` of `total` is reached, and numbers as `report` does. `text` is shown if a person watches."""
        self._keep(numbers, done, total)

    def _keep(self, numbers: "Dict[str, float]", step: "Optional[float]" = None, of: "Optional[float]" = None) -> None:
        if self._reports is None:
            self._reports = ReportFile(self._folders["metrics"])
        self._reports.add(numbers, step, of)


def to_number(name: str, value: "Any") -> float:
    """The number to keep, infinite beyond the range of floats. Raises what `float` does, with the number's name."""
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
    except (TypeError, ValueError) as problem:
        raise type(problem)("`%s` is %.100r, which is no number" % (name, value)) from None


class ReportFile(object):
    """Adds lines to the file of an attempt's reports; made on first use, and kept open."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._opened = -1

    def add(self, numbers: "Dict[str, Any]", step: "Optional[float]" = None, of: "Optional[float]" = None) -> None:
        """Add a line by one write, so that those of several processes do not mix. Raises `ValueError` for a name that is
        taken, and `TypeError` or `ValueError` for a value that is not a number."""
        import json
        import time

        line = {name: to_number(name, number) for name, number in numbers.items()}
        for name in OF_LINES:
            if name in line:
                raise ValueError("no metric can be called `%s`, which each report has for itself" % name)
        line["at"] = round(time.time(), 3)
        if step is not None:
            line["step"] = to_number("step", step)
        if of is not None:
            line["of"] = to_number("of", of)
        if self._opened < 0:
            os.makedirs(os.path.dirname(os.path.abspath(self.path)), exist_ok=True)
            self._opened = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        os.write(self._opened, json.dumps(line).encode("ascii") + b"\n")

    def __del__(self) -> None:
        if self._opened >= 0:
            os.close(self._opened)


# values


def is_json(value: "Any", finite: bool = True) -> bool:
    """Whether JSON gives back an equal value of the same types: no tuple, no key that is no text, no integer of more digits
    than Python reads, and nothing that contains itself. Python's JSON also has NaN and infinities, if not `finite`."""
    try:
        return _is_json(value, finite)
    except RecursionError:
        return False


def _is_json(value: "Any", finite: bool) -> bool:
    kind = type(value)
    if value is None or kind in (str, bool):
        return True
    if kind is int:
        return bool(value.bit_length() <= MOST_BITS)
    if kind is float:
        return bool(not finite or value - value == 0)
    if kind is list:
        return all(map(_is_json, value, itertools.repeat(finite)))
    return kind is dict and all(type(key) is str and _is_json(each, finite) for key, each in value.items())


def dump(value: "Any") -> bytes:
    """A pickle of `value`; with cloudpickle, if there is one, of what the standard library cannot pickle."""
    import pickle

    try:
        return pickle.dumps(value, protocol=PROTOCOL)
    except Exception:
        try:
            cloudpickle = importlib.import_module("cloudpickle")
        except ImportError:
            cloudpickle = None
        if cloudpickle is None:
            raise

        class ResultPickler(cloudpickle.CloudPickler):  # type: ignore[name-defined,misc]
            def reducer_override(self, found: "Any") -> "Any":
                return reduce_cached(found) or super().reducer_override(found)

        buffer = io.BytesIO()
        ResultPickler(buffer, protocol=PROTOCOL).dump(value)
        return buffer.getvalue()


def reduce_cached(found: "Any") -> "Any":
    """How a cached function that no module has under its name is pickled: with what it caches; None for anything else."""
    import functools

    if not isinstance(found, functools._lru_cache_wrapper):
        return None
    named = sys.modules.get(found.__module__)  # type: Any
    for part in found.__qualname__.split("."):
        named = getattr(named, part, None)
    if named is found and found.__module__ != "__main__":
        return None
    made = found.cache_parameters()
    return functools._lru_cache_wrapper, (found.__wrapped__, made["maxsize"], made["typed"], _CacheInfo()), vars(found)


class _CacheInfo(object):
    """Stands for a class of `functools` that does not have the name that it says."""

    def __reduce__(self) -> "Any":
        return getattr, (importlib.import_module("functools"), "_CacheInfo")


def encode_value(value: "Any") -> bytes:
    """The file of a returned value. Raises what pickling it raises."""
    try:
        if is_json(value, finite=False):
            return _join("json", _write_json(value).encode("utf-8"))
    except (RecursionError, ValueError):  # too deep, half a letter, or more digits than Python writes
        pass
    return _join("pickle", dump(value), type=_name_of(type(value)))


_SPELLED = {"None": "null", "True": "true", "False": "false", "nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def _write_json(value: "Any") -> str:
    if value is None or type(value) in (bool, int, float):
        text = repr(value)
        return _SPELLED.get(text, text)
    import json

    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def encode_plain(value: "Any") -> bytes:
    """The file of a value that has to be JSON, as JSON spells it: a tuple is a list. Raises `NoJson`."""
    import json

    try:
        return _join(
            "json", json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
        )
    except (TypeError, ValueError, RecursionError) as problem:
        raise NoJson(
            "the function returned %s, which is no JSON value: %s; return plain numbers, texts, lists and dicts, and write the "
            "rest to the output folder" % (type(value).__qualname__, problem)
        )


def encode_failure(problem: BaseException, told: str) -> bytes:
    """The file of a raised exception, whose traceback is `told`: a pickle, one of its parts if it cannot be made again of its
    arguments, as is common where `__init__` takes others, and else text. One that ends a program, such as `SystemExit`,
    must not end the program that asks for the value, so it is text, too."""
    import pickle

    said = {"type": _name_of(type(problem)), "message": _text_of(problem)[:MOST_TEXT], "traceback": told[-MOST_TEXT:]}
    if not isinstance(problem, Exception):
        return _join("text", b"", raised=True, **said)
    try:
        body = dump(problem)
        if type(pickle.loads(body)) is type(problem):
            return _join("pickle", body, raised=True, **said)
    except Exception:
        pass
    try:
        return _join("parts", dump((type(problem), problem.args, problem.__dict__)), raised=True, **said)
    except Exception:
        return _join("text", b"", raised=True, **said)


def _join(form: str, body: bytes, **more: "Any") -> bytes:
    head = '{"form": "%s", "python": "%d.%d", "schema": %d' % ((form,) + sys.version_info[:2] + (VALUE_SCHEMA,))
    if more:
        import json

        head += ", " + json.dumps(more, sort_keys=True)[1:-1]
    return (head + "}\n").encode("ascii") + body


def _name_of(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else "%s.%s" % (kind.__module__, kind.__qualname__)


def _text_of(problem: BaseException) -> str:
    try:
        return str(problem)
    except Exception:
        return "<no text>"


# signals

_kept_from_forks = {}  # type: Dict[int, Any]
"""The handlers that processes forked by this one do not have, by their signals."""


def handle(number: int, handler: "Any") -> None:
    """Set a handler of this process alone. Processes that Python forks take the signal as if it had not been set, such as those
    of a pool, which it ends by SIGTERM. Python loses one that comes right after the fork, so it is held up until then."""
    import signal

    signal.signal(number, handler)
    at_fork = getattr(os, "register_at_fork", None)  # from Python 3.7 on
    if at_fork is not None and not _kept_from_forks:
        masks = {}  # type: Dict[int, Any]
        get_ident = importlib.import_module("_thread").get_ident

        def before() -> None:
            masks[get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, list(_kept_from_forks))

        def in_parent() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop(get_ident()))

        def in_child() -> None:
            for each, ours in _kept_from_forks.items():
                if signal.getsignal(each) == ours:
                    signal.signal(each, signal.SIG_DFL)
            mask = masks.pop(get_ident())
            masks.clear()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

        at_fork(before=before, after_in_parent=in_parent, after_in_child=in_child)
    _kept_from_forks[number] = handler


# the call


def load(request: "Dict[str, Any]") -> "Callable[..., Any]":
    """The function to call. Raises `IncompatibleFunction`, and what importing its module raises."""
    packed = request.get("pickled")
    if packed is None:
        module, _, name = request["function"].partition(":")
        try:
            found = importlib.import_module(module)  # type: Any
            for part in name.split("."):
                found = getattr(found, part)
            return found  # type: ignore[no-any-return]
        except AttributeError:
            raise IncompatibleFunction("module %s has no function %s" % (module, name))
        except ImportError as problem:
            if problem.name and (module + ".").startswith(problem.name + "."):
                raise IncompatibleFunction("no module %s in %s" % (module, os.getcwd()))
            raise
    check_python(packed)
    return unpack(packed["function"])  # type: ignore[no-any-return]


def check_python(packed: "Dict[str, Any]") -> None:
    """Raise `IncompatibleFunction` unless this Python can load what was packed: its code is that of one minor version."""
    here = "%d.%d" % sys.version_info[:2]
    if packed["python"] != here:
        raise IncompatibleFunction(
            "the function was packed by Python %s, whose code %s (%s) cannot run: "
            "launch from the same version, name another `python`, or move the function into a module"
            % (packed["python"], sys.executable, here)
        )
    try:
        importlib.import_module("cloudpickle")
    except ImportError:
        raise IncompatibleFunction(
            "the function was packed by cloudpickle, which %s does not have: pip install cloudpickle==%s there, or move the "
            "function into a module" % (sys.executable, packed["cloudpickle"])
        )


def load_arguments(request: "Dict[str, Any]") -> "Tuple[List[Any], Dict[str, Any]]":
    """Positional and named arguments; the item of an array comes first."""
    args, kwargs = request["args"], request["kwargs"]
    items = [request["item"]] if "item" in request else []
    if request["packed"]:
        items = [unpack(each) for each in items]
        if args:
            args, kwargs = unpack(args[0])
    return items + list(args), kwargs


def unpack(packed: "Any") -> "Any":
    """The value of a pickle in base64, or of an object that has it in `pickle`, beside what people see of it."""
    import base64
    import pickle

    return pickle.loads(base64.b64decode(packed["pickle"] if isinstance(packed, dict) else packed))


def make_run(request: "Dict[str, Any]", variant: "Any", environ: "Dict[str, str]") -> Run:
    folders = {
        "output": environ["RUNTIME_OUTPUT_DIR"],
        "checkpoint": environ.get("RUNTIME_CHECKPOINT_DIR") or "checkpoints",
        "metrics": environ["RUNTIME_METRICS"],
    }
    run = Run(
        environ.get("RUNTIME_EXPERIMENT") or request["name"],
        variant,
        folders,
        index=int(request.get("number") or environ.get("RUNTIME_ARRAY_INDEX") or 0),
        attempt=int(environ["RUNTIME_ATTEMPT"]),
        argv=request.get("argv"),
    )
    for name in request.get("signals") or ():
        import signal

        handle(getattr(signal, name), run.ask_to_stop)
    return run


def read_request(path: str) -> "Dict[str, Any]":
    with io.open(path, "rb") as opened:
        content = opened.read()
    if path.endswith(".bin"):
        import marshal

        return marshal.loads(content)  # type: ignore[no-any-return]
    import json

    return json.loads(content.decode("utf-8"))  # type: ignore[no-any-return]


current = None  # type: Optional[Run]
"""The run of this program; `runtime.worker.attempts.context` finds it here."""


def main(path: str) -> int:
    global current
    request = read_request(path)
    # This file's own folder has nothing to import.
    sys.path[:1] = [os.path.abspath(each) for each in request["paths"]]
    sys.path += request.get("last_paths") or []
    os.environ.update(request.get("variables") or {})
    if os.path.isdir(request["folder"]):
        os.chdir(request["folder"])
    folder, keep = request["attempt"], os.environ["RUNTIME_RANK"] == "0"
    try:
        function = load(request)
        args, kwargs = load_arguments(request)
    except IncompatibleFunction as problem:
        return refuse(folder, str(problem))
    except Exception as problem:
        # A module that fails as it is imported is the user's own code.
        return fail(folder, problem, keep)
    run = None  # type: Optional[Run]
    if request.get("run"):
        run = make_run(request, args[0] if args else None, dict(os.environ))
        args = [run] + args
    elif request.get("task"):
        run = Run(request["name"], None, {}, index=int(request.get("number") or 0), argv=request.get("argv"))
    current = run
    if request.get("task"):
        # As in the worker's own Python, where `runtime.current_attempt` looks too.
        import functools
        import signal

        assert run is not None
        handler = functools.partial(run.stop)
        handler.gives_way = True  # type: ignore[attr-defined]
        handle(signal.SIGTERM, handler)
    try:
        value = find_value(function, args, kwargs)
        content = (encode_plain if request.get("plain") else encode_value)(value) if keep else b""
    except SystemExit as ended:
        if isinstance(ended.code, str):
            leave(folder, ended, "", keep)
        raise
    except BaseException as problem:
        return fail(folder, problem, keep)
    if keep:
        try:
            write(os.path.join(folder, VALUE), content)
        except OSError as problem:
            sys.stderr.write("error: the value of %d bytes cannot be written: %s\n" % (len(content), problem))
            return 1
    return 0


def find_value(function: "Callable[..., Any]", args: "List[Any]", kwargs: "Dict[str, Any]") -> "Any":
    """Return the function's value; None if it exits with success."""
    try:
        return function(*args, **kwargs)
    except SystemExit as ended:
        if ended.code in (None, 0):
            return None
        raise


def refuse(folder: str, message: str) -> int:
    sys.stderr.write("error: %s\n" % message)
    write(os.path.join(folder, SETUP_FAILED), message.encode("utf-8", "replace"))
    return 1


def fail(folder: str, problem: BaseException, keep: bool) -> int:
    import traceback

    frames = problem.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == fail.__code__.co_filename:
        frames = frames.tb_next
    told = "".join(traceback.format_exception(type(problem), problem, frames))
    sys.stderr.write(told)
    leave(folder, problem, told, keep)
    return 1


def leave(folder: str, problem: BaseException, told: str, keep: bool) -> None:
    """Leave the file of a raised exception, if the rank keeps one."""
    if keep:
        try:
            write(os.path.join(folder, VALUE), encode_failure(problem, told))
        except OSError as refused:
            sys.stderr.write("error: the exception cannot be written: %s\n" % refused)


def write(path: str, content: bytes) -> None:
    """Write a file that is seen whole or not at all."""
    beside = "%s.%d" % (path, os.getpid())
    try:
        with io.open(beside, "wb") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())
        os.rename(beside, path)
    except OSError:
        if os.path.exists(beside):
            os.unlink(beside)  # it would keep a full disk full, and the end of the attempt could not be noted
        raise


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
