"""Calls of a function through each front door: made, run, and their values read. Two run at a time everywhere."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.jobs import make_tree
from benchmarks.processes import environment, executable


def with_run(_run: object, variant: int) -> int:
    return variant


def _per_call(began: float, values: list[int], n: int) -> dict[str, float]:
    span = time.perf_counter() - began
    if values != list(range(n)):
        raise RuntimeError(f"other values than expected: {values[:5]}")
    return {"ms": span / n * 1000, "us": span / n * 1e6}


def here(folder: Path, services: Mapping[str, Any], *, n: int) -> dict[str, float]:
    """`run_experiment` on `here`, and the calls alone."""
    import runtime

    began = time.perf_counter()
    found = [with_run(None, number) for number in range(n)]
    plain = _per_call(began, found, n)["us"]
    began = time.perf_counter()
    found = [runtime.run_experiment(with_run, number) for number in range(n)]
    return {"added_us": _per_call(began, found, n)["us"] - plain}


def mapped(folder: Path, services: Mapping[str, Any], *, n: int, target: str, reuse: bool = False) -> dict[str, float]:
    """`runtime.map` on a target, with a worker of two slots for one that is a queue, whose processes `reuse` keeps."""
    os.environ["RUNTIME_DATA_DIR"] = str(folder / "data")
    import runtime

    tree = make_tree(folder / "tree", files=10)
    os.chdir(tree)
    worker = None
    if target.startswith("queue:"):
        command = [executable("runtime"), "worker", "--slots", "2", *(["--reuse-process"] if reuse else [])]
        worker = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        runtime.map(abs, [0], target=target, name="warm").results()
    try:
        began = time.perf_counter()
        return _per_call(began, runtime.map(abs, range(n), target=target).results(), n)
    finally:
        if worker is not None:
            worker.terminate()
            worker.wait()


def submitit(folder: Path, services: Mapping[str, Any], *, n: int) -> dict[str, float]:
    """submitit's LocalExecutor, which starts everything that it is given at once: two at a time."""
    import submitit

    executor = submitit.LocalExecutor(folder=folder / "submitit")
    began = time.perf_counter()
    values = []
    for number in range(0, n, 2):
        values += [job.result() for job in executor.map_array(abs, range(number, number + 2))]
    return _per_call(began, values, n)


def huey(folder: Path, services: Mapping[str, Any], *, n: int) -> dict[str, float]:
    """huey on SQLite: its consumer has two processes, and is warm."""
    os.environ.update(environment({"BENCHMARK_FOLDER": str(folder)}))
    from benchmarks.peers import huey_app

    command = [executable("huey_consumer"), "benchmarks.peers.huey_app.huey", "-k", "process", "-w", "2", "--quiet"]
    consumer = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        huey_app.absolute(0).get(blocking=True)
        began = time.perf_counter()
        calls = [huey_app.absolute(number) for number in range(n)]
        return _per_call(began, [call.get(blocking=True) for call in calls], n)
    finally:
        consumer.terminate()
        consumer.wait()


def ray(folder: Path, services: Mapping[str, Any], *, n: int) -> dict[str, float]:
    """Ray on this machine, warm; its calls are lost with their driver."""
    os.environ["RAY_AUTH_MODE"] = "disabled"  # or it leaves a token in the user's home, which every later head asks for
    import ray as peer

    # A short path, because Ray makes Unix sockets below it.
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as short:
        peer.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR", _temp_dir=short)
        remote = peer.remote(with_run)
        peer.get([remote.remote(None, 0) for _ in range(2)])
        began = time.perf_counter()
        found = _per_call(began, peer.get([remote.remote(None, number) for number in range(n)]), n)
        peer.shutdown()
    return found
