"""doodad's `easy_launch`: `run_experiment(function, mode=…, variant=…)` with targets of this project as its modes.

What the function gets travels by value with it: a machine that runs it needs cloudpickle, and neither doodad nor this package.
"""

from __future__ import annotations

import codecs
import copy
import inspect
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from runtime.client.functions import check_returns_value, name_function
from runtime.client.tasks.task_snapshot import read_code_git
from runtime.config import load_settings
from runtime.errors import InvalidValue, NotPossible, UnknownName
from runtime.experiments import run as experiments
from runtime.experiments.calls import Call
from runtime.experiments.run import HERE, QUEUE
from runtime.snapshots.provenance import own_argv

HERE_NO_DOODAD: Final = "here_no_doodad"
LOCAL: Final = "local"

_REPLACED: Final = {
    "ec2": "a VM is a target of kind `ssh`, or runs `runtime worker`, and the mode is `queue:`",
    "gcp": "a VM is a target of kind `ssh`, or runs `runtime worker`, and the mode is `queue:`",
    "sss": "a Slurm cluster is a target of kind `slurm`, and its `image` may be a .sif file",
    "htp": "a Slurm cluster is a target of kind `slurm`; `runtime.map` with `array={'pack': 20}` fills whole nodes",
    "slurm_singularity": "a Slurm cluster is a target of kind `slurm`, and its `image` may be a .sif file",
    "ssh": "a host is a target of kind `ssh`",
    "local_docker": "a target of kind `local` with a default `image` runs it with podman or docker",
    "local_singularity": "a target of kind `local` with a default `image` runs it with podman or docker",
}
"""Modes that are no target by themselves, and what takes their place."""
_SLURM_MODES: Final = ("sss", "htp", "slurm_singularity")

_LEFT_OUT: Final = {
    "region": "the target decides where its machines are",
    "instance_type": "`resources` says what a run needs",
    "spot_price": "`placement={'capacity': 'spot'}` asks for spot machines",
    "gcp_kwargs": "the target has the settings of its machines",
    "s3_log_prefix": "`runtime fetch` copies outputs",
    "s3_log_name": "`runtime fetch` copies outputs",
}
"""doodad's settings of cloud machines, which no target here takes, and what takes their place."""

_NEVER_WORKED: Final = "local_input_dir_to_mount_point_dict"

_MISSPELT: Final = "use_gpue"
"""`use_gpu` as doodad's own README has it."""


class GitInfo(NamedTuple):
    """The state of a repository when the experiment was started."""

    directory: str
    code_diff: str
    code_diff_staged: str
    commit_hash: str
    branch_name: str
    """`[DETACHED]` without a branch."""


class DoodadConfig(NamedTuple):
    """The configuration that a function gets beside its variant."""

    exp_name: str
    base_log_dir: str
    """The folder for outputs, which exists."""
    use_gpu: bool
    gpu_id: int | str
    git_infos: list[GitInfo]
    script_name: str
    """The command line of the launching script."""
    extra_launch_info: dict[str, Any]


