"""The shim's instructions, `order.json`, made of a spec in the same way for every backend."""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Final

from runtime.errors import NotPossible
from runtime.jobs.array import fill_command
from runtime.jobs.artifacts import artifacts_order
from runtime.jobs.notices import notify_order
from runtime.jobs.plan import JobIdentity, PlanContext
from runtime.jobs.secret_schemes import COMMON_SCHEMES, SecretReader, SecretScheme
from runtime.jobs.spec import LOG_LIMIT, BuildOn, CodeMode, EnvironmentManager, JobSpec, OnTaskFailure, secret_refs

if TYPE_CHECKING:
    from runtime.jobs.ledger import LedgerEntry

ORDER_SCHEMA: Final = 1
SNAPSHOT_FILE: Final = "snapshot.tar"
FROZEN_LOCK: Final = ".runtime-frozen.txt"
"""File at the root of a job's snapshot that lists every package, so that nothing is installed for the sake of one."""
PINNED_LOCK: Final = ".runtime-pinned.txt"
"""The same file with pins of the launch, whose own requirements are installed too."""
OWN_LOCKS: Final = (FROZEN_LOCK, PINNED_LOCK)
"""A tree's own files of these names stay out of a snapshot that gets one."""


def make_order(
    spec: JobSpec,
    job: JobIdentity,
    indices: Sequence[Mapping[str, Any]],
    context: PlanContext,
    *,
    retries: str,
    environ: Mapping[str, str],
    live_tree: str | None = None,
    meets: bool = False,
    schemes: Mapping[str, SecretScheme] = COMMON_SCHEMES,
    **backend: Any,
) -> dict[str, Any]:
    """The order of a job. `retries` is `shim`, `requeue` or `backend`; `null` variables take their values from `environ`.

    The command runs in `live_tree` for `code.mode: none`. `meets` if the backend starts a shim for each node of a run, which
    then meet in the record root. Of the secrets, the order has those that the launch reads by the launcher's `schemes`.
    `backend` adds the launcher's own keys: `wrap`, `setup`,
    `requeue`, `pack`, `output_dir`.
    """
    offset = spec.array.offset if spec.array else 0
    secrets = secret_refs(spec)
    order: dict[str, Any] = {
        "schema": ORDER_SCHEMA,
        "job": job.id,
        "name": job.experiment or job.name,
        "epoch": 1,
        "part": 0,
        "runs": {str(offset + place): _run(spec, params, offset + place) for place, params in enumerate(indices)},
        "nodes": spec.nodes,
        "tasks_per_node": spec.tasks_per_node,
        "env": _variables(spec, [each.name for each in secrets], environ),
        "grace_s": spec.grace_period.total_seconds(),
        "retry": {
            "failure": spec.retry.failure,
            "preemption": spec.retry.preemption,
            "on_exit": {code: meaning.value for code, meaning in spec.retry.on_exit.items()},
            "backoff_s": [spec.retry.backoff.min.total_seconds(), spec.retry.backoff.max.total_seconds()],
        },
        "retries": retries,
        "fold": True,
        **backend,
    }
    if spec.shell:
        order["shell"] = True
    if spec.call:
        order["call"] = _call(spec, job)
    if job.hold:
        order["hold"] = True
    if spec.array and spec.array.on_task_failure is OnTaskFailure.STOP:
        order["on_task_failure"] = spec.array.on_task_failure.value
    for name, span in (("time_limit_s", spec.time_limit), ("idle_timeout_s", spec.idle_timeout)):
        if span is not None:
            order[name] = span.total_seconds()
    if spec.log_limit != LOG_LIMIT:
        order["log_bytes"] = int(spec.log_limit)
    if spec.checkpoint:
        order["checkpoint"] = {
            "dir": spec.checkpoint.dir,
            "signal": spec.checkpoint.signal.value,
            "lead_s": spec.checkpoint.lead.total_seconds(),
        }
    if meets and spec.nodes > 1:
        order["meet"] = {"start_s": spec.gang.start_timeout.total_seconds()}
        order["retry"]["capacity_s"] = spec.retry.capacity.window.total_seconds()
    if spec.notify:
        order["notify"] = notify_order(spec.notify, name=job.name, owner=job.owner)
    if artifacts := artifacts_order(spec):
        order["artifacts"] = artifacts
    if spec.outputs.dir:
        order["output_dir"] = spec.outputs.dir
    if spec.outputs.every is not None:
        order["outputs"] = {"every_s": spec.outputs.every.total_seconds(), "include": list(spec.outputs.include)}
    if job.snapshot:
        order["code"] = {
            "archive": SNAPSHOT_FILE,
            "sha256": job.snapshot.removeprefix("sha256:"),
            "writable": spec.code.writable,
        }
    elif spec.code.mode is CodeMode.NONE and live_tree:
        order["code"] = {"path": live_tree}
    if brought := [each.name for each in secrets if schemes[each.scheme].reader is SecretReader.LAUNCH]:
        order["secrets"] = {name: f"secrets/{name}" for name in brought}
    setup = [*backend.get("setup", ()), *spec.environment.setup]
    if setup:
        order["setup"] = setup
    return order


