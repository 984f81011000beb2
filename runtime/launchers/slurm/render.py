"""Renders a spec for a target: words for sbatch, a batch script and container lines. Pure."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from runtime.errors import NotPossible
from runtime.jobs.plan import NativePart
from runtime.jobs.spec import JobSpec, PackPer, Priority, When, secret_refs
from runtime.launchers.slurm.settings import GpuOption, Profile, SlurmSettings
from runtime.launchers.slurm.states import MARK, Layout
from runtime.tasks.container import Mount
from runtime.units import divide, format_duration

SLACK: Final = timedelta(minutes=1)
"""Slurm counts minutes and looks twice in each: the shim's clock has to be the first to end."""
LOW_NICE: Final = 1000
FOLDER: Final = "{folder}"
"""Stands for the run folder in the words for sbatch; the machine that submits knows its full path."""


@dataclass(frozen=True, slots=True)
class Slice:
    """One native job: the indices that it serves, and how many of its tasks run at a time."""

    layout: Layout | None
    parallel: int | None
    by_helper: int = 0
    """Number of runs in the task file of the site's own packer."""


# arrays


def split_array(spec: JobSpec, count: int, settings: SlurmSettings) -> list[Slice]:
    """Split `count` indices into as many native arrays as the limits of the cluster ask for."""
    array = spec.array
    if array is None:
        return [Slice(None, None)]
    slots = slots_of_node(spec)
    at_once = max(1, array.max_parallel // slots) if array.max_parallel else None
    each = slots
    if slots > 1 and at_once:
        # The job keeps a node and fills it again, rather than giving it back after each round of its slots.
        each = max(slots, math.ceil(count / at_once))
    if settings.max_submit:
        each = max(each, math.ceil(count / settings.max_submit))
    tasks = math.ceil(count / each)
    parts = math.ceil(tasks / settings.max_array_size)
    parallel: list[int | None] = [None] * parts
    if at_once is not None and at_once < tasks:
        parallel = [*divide(at_once, parts)]
    # If fewer tasks may run at a time than there are parts, some part would have none: the tasks are made longer.
    if any(share == 0 for share in parallel):
        assert at_once is not None
        each = math.ceil(count / (at_once * settings.max_array_size))
        tasks = math.ceil(count / each)
        parts = math.ceil(tasks / settings.max_array_size)
        parallel = [*divide(at_once, parts)]
    slices, done = [], 0
    for share in parallel:
        size = min(settings.max_array_size * each, count - done)
        slices.append(Slice(Layout(array.offset + done, each, size), share))
        done += size
    return slices


def slots_of_node(spec: JobSpec) -> int:
    """How many runs share a node at a time."""
    if spec.array is None or spec.array.pack is None:
        return 1
    gpus = int(spec.resources.gpus.count) if spec.resources.gpus else 0
    return spec.array.pack * max(1, gpus) if spec.array.pack_per is PackPer.GPU else spec.array.pack


# time


@dataclass(frozen=True, slots=True)
class SlurmTimes:
    minutes: int | None
    """`--time`; None leaves it to the partition."""
    limit: timedelta | None
    """Time limit of one attempt, by the shim's clock."""
    notes: tuple[str, ...] = ()


def plan_times(spec: JobSpec, profile: Profile, slices: Sequence[Slice]) -> SlurmTimes:
    """Plan how long Slurm lets a job run, so that the shim's own clock ends every attempt first."""
    if spec.time_limit is None:
        return SlurmTimes(
            None, None, ("no time_limit: the partition's own ends the job, and an end by it is not tried again",)
        )
    rounds = max(_rounds(spec, piece) for piece in slices)
    each = spec.time_limit + spec.grace_period
    wanted = rounds * each + SLACK
    minutes = math.ceil(wanted.total_seconds() / 60)
    sum_of = (
        f"--time is {format_duration(timedelta(minutes=minutes))}: {rounds} runs one after another, each of "
        f"{format_duration(spec.time_limit)} and {format_duration(spec.grace_period)} of grace at worst, "
        f"and {format_duration(SLACK)} for Slurm's clock"
    )
    if profile.max_time is None or wanted <= profile.max_time:
        warning = "" if profile.max_time else "; a partition whose limit is shorter never starts it"
        return SlurmTimes(minutes, spec.time_limit, (sum_of + warning,) if rounds > 1 else ())
    if rounds > 1:
        nodes = "array.max_parallel" if spec.array and spec.array.max_parallel else "`max_submit` of the target"
        raise NotPossible(
            f"{rounds} runs one after another may take longer than the partition's longest time, "
            f"{format_duration(profile.max_time)}",
            facts=[sum_of, f"{max(0, (profile.max_time - SLACK) // each)} of them fit"],
            hint=f"more nodes ({nodes}), more runs at a time on each (array.pack), or a shorter time_limit",
        )
    minutes = int(profile.max_time.total_seconds() // 60)
    limit = profile.max_time - spec.grace_period - SLACK
    if limit <= timedelta(0):
        raise NotPossible(
            f"`grace_period` {format_duration(spec.grace_period)} leaves nothing of the partition's longest time, "
            f"{format_duration(profile.max_time)}",
            hint="shorten grace_period",
        )
    note = f"attempts end after {format_duration(limit)}: the partition's longest time, less the grace"
    return SlurmTimes(minutes, limit, (note,))


def _rounds(spec: JobSpec, piece: Slice) -> int:
    """The number of runs that one slot of a job has in turn."""
    if piece.by_helper:
        nodes, tasks = helper_slots(spec, piece.by_helper)
        return math.ceil(piece.by_helper / (nodes * tasks))
    return math.ceil(piece.layout.each / slots_of_node(spec)) if piece.layout else 1


# words for sbatch


def sbatch_words(
    spec: JobSpec, settings: SlurmSettings, profile: Profile, name: str, owner: str, piece: Slice, times: SlurmTimes
) -> list[str]:
    """The words of sbatch. In the script, variables of the submitting shell would beat the options."""
    if spec.start_deadline is not None and times.minutes is None:
        raise NotPossible(
            "`start_deadline` needs a `time_limit` on Slurm, whose --deadline is when a job has to have ended",
            hint="set time_limit",
        )
    if len(spec.placement.nodes) > spec.nodes:
        raise NotPossible(
            f"`placement.nodes` names {len(spec.placement.nodes)} nodes for a job of {spec.nodes}: Slurm gives all that are "
            "named, and cannot choose among them",
            hint="leave the others out with placement.exclude, or choose by a feature with placement.selector",
        )
    array, capacity = piece.layout is not None, spec.placement.capacity or ""
    words = ["sbatch", "--parsable", f"--job-name={name}", "--requeue", "--open-mode=append", "--export=NONE"]
    words += [f"--comment={MARK}{owner}"]
    words += [f"--output={FOLDER}/slurm/{'%A_%a' if array else '%j'}.log", f"--chdir={FOLDER}"]
    for option, value in (
        ("account", spec.account or profile.account),
        ("partition", profile.partition),
        ("qos", _qos(spec, settings, profile)),
        ("constraint", _constraint(spec, profile)),
        ("nodelist", ",".join(spec.placement.nodes)),
        ("exclude", ",".join(spec.placement.exclude)),
        ("reservation", capacity.removeprefix("reservation:") if capacity.startswith("reservation:") else ""),
    ):
        words += [f"--{option}={value}"] if value else []
    words += [f"--nice={LOW_NICE}"] if spec.priority is Priority.LOW and "low" not in settings.priorities else []
    words += _resource_words(spec, profile, piece.by_helper)
    if times.minutes is not None:
        words.append(f"--time={times.minutes}")
    if spec.checkpoint:
        seconds = spec.checkpoint.lead + spec.grace_period
        words.append(f"--signal=B:USR1@{min(65535, math.ceil(seconds.total_seconds()))}")
    if spec.start_deadline is not None:
        minutes = math.ceil(spec.start_deadline.total_seconds() / 60) + (times.minutes or 0)
        words.append(f"--deadline=now+{minutes}minutes")
    if piece.layout is not None:
        tasks = math.ceil(piece.layout.count / piece.layout.each)
        limit = f"%{piece.parallel}" if piece.parallel else ""
        words.append(f"--array=0-{tasks - 1}{limit}")
    return [*words, *profile.flags]


def _resource_words(spec: JobSpec, profile: Profile, by_helper: int = 0) -> list[str]:
    wanted = spec.resources
    nodes, tasks = spec.nodes, spec.tasks_per_node if spec.nodes > 1 else 1
    if by_helper:
        nodes, tasks = helper_slots(spec, by_helper)
    words = [f"--nodes={nodes}", f"--ntasks-per-node={tasks}"]
    cpus = wanted.cpus or profile.cpus
    if cpus:
        words.append(f"--cpus-per-task={max(1, math.ceil(cpus / tasks))}")
    if wanted.memory:
        words.append(f"--mem={math.ceil(wanted.memory.low / 1024**2)}M")
    elif profile.memory:
        words.append(f"--mem={profile.memory}")
    if wanted.disk:
        words.append(f"--tmp={math.ceil(wanted.disk.low / 1024**2)}M")
    if wanted.gpus:
        if wanted.gpus.count < 1:
            raise NotPossible(
                f"`resources.gpus.count` is {wanted.gpus.count:g}, and Slurm gives a job whole GPUs",
                hint="array.pack with pack_per: gpu lets runs of one array share a GPU",
            )
        kind = f"{wanted.gpus.type}:" if wanted.gpus.type else ""
        amount = f"{kind}{wanted.gpus.count:g}"
        words.append(f"--gres=gpu:{amount}" if profile.gpu_option is GpuOption.GRES else f"--gpus-per-node={amount}")
    return words


def _qos(spec: JobSpec, settings: SlurmSettings, profile: Profile) -> str | None:
    if spec.priority is Priority.NORMAL:
        return profile.qos
    if spec.priority.value in settings.priorities:
        return str(settings.priorities[spec.priority.value])
    if spec.priority is Priority.LOW:
        return profile.qos
    raise NotPossible(
        f"`priority` is {spec.priority.value}, and the target does not say which QOS that is",
        facts=[f"named there: {', '.join(sorted(settings.priorities)) or 'none'}"],
        hint=f'add priorities = {{ {spec.priority.value} = "…" }} to the target',
    )


def _constraint(spec: JobSpec, profile: Profile) -> str | None:
    unknown = [name for name in spec.placement.selector if name != "feature"]
    if unknown:
        raise NotPossible(
            f"`placement.selector` names `{unknown[0]}`, and nodes of Slurm have features only",
            hint='selector: {feature: "a100&nvlink"}',
        )
    wanted = [each for each in (profile.constraint, spec.placement.selector.get("feature")) if each]
    return "&".join(f"({each})" if "|" in each and len(wanted) > 1 else each for each in wanted) or None


def dependency_words(wanted: Sequence[tuple[When, Sequence[str]]]) -> list[str]:
    """Options that make a job wait for ends of other jobs, each with one or more native ids."""
    clauses = []
    for when, natives in wanted:
        if when is When.NOTOK and len(natives) > 1:
            # One part that failed is enough, and Slurm has no way to write `and` beside `or`.
            if len(wanted) > 1:
                raise NotPossible(
                    "`after` waits for the failure of a job that is several native arrays, and for other jobs too",
                    hint="let it wait for the end of that job: any: in place of notok:",
                )
            return [f"--dependency={'?'.join(f'afternotok:{native}' for native in natives)}", _END_INVALID]
        if natives:
            clauses.append(f"after{when}:{':'.join(natives)}")
    return [f"--dependency={','.join(clauses)}", _END_INVALID] if clauses else []


_END_INVALID: Final = "--kill-on-invalid-dep=yes"


# the script


def render_script(spec: JobSpec, job: str, settings: SlurmSettings, profile: Profile) -> str:
    """The batch script. It takes the run folder and the part as words, so one text serves every part and every copy of
    the folder."""
    lines = ["#!/bin/bash -l" if profile.setup else "#!/bin/bash", f"# {job}: run folder, part"]
    if spec.array:
        lines[-1] += ", first index, indices of a task, last index"
    # --export=NONE sets it, and everything that srun starts would lose its PATH.
    lines.append("unset SLURM_EXPORT_ENV")
    if profile.setup and profile.python is None:
        lines += [f"{line} || exit 1" if _simple(line) else line for line in profile.setup]
    words = [shlex.quote(profile.python or "python3"), '"$1/shim.py"', '"$1"', "--part", '"$2"', "--native"]
    tail = ["--scratch", _expanding(settings.scratch)] if settings.scratch else []
    if spec.array:
        lines.append("first=$(($3 + SLURM_ARRAY_TASK_ID * $4)) last=$(($3 + (SLURM_ARRAY_TASK_ID + 1) * $4 - 1))")
        lines.append('[ "$last" -le "$5" ] || last=$5')
        words += ['"$SLURM_ARRAY_JOB_ID"', "--member", '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"']
        words += ["--indices", '"$first-$last"']
    else:
        words.append('"$SLURM_JOB_ID"')
    # Without exec, bash would take the signals and the shim would never see them.
    lines.append(" ".join(["exec", *words, *tail]))
    return "\n".join(lines) + "\n"


def show_words(parts: Sequence[NativePart]) -> str:
    """The command lines, one for each part, as a person would type them in the record root."""
    lines = []
    for part in parts:
        words = [*part.native["words"], f"{FOLDER}/artefacts/{part.artefact}", *part.native["script"]]
        lines.append(shlex.join(word.replace(FOLDER, "FOLDER") for word in words) + "\n")
    return "".join(lines)


def read_shown(text: str) -> list[tuple[list[str], str, list[str]]]:
    """The words for sbatch, the artefact and the words for its script of each part, from the text of `show_words`."""
    found = []
    for line in text.splitlines():
        words = [word.replace("FOLDER", FOLDER) for word in shlex.split(line)]
        place = next(at for at, word in enumerate(words) if word.startswith(f"{FOLDER}/artefacts/"))
        found.append((words[:place], words[place].rpartition("/")[2], words[place + 1 :]))
    return found


def cut_array(words: Sequence[str], tasks: Iterable[int]) -> list[str]:
    """Limit the array in the words for sbatch to these tasks; as many run at a time as before."""
    spans: list[list[int]] = []
    for task in sorted(set(tasks)):
        if spans and task == spans[-1][1] + 1:
            spans[-1][1] = task
        else:
            spans.append([task, task])
    chosen = ",".join(f"{first}-{last}" if last > first else str(first) for first, last in spans)
    return [
        "".join([f"--array={chosen}", *word.partition("%")[1:]]) if word.startswith("--array=") else word
        for word in words
    ]


def script_words(part: int, piece: Slice) -> list[str]:
    """The words after the script's name on sbatch's command line."""
    layout = piece.layout
    if layout is None:
        return [FOLDER, str(part)]
    return [FOLDER, str(part), str(layout.offset), str(layout.each), str(layout.offset + layout.count - 1)]


def _simple(line: str) -> bool:
    return not any(char in line for char in "\\#{}") and line.strip() not in ("then", "else", "fi", "do", "done")


def _expanding(path: str) -> str:
    """Quote a path whose variables the node expands."""
    return '"' + path.replace("\\", "\\\\").replace('"', '\\"').replace("`", "\\`") + '"'


# containers


def container_words(
    spec: JobSpec, settings: SlurmSettings, profile: Profile, environ: Sequence[str], setup: Sequence[str] = ()
) -> list[str]:
    """The words before the command; empty without an image.

    The command runs in the same folder as without a container, and sees its output and checkpoint folders. The container
    has a clean environment: only variables of the job, named in `environ`, and of our contract pass. `setup` are the job's
    own lines of shell, which run inside.
    """
    image = spec.image or profile.image
    sources = [_path_of(mount, settings) for mount in spec.mounts]
    if image is None:
        if spec.mounts:
            first = spec.mounts[0]
            raise NotPossible(
                f"`mounts` puts `{first.source}` at `{first.target}`, and without a container a path is where it is",
                hint=f"use {settings.map_path(first.source)} in the command, or name an `image`",
            )
        return []
    words = [settings.container, "exec"]
    if spec.resources.gpus:
        words.append("--nv")
    binds = ['"$PWD"', '"$RUNTIME_OUTPUT_DIR"', '"$RUNTIME_CHECKPOINT_DIR"', '"${RUNTIME_PREEMPTED_NOTE%/*}"']
    for mount, source in zip(spec.mounts, sources, strict=True):
        binds.append(shlex.quote(f"{source}:{mount.target}:{mount.mode.value}"))
    line = " ".join(
        [
            *map(shlex.quote, words),
            *(f"--bind {each}" for each in binds),
            '--pwd "$PWD"',
            "--cleanenv",
            *map(shlex.quote, profile.container_flags),
            shlex.quote(_image(image, settings)),
        ]
    )
    if profile.pre or setup:
        from runtime.shim.ranks import setup_script

        line += f" sh -c {shlex.quote(setup_script([*profile.pre, *setup]))} pre"
    return ["sh", "-c", f'{_pass_variables(environ, settings)}exec {line} "$@"', "container"]


def _pass_variables(names: Sequence[str], settings: SlurmSettings) -> str:
    prefix = "SINGULARITYENV_" if settings.container.endswith("singularity") else "APPTAINERENV_"
    fixed = ["CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "PYTHONUNBUFFERED", "RANK", "WORLD_SIZE", "LOCAL_RANK"]
    fixed += ["MASTER_ADDR", "MASTER_PORT", "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"]
    wanted = " ".join(dict.fromkeys([*names, *fixed]))
    return (
        "for name in $(env | sed -n 's/^\\(RUNTIME_[A-Z0-9_]*\\)=.*/\\1/p') " + wanted + "; do "
        'eval "[ -z \\"\\${$name+x}\\" ] || export ' + prefix + '$name=\\"\\$$name\\""; done; '
    )


def _image(image: str, settings: SlurmSettings) -> str:
    if "://" in image or image.startswith(("/", ".")) or image.endswith(".sif"):
        return settings.map_path(image)
    return f"docker://{image}"


def _path_of(mount: Mount, settings: SlurmSettings) -> str:
    source = settings.map_path(mount.source)
    if "://" in source:
        raise NotPossible(
            f"`mounts` names `{source}`, and nodes of Slurm can bind paths only",
            hint="name a path of the nodes"
            if source.startswith("claim://")
            else "let the command read it by itself, or copy it to a folder of the nodes and name that",
        )
    return source


def variable_names(spec: JobSpec, runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Names of the variables that the job sets itself, in any of its indices."""
    names = {*spec.env, *(each.name for each in secret_refs(spec))}
    for run in runs.values():
        names.update(run.get("env", {}))
    return sorted(name for name in names if not name.startswith("RUNTIME_"))


# ranks on several nodes


def srun_words(spec: JobSpec) -> list[str]:
    """The words that start the ranks of one attempt on every node."""
    return [
        "srun",
        "--export=ALL",
        "--kill-on-bad-exit=1",
        f"--nodes={spec.nodes}",
        f"--ntasks={spec.nodes * spec.tasks_per_node}",
        f"--ntasks-per-node={spec.tasks_per_node}",
    ]


# a step for each run


def step_words(spec: JobSpec, profile: Profile) -> list[str]:
    """The words that start one run of a packed node as a step of its own, which Slurm keeps to its share of the node.

    Without memory of its own a step takes all of the job's, and the others wait until it ends.
    """
    slots, cpus, memory = slots_of_node(spec), spec.resources.cpus or profile.cpus, spec.resources.memory
    if not cpus or not memory:
        raise NotPossible(
            f"`pack_steps` gives each run its share of the node's {'memory' if cpus else 'CPUs'}, and the job does not say how much it has",
            hint="set resources.memory" if cpus else "set resources.cpus",
        )
    words = ["srun", "--exact", "--export=ALL", "--nodes=1", "--ntasks=1"]
    words += [f"--cpus-per-task={max(1, int(cpus // slots))}", f"--mem={max(1, memory.low // slots // 1024**2)}M"]
    if spec.resources.gpus:
        share, rest = divmod(int(spec.resources.gpus.count), slots)
        if share == 0 or rest:
            raise NotPossible(
                f"`pack_steps` cannot share {spec.resources.gpus.count:g} GPUs among {slots} runs: a step has whole ones",
                hint="leave pack_steps out: the shim then keeps runs to their GPUs",
            )
        words.append(f"--gres=gpu:{share}")
    return words


# task files

_FOLDER_THERE: Final = "@FOLDER@"
_JOB_THERE: Final = "@JOB@"


def helper_slots(spec: JobSpec, count: int) -> tuple[int, int]:
    """The nodes of a job whose runs the site's own packer starts, and the runs at a time on each.

    `array.pack` run on each node; all runs, or `array.max_parallel`, fill the nodes.
    """
    array = spec.array
    assert array is not None
    pack = array.pack or 1
    if array.pack_per is PackPer.GPU or spec.nodes > 1:
        raise NotPossible(
            f"`{'nodes' if spec.nodes > 1 else 'array.pack_per'}`: the target's ht_helper starts each run on one node and keeps it to no GPU",
            hint="use a target without ht_helper",
        )
    if array.pack is None:
        return 1, 1
    return math.ceil(min(count, array.max_parallel or count) / pack), pack


def render_task_file(python: str, settings: SlurmSettings, indices: Sequence[int]) -> str:
    """A line for each run, for `ht_helper.sh -t`, which starts them on the slots that it finds, in any order."""
    shim = f'{shlex.quote(python)} "{_FOLDER_THERE}/shim.py" "{_FOLDER_THERE}" --native {_JOB_THERE}'
    tail = f" --scratch {_expanding(settings.scratch)}" if settings.scratch else ""
    return "".join(f"{shim} --index {index}{tail}\n" for index in indices)


def render_ht_script(job: str, settings: SlurmSettings, profile: Profile) -> str:
    """The batch script that hands a task file to `ht_helper.sh`, with the run folder and the job's id in its lines."""
    assert settings.ht_helper is not None
    lines = ["#!/bin/bash -l" if profile.setup else "#!/bin/bash", f"# {job}: run folder, part"]
    lines += ["unset SLURM_EXPORT_ENV", *profile.setup, 'tasks="$1/slurm/tasks.$SLURM_JOB_ID"']
    lines.append(f'sed "s|{_FOLDER_THERE}|$1|g; s|{_JOB_THERE}|$SLURM_JOB_ID|g" "$1/artefacts/tasks.txt" >"$tasks"')
    lines.append(f'exec {settings.ht_helper} -t "$tasks"')
    return "\n".join(lines) + "\n"