def run_experiment(
    method_call: Callable[[Any, Any], Any],
    mode: str = LOCAL,
    exp_name: str = "default",
    variant: Mapping[str, Any] | None = None,
    prepend_date_to_exp_name: bool = True,
    use_gpu: bool = False,
    gpu_id: int | str = 0,
    base_log_dir: str | os.PathLike[str] | None = None,
    *,
    skip_wait: bool = False,
    verbose: bool = False,
    num_exps_per_instance: int = 1,
    docker_image: str | None = None,
    time_in_mins: float | None = None,
    slurm_config_name: str | None = None,
    ssh_host: str | None = None,
    sync_interval: float | None = None,
    **more: Any,
) -> Any:
    """Call `method_call(doodad_config, variant)` once more, wherever `mode` says.

    `here_no_doodad` returns the function's value. `local` prints the run's output, waits for its end and raises what the
    function raises; with `skip_wait` it does not wait. Any other mode is a target, and returns at once. All but the first
    return a `Call`. `more` are fields of a job file, and doodad's settings of cloud machines, which are left out with a
    warning. Raises `UnknownName`, `NotPossible` and `InvalidValue`.
    """
    use_gpu = bool(more.pop(_MISSPELT, use_gpu))
    _check_keywords(more)
    _check_kinds(method_call, mode, variant, time_in_mins=time_in_mins, sync_interval=sync_interval)
    kept = copy.deepcopy(dict(variant or {}))
    _check_variant(kept)
    target = _choose_target(mode, use_gpu=use_gpu, slurm_config_name=slurm_config_name, ssh_host=ssh_host)
    if target not in (HERE, LOCAL):
        _refuse_copies(num_exps_per_instance)
        _warn(target, more)
    elif base_log_dir is not None:
        base_log_dir = Path(base_log_dir).absolute()
    log_dir = None if base_log_dir is None else os.fspath(base_log_dir)
    full_name = time.strftime("%y-%m-%d-") + exp_name if prepend_date_to_exp_name else exp_name
    call = _with_config(
        method_call,
        {
            "exp_name": full_name,
            "use_gpu": use_gpu,
            "gpu_id": gpu_id,
            "git_infos": _read_git_infos(method_call),
            "script_name": " ".join(own_argv()),
        },
        extra={"base_exp_name": exp_name, **({"docker_image": docker_image} if docker_image else {})},
        log_dir=log_dir if target == HERE or target.startswith(QUEUE) else None,
    )
    if target == HERE:
        return experiments.run_experiment(call, kept, name=_plain(full_name))
    fields = {name: value for name, value in more.items() if name not in _LEFT_OUT}
    if use_gpu:
        fields["resources"] = {"gpus": 1, **fields.get("resources", {})}
    if time_in_mins is not None:
        fields["time_limit"] = time_in_mins * 60
    if docker_image is not None and target != LOCAL:
        fields["image"] = docker_image
    # A folder of the user's own is on the machine that runs, and sent nowhere.
    outputs = {"dir": log_dir} if log_dir else {"every": sync_interval} if sync_interval else {}
    if outputs and not target.startswith(QUEUE):
        fields["outputs"] = outputs
    check_returns_value(method_call)
    _carry_by_value()
    made = experiments.run_experiment(call, kept, name=_plain(full_name), target=target, **fields)
    if verbose:
        sys.stderr.write(f"{made}\n")
    if mode == LOCAL and not skip_wait:
        _follow(made)
    return made


def _check_keywords(more: Mapping[str, Any]) -> None:
    from dataclasses import fields

    from runtime.experiments.queues import TERMS
    from runtime.jobs.spec import JobSpec

    taken = {each.name for each in fields(JobSpec)} - {"command", "call", "name", "shell", "image", "outputs"} | {
        *TERMS
    }
    for name in more:
        if name == _NEVER_WORKED:
            raise NotPossible(
                f"`{name}` is not taken; doodad itself refuses it",
                hint="`mounts` brings a folder of the node into a container",
            )
        if name not in _LEFT_OUT and name not in taken:
            own = {*inspect.signature(run_experiment).parameters} - {"more"}
            raise UnknownName("keyword", name, own | {*_LEFT_OUT} | taken, where="of `run_experiment`")


def _check_kinds(method_call: object, mode: object, variant: object, **spans: object) -> None:
    if not callable(method_call):
        raise InvalidValue("function", method_call, "a function of `doodad_config` and `variant`")
    if type(mode) is not str or not mode:
        raise InvalidValue("mode", mode, f"a text: `{LOCAL}`, `{HERE_NO_DOODAD}` or the name of a target")
    if variant is not None and not isinstance(variant, Mapping):
        raise InvalidValue("variant", f"{variant!r:.100}", "a dictionary")
    for name, span in spans.items():
        if span is not None and (isinstance(span, bool) or not isinstance(span, int | float) or not span > 0):
            raise InvalidValue(name, f"{span!r:.100}", "a number above 0")


def _check_variant(variant: Mapping[str, Any]) -> None:
    if "doodad_config" in variant:
        raise InvalidValue(
            "key of a variant", "doodad_config", "any other key", hint="doodad keeps this name for itself"
        )

    def check(inner: object) -> None:
        if isinstance(inner, Mapping):
            for key, value in inner.items():
                if isinstance(key, str) and "." in key:
                    raise InvalidValue(
                        "key of a variant", key, "a key without `.`", hint="nest a dictionary in its place"
                    )
                check(value)
        elif isinstance(inner, list | tuple):
            for value in inner:
                check(value)

    check(variant)