def environment_order(spec: JobSpec, build_on: BuildOn | None = None, *, local: bool = False) -> dict[str, Any]:
    """The order's `environment`, which the shim makes of a lock file; empty if none is to be made.

    `build_on` is the backend's choice if the spec has none, and None if only nodes can make it. `local` keeps it on the
    machine that made it, rather than in the record root. Raises `NotPossible` without a tree to find the lock in, and for a
    lock that is not in the tree or that the manager would not read.
    """
    wanted = spec.environment
    if wanted.manager is EnvironmentManager.NONE or wanted.name is not None:
        return {}
    if wanted.manager is EnvironmentManager.FROZEN:
        raise NotPossible("`environment.manager: frozen` lists the packages at a launch, and this is none")
    if spec.code.mode is CodeMode.IMAGE:
        raise NotPossible(
            "`environment.manager` makes an environment of a lock file, and `code.mode: image` brings no tree to find it in",
            hint="take `environment.manager` out, or let the code be a snapshot",
        )
    if build_on is None and wanted.build_on is BuildOn.SUBMIT:
        raise NotPossible(
            "`environment.build_on: submit` makes the environment before the job starts, and only the job is on its machines",
            hint="environment.build_on: node, or leave it out",
        )
    lock = wanted.lock or _LOCKS[wanted.manager]
    _check_lock(lock, spec)
    return {
        "manager": wanted.manager.value,
        "lock": lock,
        "extras": list(wanted.extras),
        **({"python": wanted.python} if wanted.python else {}),
        **({"complete": True} if lock == FROZEN_LOCK else {}),
        "build_on": (wanted.build_on or build_on or BuildOn.NODE).value,
        **({"local": True} if local else {}),
    }


def _check_lock(lock: str, spec: JobSpec) -> None:
    path = PurePosixPath(posixpath.normpath(lock))
    if spec.code.mode is CodeMode.SNAPSHOT and (path.is_absolute() or ".." in path.parts):
        raise NotPossible(
            f"`environment.lock` is `{lock}`, and the job takes only the folder of `code.path` along",
            hint="name a file in that folder, by its path from there",
        )
    manager = spec.environment.manager
    if manager is EnvironmentManager.CONDA and spec.environment.python:
        raise NotPossible(
            "`environment.python` is for uv and pip, and `environment.manager` is conda",
            hint="name the version in the file of conda, such as `python=3.11`",
        )
    if manager is EnvironmentManager.PIP and spec.environment.extras:
        raise NotPossible(
            "`environment.extras` are for uv, and `environment.manager` is pip",
            hint="lock the extras too, such as with `uv pip compile --extra`",
        )
    if manager is EnvironmentManager.UV and path.name != "uv.lock":
        raise NotPossible(
            f"`environment.lock` is `{lock}`, and uv reads no other file than `uv.lock`",
            hint="name a file `uv.lock`, such as `train/uv.lock`, or leave `environment.lock` out",
        )


