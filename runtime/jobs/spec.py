"""Job specs: the command and needs of a job, as one value with one meaning on every backend.

The same fields are a YAML file, a Python value and the flags of `runtime launch`. `parse_spec` reports all problems of a
file at once; `encode_spec` is canonical, so equal specs have equal text and the job's id can be a hash.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import StrEnum
from typing import Any, Final

from runtime.errors import RequestRefused
from runtime.jobs.artifacts import check_artifacts
from runtime.jobs.call import FunctionCall, check_json
from runtime.jobs.params import ParamValues, read_values
from runtime.jobs.size_ranges import Range
from runtime.schema import NO_FIELD, Problem, Size, describe, json_schema, read_record
from runtime.secret_detection import is_secret, looks_secret
from runtime.shim.common import NOTIFY
from runtime.tasks.container import Mount
from runtime.tasks.notification_sinks import Sink, named_schema
from runtime.units import format_duration, format_size

MAX_INDICES: Final = 100_000
MAX_RANKS: Final = 100_000
MAX_CODE: Final = Size(100 * 1024 * 1024)
LOG_LIMIT: Final = Size(1024**3)
LEAST_LOG: Final = Size(64 * 1024)
# Patterns for fields that few jobs have are compiled on use.
_NAME: Final = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_VARIABLE: Final = r"[A-Za-z_][A-Za-z0-9_]*"


class JobState(StrEnum):
    """`pending → running → succeeded | failed | cancelled`; a retry goes back to `pending`."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"
    """The target does not answer; nothing is concluded from that."""

    @property
    def terminal(self) -> bool:
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


class InvalidSpec(RequestRefused):
    """A job spec that cannot be launched anywhere; `problems` has all that is wrong with it."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.source, self.problems = source, tuple(problems)
        first = problems[0]
        if len(problems) == 1:
            super().__init__(
                f"the job spec of {source} cannot be used: `{first.path or 'spec'}` {first.message}",
                hint=first.hint or "`runtime launch --help` and docs/jobs.md say what each field may be",
            )
        else:
            super().__init__(
                f"the job spec of {source} cannot be used: {len(problems)} fields are wrong",
                facts=[str(each) for each in problems],
                hint="docs/jobs.md says what each field may be",
            )


class CodeMode(StrEnum):
    SNAPSHOT = "snapshot"
    """The work tree as it is at launch, by content id."""
    IMAGE = "image"
    """The code in the image."""
    NONE = "none"
    """The live tree, wherever the command finds it: later edits change what runs."""


class EnvironmentManager(StrEnum):
    NONE = "none"
    UV = "uv"
    PIP = "pip"
    CONDA = "conda"
    FROZEN = "frozen"
    """The packages of the Python that launches, in their versions."""


class BuildOn(StrEnum):
    SUBMIT = "submit"
    NODE = "node"


class GangPolicy(StrEnum):
    FAIL_FAST = "fail-fast"
    """One rank's end ends the attempt of all."""
    RESTART = "restart"
    """The same, and all start again together, paid by the budget of the first that failed."""


class PackPer(StrEnum):
    NODE = "node"
    GPU = "gpu"


class OnTaskFailure(StrEnum):
    CONTINUE = "continue"
    STOP = "stop"


class Priority(StrEnum):
    LOW = "low"
    NORMAL = "normal"
    HIGH = "high"
    URGENT = "urgent"


