"""Costs of launching, watching and running jobs: ours, submitit's and those of Slurm's own commands."""

from __future__ import annotations

import functools
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.processes import environment, executable
from runtime.queues.sqlite.queue import open_sqlite
from runtime.snapshots.cache import SETTLED_NS
from runtime.tasks.model import TaskState

_HPC = '[targets.hpc]\nkind = "slurm"\nrecords = "{records}"\nflags = ["--hold"]\n'
_OTHERS = (
    '[targets.far]\nkind = "ssh"\nhost = "nowhere.invalid"\nrecords = "/scratch/runtime"\n'
    '[targets.pods]\nkind = "kubernetes"\ncontext = "nowhere"\nnamespace = "bench"\nrecords = "claim://records"\n'
    'image = "python:3.12"\n'
)


def make_tree(folder: Path, *, files: int, config: str = "") -> Path:
    """A committed git tree of source files of 4 kB."""
    random.seed(1)
    for number in range(files):
        path = folder / f"package{number // 50}" / f"module{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(random.choices(range(32, 127), k=4000)))
    (folder / "job.py").write_text("")
    (folder / "runtime.toml").write_text(config)
    author = ["-c", "user.name=bench", "-c", "user.email=bench@example.org"]
    for words in (["init", "-q"], ["add", "-A"], [*author, "commit", "-q", "-m", "code"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    return folder


def timed(action: Callable[[], object], n: int) -> float:
    """Median milliseconds of `n` calls, after one to warm up."""
    action()
    times = []
    for _ in range(n):
        began = time.perf_counter()
        action()
        times.append((time.perf_counter() - began) * 1000)
    return statistics.median(times)


def snapshot(folder: Path, services: Mapping[str, Any], *, files: int, repeats: int = 7) -> dict[str, float]:
    """Time that the code of `files` files adds to `runtime submit` of one command; medians, with and without code in turns.

    The code was submitted before and is either unchanged or has one edited file.
    """
    tree = make_tree(folder / "tree", files=files)
    environ = environment({"RUNTIME_DATA_DIR": str(folder / "data"), "XDG_CACHE_HOME": str(folder / "cache")})
    time.sleep(SETTLED_NS / 1e9)
    times: dict[str, list[float]] = {"without": [], "same": [], "edited": []}
    for turn in range(repeats + 1):
        for name, found in times.items():
            if name == "edited":
                (tree / "job.py").write_text(f"# {turn}\n")
            options = ["--no-snapshot"] if name == "without" else []
            began = time.perf_counter()
            words = [executable("runtime"), "submit", *options, "--key", f"{name} {turn}", "--", "true"]
            _quiet(words, cwd=tree, env=environ)
            if turn:
                found.append((time.perf_counter() - began) * 1000)
    without, same, edited = (statistics.median(times[name]) for name in ("without", "same", "edited"))
    return {"submit_ms": same, "added_ms": same - without, "edited_ms": edited - without}


def carried(folder: Path, services: Mapping[str, Any], *, n: int, files: int) -> dict[str, float]:
    """`n` commands `true` through `runtime submit` and one worker of one slot, with their code and without it: from the
    first start to the last end, and CPU of the worker and all it starts."""
    tree = make_tree(folder / "tree", files=files)
    found = {}
    for name, options in (("without", ["--no-snapshot"]), ("with", [])):
        data = folder / name
        environ = environment({"RUNTIME_DATA_DIR": str(data), "XDG_CACHE_HOME": str(folder / "cache")})
        lines = folder / f"{name}.jsonl"
        lines.write_text("".join(json.dumps({"command": ["true"], "key": str(number)}) + "\n" for number in range(n)))
        _quiet([executable("runtime"), "submit", *options, "--from", str(lines)], cwd=tree, env=environ)
        before = _cpu()
        _quiet([executable("runtime"), "worker", "--idle-timeout", "0.1s"], cwd=tree, env=environ)
        found[f"{name}_cpu_ms"] = (_cpu() - before) / n * 1000
        found[f"{name}_rate"] = _rate(data / "local.db", n)
    return {**found, "added_cpu_ms": found["with_cpu_ms"] - found["without_cpu_ms"]}


def _rate(path: Path, n: int) -> float:
    queue, records = open_sqlite(path)
    ended = [record for seen in records.experiments() for record in records.records(seen.name)]
    queue.close()
    records.close()
    if len(ended) != n or {record.state for record in ended} != {TaskState.SUCCEEDED}:
        raise RuntimeError(f"{len(ended)} of {n} tasks ended, or some failed")
    span = max(record.ended_at for record in ended) - min(record.started_at or record.ended_at for record in ended)
    return n / span.total_seconds()


def plan(folder: Path, services: Mapping[str, Any], *, files: int) -> dict[str, float]:
    """Seconds of `runtime launch --dry-run` from its start to its end, in a tree of `files` files."""
    tree = make_tree(folder / "tree", files=files, config=_HPC.format(records=folder / "records") + _OTHERS)
    environ = environment({"RUNTIME_DATA_DIR": str(folder / "data")})

    def run(target: str) -> None:
        words = ["launch", "--dry-run", "--on", target, "--", "python", "job.py"]
        _quiet([executable("runtime"), *words], cwd=tree, env=environ)

    return {
        f"{target}_s": timed(functools.partial(run, target), 3) / 1000 for target in ("local", "hpc", "far", "pods")
    }


def _quiet(words: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> None:
    done = subprocess.run(words, cwd=cwd, env=dict(env), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{words} ended with {done.returncode}: {done.stderr[-500:]}")


# CPU of jobs on this machine


def _cpu() -> float:
    """CPU time of this process and all its descendants that have ended, orphans included."""
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        pass
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def local(folder: Path, services: Mapping[str, Any], *, n: int) -> dict[str, float]:
    """An array of Python processes, each in a tree of its own, two at a time; the CPU of the launch counts."""
    os.environ["RUNTIME_DATA_DIR"] = str(folder / "data")
    import runtime

    os.chdir(make_tree(folder / "tree", files=10))
    before, began = _cpu(), time.perf_counter()
    with runtime.launch(
        {"command": [sys.executable, "job.py"], "array": {"count": n, "max_parallel": 2}}, on="local"
    ) as job:
        status = job.wait()
    span = time.perf_counter() - began
    if status.counts != {"succeeded": n}:
        raise RuntimeError(f"not all succeeded: {status.counts}")
    return {"cpu_ms": (_cpu() - before) / n * 1000, "rate": n / span}


def local_single(folder: Path, services: Mapping[str, Any], *, n: int) -> dict[str, float]:
    """The same, launched one by one."""
    os.environ["RUNTIME_DATA_DIR"] = str(folder / "data")
    import runtime

    os.chdir(make_tree(folder / "tree", files=10))
    before = _cpu()
    for number in range(n):
        with runtime.launch({"command": [sys.executable, "job.py"], "idempotency_key": str(number)}, on="local") as job:
            job.wait()
    return {"cpu_ms": (_cpu() - before) / n * 1000}


def local_submitit(folder: Path, services: Mapping[str, Any], *, n: int) -> dict[str, float]:
    """Functions through its LocalExecutor, two at a time."""
    import submitit

    executor = submitit.LocalExecutor(folder=folder / "submitit")
    before, began = _cpu(), time.perf_counter()
    for _ in range(n // 2):
        for job in [executor.submit(nothing) for _ in range(2)]:
            job.result()
    span = time.perf_counter() - began
    return {"cpu_ms": (_cpu() - before) / n * 1000, "rate": n / span}


def nothing() -> None:
    pass


# Slurm: jobs are held, so that nothing runs meanwhile, and cancelled afterwards


def _sbatch(*words: str) -> None:
    subprocess.run(["sbatch", "--parsable", "--hold", *words, "--wrap=true"], check=True, stdout=subprocess.DEVNULL)


def _clear(env: Mapping[str, str] | None = None) -> None:
    subprocess.run(["scancel", "--state=PENDING", "--user", str(os.getuid())], env=env, check=True)


def slurm_array(folder: Path, services: Mapping[str, Any], *, n: int, repeats: int = 3) -> dict[str, float]:
    """Ours, one raw `sbatch --array` and submitit's `map_array`, in turns, each with `n` tasks; medians."""
    os.environ |= {"SLURM_CONF": services["slurm"], "RUNTIME_DATA_DIR": str(folder / "data")}
    import submitit

    import runtime

    os.chdir(make_tree(folder / "tree", files=10, config=_HPC.format(records=folder / "records")))
    executor = submitit.SlurmExecutor(folder=folder / "submitit")
    executor.update_parameters(time=10, additional_parameters={"hold": True})

    def ours(turn: int) -> None:
        job = {"command": ["true"], "array": {"count": n}, "idempotency_key": str(turn)}
        runtime.launch(job, on="hpc").close()

    actions: dict[str, Callable[[int], object]] = {
        "raw": lambda turn: _sbatch(f"--array=0-{n - 1}"),
        "ours": ours,
        "submitit": lambda turn: executor.map_array(abs, range(n)),
    }
    times: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(repeats + 1):
        for name, action in actions.items():
            began = time.perf_counter()
            action(turn)
            if turn:
                times[name].append((time.perf_counter() - began) * 1000)
            _clear()
    return {f"{name}_ms": statistics.median(found) for name, found in times.items()}


def slurm_cold(folder: Path, services: Mapping[str, Any], *, repeats: int = 7) -> dict[str, float]:
    """One command as a job: the whole command `runtime launch`, and a whole script that does it with submitit, in turns;
    median milliseconds from start to end, and of the CPU of the whole process tree."""
    tree = make_tree(folder / "tree", files=10, config=_HPC.format(records=folder / "records"))
    folders = {"RUNTIME_DATA_DIR": str(folder / "data"), "XDG_CACHE_HOME": str(folder / "cache")}
    environ = environment({**folders, "SLURM_CONF": services["slurm"]})
    script = Path(__file__).parent / "limits" / "launch_submitit.py"
    launch = [executable("runtime"), "launch", "--on", "hpc", "--", "true"]
    commands = {
        "ours": lambda turn: [*launch, str(turn)],
        "submitit": lambda turn: [sys.executable, str(script), str(folder / "submitit"), "true", str(turn)],
    }
    found: dict[str, list[float]] = {f"{name}_{what}": [] for name in commands for what in ("ms", "cpu_ms")}
    for turn in range(repeats + 1):
        for name, words in commands.items():
            before, began = _cpu(), time.perf_counter()
            _quiet(words(turn), cwd=tree, env=environ)
            span = time.perf_counter() - began
            if turn:
                found[f"{name}_ms"].append(span * 1000)
                found[f"{name}_cpu_ms"].append((_cpu() - before) * 1000)
    _clear(environ)
    return {name: statistics.median(times) for name, times in found.items()}


def slurm_singles(folder: Path, services: Mapping[str, Any], *, n: int) -> dict[str, float]:
    """`n` calls of `sbatch`."""
    os.environ["SLURM_CONF"] = services["slurm"]
    began = time.perf_counter()
    for _ in range(n):
        _sbatch()
    span = time.perf_counter() - began
    _clear()
    return {"ms": span * 1000}


def slurm_status(folder: Path, services: Mapping[str, Any], *, n: int, repeats: int = 5) -> dict[str, float]:
    """`runtime status` of `n` jobs that were launched one by one, and `squeue`, in turns; seconds from start to end."""
    os.environ |= {"SLURM_CONF": services["slurm"], "RUNTIME_DATA_DIR": str(folder / "data")}
    import runtime

    tree = make_tree(folder / "tree", files=10, config=_HPC.format(records=folder / "records"))
    os.chdir(tree)
    environ = environment({"RUNTIME_DATA_DIR": str(folder / "data"), "SLURM_CONF": services["slurm"]})
    began = time.perf_counter()
    for number in range(n):
        runtime.launch({"command": ["true"], "idempotency_key": str(number)}, on="hpc").close()
    launched = time.perf_counter() - began
    status = [executable("runtime"), "status", "--on", "hpc"]
    seen = json.loads(
        subprocess.run([*status, "-o", "json"], cwd=tree, env=environ, capture_output=True, check=True).stdout
    )
    if [each["state"] for each in seen["jobs"]] != ["pending"] * n:
        raise RuntimeError(f"{len(seen['jobs'])} jobs are seen, {n} wait")
    times: dict[str, list[float]] = {"status": [], "squeue": []}
    for _ in range(repeats):
        for name, words in (("status", status), ("squeue", ["squeue"])):
            began = time.perf_counter()
            _quiet(words, cwd=tree, env=environ)
            times[name].append(time.perf_counter() - began)
    _clear()
    return {
        "status_s": statistics.median(times["status"]),
        "squeue_s": statistics.median(times["squeue"]),
        "launch_ms": launched / n * 1000,
    }