def activation_lines(spec: JobSpec) -> list[str]:
    """Lines of shell that enter the environment that the spec names."""
    name = spec.environment.name
    if name is None:
        return []
    if spec.environment.manager is EnvironmentManager.CONDA:
        return ['eval "$(conda shell.posix hook)"', f"conda activate {shlex.quote(name)}"]
    return [f". {shlex.quote(name)}/bin/activate"]


_LOCKS: Final = {
    EnvironmentManager.UV: "uv.lock",
    EnvironmentManager.PIP: "requirements.txt",
    EnvironmentManager.CONDA: "environment.yml",
}


def _run(spec: JobSpec, params: Mapping[str, Any], index: int) -> dict[str, Any]:
    command = list(fill_command(spec.command, params, index)) if spec.array else list(spec.command)
    run: dict[str, Any] = {"command": command}
    if spec.array:
        if spec.array.items:
            run["item"] = spec.array.items[index - spec.array.offset]
        env = {f"RUNTIME_PARAM_{name.upper()}": str(value) for name, value in params.items()}
        if "seed" in params:
            env["SEED"] = str(params["seed"])
        if env:
            run["env"] = env
    return run


def _call(spec: JobSpec, job: JobIdentity) -> dict[str, Any]:
    """Return the part of a call that `runtime.shim.call` needs beside a run's own item, folder and numbers."""
    assert spec.call is not None
    call: dict[str, Any] = {
        "function": spec.call.function,
        "name": job.name,
        "args": list(spec.call.args),
        "kwargs": dict(spec.call.kwargs),
        "run": spec.call.run,
        "paths": list(spec.call.paths),
        "folder": spec.call.folder,
        "python": spec.call.python,
        "packed": spec.call.packed,
    }
    if made := spec.call.pickled:
        call["pickled"] = {"function": made.function, "python": made.python, "cloudpickle": made.cloudpickle}
    return call


def _variables(spec: JobSpec, secrets: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    plain = {name: value for name, value in sorted(spec.env.items()) if name not in secrets}
    missing = [name for name, value in plain.items() if value is None and name not in environ]
    if missing:
        raise NotPossible(
            f"`env.{missing[0]}` takes the value of this shell, and it is not set here",
            hint=f"export {missing[0]}=…, or write a value",
        )
    return {name: environ[name] if value is None else value for name, value in plain.items()}


def begin_epoch(order: Mapping[str, Any], epoch: int, parts: Iterable[int]) -> dict[str, Any]:
    """The order of an epoch. It names the parts before the backend is asked to start them, so that a part whose native job
    could not be written down is known."""
    starts = order.get("starts")
    known = starts if isinstance(starts, Mapping) else {}
    return {**order, "epoch": epoch, "starts": {**known, **{str(part): epoch for part in parts}}}


def find_unnoted(order: Mapping[str, Any], entry: LedgerEntry) -> dict[int, int]:
    """Parts that somebody began to start again, each with its epoch, without writing down a native job: one may live."""
    noted = {each.part: each.epoch for each in sorted(entry.natives, key=lambda each: each.epoch)}
    parts = range(len(entry.intent.get("parts", ())) or 1)
    starts, epoch = order.get("starts"), order.get("epoch", 1)
    if not isinstance(starts, Mapping):  # never started again, or by an earlier release
        again = isinstance(epoch, int) and epoch > max(noted.values(), default=1)
        return dict.fromkeys(parts, epoch) if again else {}
    begun = {part: starts.get(str(part)) for part in parts}
    return {part: at for part, at in begun.items() if isinstance(at, int) and at > noted.get(part, 1)}