class CheckpointSignal(StrEnum):
    USR1 = "USR1"
    USR2 = "USR2"
    TERM = "TERM"
    INT = "INT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    mode: CodeMode = CodeMode.SNAPSHOT
    path: str = "."
    """Folder of the tree, relative to the spec's file."""
    exclude: tuple[str, ...] = ()
    """Further lines of .runtimeignore."""
    secrets: tuple[str, ...] = ()
    """Files that look like secrets and are meant to go in, by name."""
    max_size: Size = MAX_CODE
    writable: bool = True
    """Each attempt has a tree of its own; false lets the attempts of a machine share one that is read-only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnvironment:
    manager: EnvironmentManager = EnvironmentManager.NONE
    lock: str | None = None
    """Lock file in the tree; the environment is keyed by its hash and made once."""
    extras: tuple[str, ...] = ()
    """Extras of the project for uv; for a frozen list, packages with versions that come before those of the list."""
    python: str | None = None
    """Minor version of the Python that uv or pip installs for, such as 3.11; None is the lock file's, or the machine's."""
    name: str | None = None
    """An existing environment: a conda name, or the path of a virtual environment."""
    setup: tuple[str, ...] = ()
    """Lines of shell that run before the command, after the target's own."""
    build_on: BuildOn | None = None
    """Where it is made; the target decides by default, since nodes may have no network."""

    def __post_init__(self) -> None:
        if self.python is not None and not re.fullmatch(r"3\.[0-9]{1,2}", self.python):
            raise ValueError(
                f"has `python` {describe(self.python)}, expected a minor version in quotes, such as '3.11'"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretRef:
    name: str
    """Variable that carries it."""
    source: str
    """`SCHEME://REST`, never the value. Every target has `secret-manager://NAME` of the stack, and `file://PATH` and `env://NAME`
    of the launching machine; some have more, such as `kubernetes://SECRET/KEY`."""

    def __post_init__(self) -> None:
        if not re.fullmatch(_VARIABLE, self.name):
            raise ValueError(f"has `name` {describe(self.name)}, expected the name of a variable")
        if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\0\n]+", self.source):
            # It may be the value itself, so it is not repeated.
            raise ValueError(
                "has a `source` that is no reference, expected SCHEME://REST, such as secret-manager://NAME, file://PATH or "
                "env://NAME"
            )

    @property
    def scheme(self) -> str:
        return self.source.partition("://")[0]

    @property
    def place(self) -> str:
        """The source without its scheme."""
        return self.source.partition("://")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    count: float
    """CPUs of each node; below 1 a part of one."""
    type: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.count < math.inf or (self.count > 1 and self.count != int(self.count)):
            raise ValueError(f"has `count` {self.count:g}, expected whole GPUs, or a part of one such as 0.25")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tpu:
    type: str
    """A slice by its type, such as `v4-8`; a run has a node on each host of the slice."""
    slices: int = 1
    """Slices of that type in each run, all at once."""

    def __post_init__(self) -> None:
        if not 1 <= self.slices <= MAX_RANKS:
            raise ValueError(f"has `slices` {self.slices}, expected 1 to {MAX_RANKS}")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResources:
    """Resources of each node; a field that is left out has the target's default."""

    cpus: float | None = None
    memory: Range | None = None
    gpus: Gpus | None = None
    tpu: Tpu | None = None
    disk: Range | None = None
    shared_memory: Size | None = None

    def __post_init__(self) -> None:
        if self.cpus is not None and not 0 < self.cpus < math.inf:
            raise ValueError(f"has `cpus` {self.cpus:g}, expected more than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gang:
    policy: GangPolicy = GangPolicy.FAIL_FAST
    start_timeout: timedelta = timedelta(minutes=5)
    """How long the first rank waits for the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Array:
    """N runs of one command. Exactly one of `count`, `params`, `file`, `seeds` and `items` says which."""

    count: int | None = None
    params: Mapping[str, ParamValues] = field(default_factory=dict)
    """Name → values, as a list or as `--grid` has them; every combination is an index, the last name varying fastest."""
    file: str | None = None
    """JSON lines, one object of parameters for each index; relative to the spec's file."""
    seeds: int | None = None
    """The same as `count`, with the index in the parameter `seed` and the variable `SEED`."""
    items: tuple[Any, ...] = ()
    """For a `call`, the function's first argument in each run."""
    offset: int = 0
    """The first index."""
    max_parallel: int | None = None
    pack: int | None = None
    """How many runs share a node, or a GPU, at a time."""
    pack_per: PackPer = PackPer.NODE
    on_task_failure: OnTaskFailure = OnTaskFailure.CONTINUE

    def __post_init__(self) -> None:
        ways = ("count", "params", "file", "seeds", "items")
        given = [name for name in ways if getattr(self, name) not in (None, {}, ())]
        if len(given) != 1:
            raise ValueError(
                f"has {' and '.join(given) or 'none'} of `count`, `params`, `file`, `seeds` and `items`, expected exactly one"
            )
        for name in ("count", "seeds", "max_parallel", "pack"):
            amount = getattr(self, name)
            if amount is not None and not 1 <= amount <= MAX_INDICES:
                raise ValueError(f"has `{name}` {amount}, expected 1 to {MAX_INDICES}")
        if self.offset < 0:
            raise ValueError(f"has `offset` {self.offset}, expected 0 or more")
        if any(isinstance(values, str) for values in self.params.values()):
            object.__setattr__(self, "params", {name: read_values(name, each) for name, each in self.params.items()})
        if empty := [name for name, values in self.params.items() if not values]:
            raise ValueError(f"has no values for `params.{empty[0]}`")
        for name, values in self.params.items():
            check_json(f"params.{name}", values)
        check_json("items", self.items)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    on: tuple[str, ...] = ()
    """Targets; the first that accepts is taken when the job is launched."""
    capacity: str | None = None
    """`spot`, `on-demand`, `auto` or `reservation:NAME`"""
    nodes: tuple[str, ...] = ()
    """Only these nodes, by name."""
    exclude: tuple[str, ...] = ()
    """Not these nodes."""
    selector: Mapping[str, str] = field(default_factory=dict)
    """Labels or features that a node must have."""

    def __post_init__(self) -> None:
        fixed = ("spot", "on-demand", "auto")
        if self.capacity and self.capacity not in fixed and not re.fullmatch(r"reservation:.+", self.capacity):
            raise ValueError(
                f"has `capacity` {describe(self.capacity)}, expected {', '.join(fixed)} or reservation:NAME"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityRetry:
    window: timedelta = timedelta(hours=24)
    """How long a lack of capacity or quota is waited out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    min: timedelta = timedelta(seconds=30)
    max: timedelta = timedelta(minutes=10)

    def __post_init__(self) -> None:
        if self.min > self.max:
            raise ValueError(f"has `min` {format_duration(self.min)} above `max` {format_duration(self.max)}")


class OnExit(StrEnum):
    """What an exit code of the command means, where it means something."""

    REQUEUE = "requeue"
    """Again, and no budget pays."""
    FAIL = "fail"
    """Never again."""
    SUCCEED = "succeed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    failure: int = 0
    preemption: int = 100
    capacity: CapacityRetry = CapacityRetry()
    on_exit: Mapping[str, OnExit] = field(default_factory=dict)
    """Exit code → `requeue`, `fail` or `succeed`."""
    backoff: Backoff = Backoff()

    def __post_init__(self) -> None:
        for name in ("failure", "preemption"):
            if getattr(self, name) < 0:
                raise ValueError(f"has `{name}` {getattr(self, name)}, expected 0 or more")
        for code in self.on_exit:
            if not code.isdecimal() or not 0 <= int(code) <= 255:
                raise ValueError(f"has the exit code {describe(code)} in `on_exit`, expected 0 to 255")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    dir: str | None = None
    """Where checkpoints lie; in the job's own folder by default. The next attempt finds it in RUNTIME_CHECKPOINT_DIR."""
    signal: CheckpointSignal = CheckpointSignal.USR1
    lead: timedelta = timedelta(minutes=2)
    """How long before the time limit the signal comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    dir: str | None = None
    """Folder inside the container or node that the command writes to; RUNTIME_OUTPUT_DIR names it."""
    every: timedelta | None = None
    """How often files that changed are sent to a bucket while an attempt runs; at its end all are, and a folder has them at once."""
    include: tuple[str, ...] = ()
    """Patterns of the files that are sent at intervals, such as `*.csv`; all if empty."""

    def __post_init__(self) -> None:
        if self.include and self.every is None:
            raise ValueError("has `include`, and no `every`: at the end of an attempt all outputs are sent")
        for each in self.include:
            if not each or each.startswith("/") or {"..", "."} & set(each.split("/")):
                raise ValueError(f"has `{each}` in `include`, which no path below the folder of the outputs matches")
        if self.every is not None and not 1 <= self.every.total_seconds() <= 86_400:
            raise ValueError(f"has `every` {format_duration(self.every)}, expected 1s to 1d")
        if self.every is not None and self.dir is not None:
            raise ValueError("has `every` and `dir`: a folder of your own is sent nowhere")


class When(StrEnum):
    """Which end of another job a job waits for."""

    OK = "ok"
    """It succeeded."""
    ANY = "any"
    """It ended, however that was."""
    NOTOK = "notok"
    """It ended otherwise: it failed, or was cancelled."""


@dataclass(frozen=True, slots=True)
class Dependency:
    """One of the jobs in `after`, and which end of it is waited for."""

    job: str
    when: When

    @classmethod
    def read(cls, text: str) -> Dependency:
        """Read `[WHEN:]JOB`. Raises `ValueError` with the expected form."""
        when, given, job = text.rpartition(":")
        if (given and when not in list(When)) or not re.fullmatch(r"j-\S+", job):
            raise ValueError(
                f"has {describe(text)} in `after`, expected the id of a job, j-…, or ok:, any: or notok: before it"
            )
        return cls(job, When(when) if given else When.OK)

    def __str__(self) -> str:
        return self.job if self.when is When.OK else f"{self.when}:{self.job}"

    def is_met(self, state: JobState) -> bool:
        """Whether a job in this state has had the end that is waited for."""
        wanted = {When.OK: state is JobState.SUCCEEDED, When.NOTOK: state is not JobState.SUCCEEDED, When.ANY: True}
        return state.terminal and wanted[self.when]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    command: tuple[str, ...] = ()
    """argv, run without a shell; `{name}` stands for a parameter of the array."""
    call: FunctionCall | None = None
    """A function in place of a command."""
    name: str | None = None
    shell: bool = False
    """One line of shell instead of an argv."""
    code: Code = Code()
    image: str | None = None
    """Container image by digest or tag, or the path of a .sif file."""
    environment: JobEnvironment = JobEnvironment()
    env: Mapping[str, str | None] = field(default_factory=dict)
    """Variables; null takes the value that the launching shell has."""
    secrets: tuple[SecretRef, ...] = ()
    mounts: tuple[Mount, ...] = ()
    resources: JobResources = JobResources()
    nodes: int = 1
    tasks_per_node: int = 1
    gang: Gang = Gang()
    array: Array | None = None
    placement: Placement = Placement()
    priority: Priority = Priority.NORMAL
    account: str | None = None
    """Who pays: a Slurm account, a Beaker budget, a label elsewhere."""
    time_limit: timedelta | None = None
    """Wall clock of each attempt."""
    start_deadline: timedelta | None = None
    """Give up when it has not started by then."""
    idle_timeout: timedelta | None = None
    """Time without output after which an attempt is ended."""
    log_limit: Size = LOG_LIMIT
    """The most that each rank's log of an attempt takes; of a longer one its beginning and its end are kept."""
    grace_period: timedelta = timedelta(minutes=2)
    """From the signal to the kill."""
    ttl_after_finished: timedelta | None = None
    """When the backend may forget it."""
    retry: Retry = Retry()
    checkpoint: Checkpoint | None = None
    outputs: Outputs = Outputs()
    capture: Mapping[str, str] = field(default_factory=dict)
    """Tag → file or folder, relative to the folder that the command starts in, which is saved and found by the next attempt."""
    capture_every: timedelta = timedelta(minutes=1)
    """How often a change is saved while an attempt runs."""
    reuse: Mapping[str, str] = field(default_factory=dict)
    """Tag → an artifact that each attempt finds in `artifacts/TAG`: JOB/TAG, EXPERIMENT/TAG, a path, an address or an id."""
    notify: tuple[Sink, ...] = ()
    """Who hears of the job's end: a webhook, a topic or a command each."""
    after: tuple[str, ...] = ()
    """Jobs that have to succeed first; `any:JOB` has to end, `notok:JOB` to end otherwise."""
    idempotency_key: str | None = None
    """Part of the job's id: another key is another job of the same spec."""

    def __post_init__(self) -> None:
        _check_spec(self)
        # One meaning is one text, for the job's id is made of it.
        object.__setattr__(self, "after", tuple(map(str, self.dependencies)))

    @property
    def dependencies(self) -> tuple[Dependency, ...]:
        written: Any = self.after
        return tuple(map(Dependency.read, [written] if isinstance(written, str) else written))


def _check_spec(spec: JobSpec) -> None:
    if spec.call is None and not (spec.command and spec.command[0]):
        raise ValueError("has an empty `command`")
    if spec.call is not None and spec.command:
        raise ValueError("has both `command` and `call`, expected one of them")
    if spec.call is None and spec.array and spec.array.items:
        raise ValueError("has `array.items`, which are a function's arguments, and no `call`")
    if any("\0" in word for word in (*spec.command, *(value or "" for value in spec.env.values()))):
        raise ValueError("has a zero byte in `command` or `env`, which no process can be given")
    if spec.shell and len(spec.command) != 1:
        raise ValueError(f"has `shell` and a `command` of {len(spec.command)} words, expected one line of shell")
    if spec.name is not None and not re.fullmatch(_NAME, spec.name):
        raise ValueError(f"has `name` {describe(spec.name)}, expected lower-case letters, digits and `-`, at most 63")
    for name in spec.env:
        if not re.fullmatch(_VARIABLE, name):
            raise ValueError(f"has the variable {describe(name)} in `env`, expected letters, digits and `_`")
        if is_secret(name, spec.env[name]):
            raise ValueError(f"has a value for `env.{name}`, which looks like a secret: name it in `secrets` instead")
    for amount in ("nodes", "tasks_per_node"):
        if not 1 <= getattr(spec, amount) <= MAX_RANKS:
            raise ValueError(f"has `{amount}` {getattr(spec, amount)}, expected 1 to {MAX_RANKS}")
    if spec.nodes * spec.tasks_per_node > MAX_RANKS:
        raise ValueError(
            f"has `nodes` {spec.nodes} and `tasks_per_node` {spec.tasks_per_node}, expected at most {MAX_RANKS} ranks"
        )
    for span in ("time_limit", "start_deadline", "idle_timeout"):
        value = getattr(spec, span)
        if value is not None and value <= timedelta(0):
            raise ValueError(f"has `{span}` {describe(value)}, expected more than 0")
    if spec.log_limit < LEAST_LOG:
        raise ValueError(f"has `log_limit` {format_size(spec.log_limit)}, expected {format_size(LEAST_LOG)} or more")
    if spec.checkpoint and spec.time_limit and spec.checkpoint.lead >= spec.time_limit:
        raise ValueError(
            f"has `checkpoint.lead` {format_duration(spec.checkpoint.lead)}, expected less than `time_limit` "
            f"{format_duration(spec.time_limit)}"
        )
    if spec.capture or spec.reuse or spec.capture_every != timedelta(minutes=1):
        check_artifacts(spec.capture, spec.capture_every, spec.reuse)
        if spec.code.mode is not CodeMode.SNAPSHOT or not spec.code.writable:
            raise ValueError("has `capture` or `reuse`, and no writable snapshot of the code, in which they lie")
    if spec.array and spec.array.pack and spec.nodes > 1:
        raise ValueError(
            "has `array.pack` and more than one of `nodes`: packed runs have a node, or a part of one, each"
        )


NOWHERE: Final[Mapping[str, str]] = {
    "outputs.upload": "outputs stay in the record root: `runtime fetch JOB` copies them, or let the command copy what it needs elsewhere",
}
"""Fields that one may look for and that no launcher keeps → what to do instead."""


def parse_spec(value: object, *, source: str = "the request") -> JobSpec:
    """The spec in a YAML file's or another mapping. Raises `InvalidSpec` with all its problems."""
    value = expand(value) if isinstance(value, Mapping) else value
    spec, problems = read_record(JobSpec, value)
    if isinstance(value, Mapping) and "command" not in value and "call" not in value:
        spec, unknown = None, sum("." not in each.path and each.message == NO_FIELD for each in problems)
        problems.insert(unknown, Problem("command", "is missing"))
    if spec is None:
        raise InvalidSpec(source, [replace(each, hint=NOWHERE.get(each.path, each.hint)) for each in problems])
    return spec


def expand(written: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a job file with its short forms in full: a line of shell, one job in `after`, a number of GPUs, a
    manager of an environment."""
    found = dict(written)
    # A line of shell may be text; an argv is a list.
    if found.get("shell") and isinstance(found.get("command"), str):
        found["command"] = [found["command"]]
    if isinstance(found.get("after"), str):
        found["after"] = [found["after"]]
    if isinstance(found.get("environment"), str):
        found["environment"] = {"manager": found["environment"]}
    resources = found.get("resources")
    if isinstance(resources, Mapping) and type(resources.get("gpus")) in (int, float):
        found["resources"] = {**resources, "gpus": {"count": resources["gpus"]}}
    return found


def spec_schema() -> dict[str, Any]:
    """The JSON Schema that editors check job files with."""
    schema = {"title": "research-runtime job", **json_schema(JobSpec)}
    job = {"type": "string", "pattern": f"^(({'|'.join(When)}):)?j-\\S+$", "examples": ["j-91c0…", "any:j-91c0…"]}
    schema["anyOf"], fields = [{"required": [name]} for name in ("command", "call")], schema["properties"]
    fields["resources"]["properties"]["gpus"]["anyOf"].insert(0, {"type": "number", "exclusiveMinimum": 0})
    fields["environment"] |= {"type": ["string", "object"], "pattern": f"^({'|'.join(EnvironmentManager)})$"}
    fields["notify"] |= named_schema(fields["notify"]["items"])
    fields["after"] |= {"type": ["string", "array"], "items": job, "pattern": job["pattern"]}
    return schema


def secret_refs(spec: JobSpec) -> tuple[SecretRef, ...]:
    """Every secret of a spec: those named, variables from the shell whose names suggest a secret, and webhooks."""
    implied = (
        SecretRef(name=name, source=f"env://{name}")
        for name, value in sorted(spec.env.items())
        if value is None and looks_secret(name) and all(name != each.name for each in spec.secrets)
    )
    hooks = [SecretRef(name=f"{NOTIFY}{n}", source=each.webhook) for n, each in enumerate(spec.notify) if each.webhook]
    return (*spec.secrets, *implied, *hooks)