def _choose_target(mode: str, *, use_gpu: bool, slurm_config_name: str | None, ssh_host: str | None) -> str:
    """Return the target of a mode. Raises `NotPossible` for a mode of doodad that this project does not define."""
    from runtime.client.jobs.targets import read_definitions, read_target

    if mode == HERE_NO_DOODAD:
        return HERE
    if mode == LOCAL or mode.startswith(QUEUE):
        return mode
    known = read_definitions(load_settings())
    named = ssh_host if mode == "ssh" else None
    if mode in _SLURM_MODES or (mode in known and read_target(mode, known[mode]).kind == "slurm"):
        named = slurm_config_name
    # `cpu` and `gpu` are tables of a Slurm target, and any other name is a target of its own.
    if named in ("cpu", "gpu") and named not in known:
        if (named == "gpu") != use_gpu:
            raise NotPossible(f"`slurm_config_name={named!r}` and `use_gpu={use_gpu}` do not agree")
        named = None
    target = named or mode
    if target in known:
        return target
    if target in _REPLACED:
        raise NotPossible(
            f"`{target}` is no target of this project",
            facts=[_REPLACED[target]],
            hint=f"define [targets.{target}] in runtime.toml, or name another target as the mode; docs/migrating/doodad.md has both",
        )
    raise UnknownName("mode", target, {*known, HERE_NO_DOODAD}, hint=f"define [targets.{target}] in runtime.toml")


def _refuse_copies(count: int) -> None:
    if count != 1:
        raise NotPossible(
            f"`num_exps_per_instance={count}` is not taken: a call is one run",
            hint=f"call it {count} times, or `runtime.map` the function over {count} items",
        )


def _warn(target: str, more: Mapping[str, Any]) -> None:
    for name in [name for name in _LEFT_OUT if more.get(name) is not None]:
        warnings.warn(f"`{name}` is left out on target `{target}`: {_LEFT_OUT[name]}", stacklevel=3)


def _with_config(
    method_call: Callable[[Any, Any], Any], facts: Mapping[str, Any], *, extra: Mapping[str, Any], log_dir: str | None
) -> Callable[[Any, Any], Any]:
    """Return the function of a run and a variant that calls `method_call`. It carries a number of its own, because the same
    call made again is another run, as in a loop over repetitions."""
    facts, extra, number = dict(facts), dict(extra), os.urandom(8).hex()

    def call(run: Any, variant: Any) -> Any:
        import os

        folder = log_dir or str(run.output)
        os.makedirs(folder, exist_ok=True)  # noqa: PTH103  the type of a path is that of the user's function
        ids = {"run": number, **run.ids}
        if "SLURM_JOB_ID" in ids:
            ids["slurm-job-id"] = ids["SLURM_JOB_ID"]
        return method_call(DoodadConfig(base_log_dir=folder, extra_launch_info={**extra, **ids}, **facts), variant)

    # The function's own module decides which code goes along, and its name what the job is called.
    call.__module__, _, call.__qualname__ = name_function(method_call).partition(":")
    return call


def _carry_by_value() -> None:
    """Have cloudpickle pack the classes and functions of this module, rather than name them."""
    import cloudpickle  # type: ignore[import-untyped]

    cloudpickle.register_pickle_by_value(sys.modules[__name__])


def _read_git_infos(method_call: Callable[..., Any]) -> list[GitInfo]:
    """The state of each repository in the function's project."""
    folder, repositories = read_code_git(method_call)
    return [
        GitInfo(
            str(folder / each["folder"]),
            each["diff"],
            each["staged_diff"],
            each["commit"] or "",
            each["branch"] or "[DETACHED]",
        )
        for each in repositories
    ]


def _plain(name: str) -> str:
    """The name of a job or an experiment."""
    return re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")[:63].strip("-") or "default"


def _follow(call: Call) -> None:
    """Print the output as it comes, wait for the end, and raise what the function raised. Ctrl-C cancels the run."""
    decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
    try:
        for piece in call.job.logs(follow=True) if call.job else ():
            sys.stdout.write(decode(piece))
            sys.stdout.flush()
        call.result()
    except KeyboardInterrupt:
        call.cancel()
        raise
