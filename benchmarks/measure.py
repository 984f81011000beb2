"""The measurements themselves: each takes a place and returns numbers, and knows nothing of goals."""

from __future__ import annotations

import importlib
import os
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.board import Board
from benchmarks.peers.base import Peer, Place
from benchmarks.processes import cpu_seconds, kill, pss_bytes, tree

Numbers: TypeAlias = dict[str, float]
PATIENCE_S = 120.0
LEARNING = 50
"""Tasks by which a worker adapts to how long they take."""


class Unexpected(Exception):
    """The way a measurement went makes its number worthless."""


def open_peer(name: str, place: Place, options: Mapping[str, Any]) -> Peer:
    return importlib.import_module(f"benchmarks.peers.{name}").PEER(place, options)


def new_place(folder: Path, slots: int, services: Mapping[str, Any]) -> Place:
    return Place(folder, Board(folder / "board", slots), services)


def drain(
    folder: Path,
    services: Mapping[str, Any],
    *,
    peer: str,
    n: int,
    body: str = "noop",
    workers: int = 1,
    options: Mapping[str, Any] | None = None,
) -> Numbers:
    """Queue `n` tasks, then start workers; from the first start to the last end.

    CPU is the time that the process trees used meanwhile, so no start-up counts.
    """
    place = new_place(folder, n + 1, services)
    board, indices = place.board, range(n)
    one = open_peer(peer, place, options or {})
    one.prepare()
    try:
        if one.driver_runs_workers:
            one.start(workers)
        began = time.perf_counter()
        one.put_many(body, indices)
        enqueue_s = time.perf_counter() - began
        if not one.driver_runs_workers:
            one.start(workers)
        _await_begun(one, board, 0)
        done_at_first = board.count_done(indices)
        worker_cpu, broker_cpu = cpu_seconds(one.roots()), cpu_seconds(one.brokers())
        one.wait(indices, PATIENCE_S)
        worker_cpu = cpu_seconds(one.roots()) - worker_cpu
        broker_cpu = cpu_seconds(one.brokers()) - broker_cpu
        span = board.span(range(n))
        shares = board.shares(indices, by_parent=one.children_run_tasks)
    finally:
        one.stop()
    counted = max(1, n - done_at_first) / 1000
    return {
        "rate": n / span,
        "overhead_ms": span * workers / n * 1000 - (10 if body == "cpu" else 0),
        "enqueue_rate": n / enqueue_s,
        "worker_cpu_s": worker_cpu / counted,
        "cpu_s": (worker_cpu + broker_cpu) / counted,
        "lesser_share": min(shares) if len(shares) >= workers else 0.0,
        **faults(board, indices),
    }


def _await_begun(one: Peer, board: Board, index: int, *, timeout_s: float = 60.0) -> None:
    deadline = time.perf_counter() + timeout_s
    while not board.wait_begun(index, timeout_s=0.5):
        if time.perf_counter() > deadline or not one.alive():
            raise Unexpected("no task began" if one.alive() else "the worker ended before a task began")


def faults(board: Board, indices: range) -> Numbers:
    return {"lost": board.lost(indices), "repeated": board.repeated(indices)}


def enqueue(
    folder: Path,
    services: Mapping[str, Any],
    *,
    peer: str,
    n: int,
    single: bool = True,
    options: Mapping[str, Any] | None = None,
) -> Numbers:
    """Put tasks while no worker runs: one by one, or in the peer's bulk; CPU is the caller's and its broker's."""
    place = new_place(folder, 1, services)
    one = open_peer(peer, place, options or {})
    one.prepare()
    try:
        if single:
            for index in range(3):
                one.put("noop", index)
        else:
            one.put_many("noop", range(3))
        began, cpu = time.perf_counter(), _own_cpu() + cpu_seconds(one.brokers())
        if single:
            for index in range(3, n + 3):
                one.put("noop", index)
        else:
            one.put_many("noop", range(3, n + 3))
        spent = _own_cpu() + cpu_seconds(one.brokers()) - cpu
        return {"rate": n / (time.perf_counter() - began), "cpu_us": spent / n * 1e6}
    finally:
        one.stop()


def _own_cpu() -> float:
    """CPU time of this process and the children it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def enqueue_made(folder: Path, services: Mapping[str, Any], *, n: int) -> Numbers:
    """Our bulk put of tasks that exist already, so that only the queue's part is timed."""
    from benchmarks.peers.ours import Ours, make_task

    one = Ours(new_place(folder, 1, services))
    one.prepare()
    try:
        tasks = [make_task("noop", index) for index in range(n)]
        one.put_many("noop", range(n, n + 1))
        began = time.perf_counter()
        one.put_alone(tasks)
        return {"rate": n / (time.perf_counter() - began)}
    finally:
        one.stop()


def latency(
    folder: Path,
    services: Mapping[str, Any],
    *,
    peer: str,
    n: int = 200,
    idle_s: float = 0.0,
    options: Mapping[str, Any] | None = None,
) -> Numbers:
    """Singles 20–40 ms apart on an idle worker, from before the enqueue call to the body's first line.

    With `idle_s`, also the CPU of a worker that idles for that long, and the latency of the start after it.
    """
    place = new_place(folder, n + 30, services)
    board = place.board
    one = open_peer(peer, place, options or {})
    one.prepare()
    try:
        one.start(1)
        warm_up = range(n, n + 20)
        for index in warm_up:
            one.put("noop", index)
            _await_begun(one, board, index)
            time.sleep(0.02)
        starts = [_start_of(one, board, index, pause_s=0.02 + (index * 7 % 20) / 1000) for index in range(n)]
        found = {
            "p50_ms": statistics.median(starts) * 1000,
            "p99_ms": sorted(starts)[int(0.99 * n)] * 1000,
            **faults(board, range(n)),
        }
        if idle_s:
            found |= _idle(one, idle_s)
            found["after_idle_ms"] = _start_of(one, board, n + 20, pause_s=0) * 1000
        return found
    finally:
        one.stop()


def _start_of(one: Peer, board: Board, index: int, *, pause_s: float) -> float:
    time.sleep(pause_s)
    before = time.perf_counter()
    one.put("noop", index)
    # Polled rarely, because polling competes for the two CPUs with the measured processes.
    if not board.wait_begun(index, timeout_s=30, every_s=0.004):
        raise Unexpected("a single task did not begin")
    return board.first_start(index) - before


def _idle(one: Peer, idle_s: float) -> Numbers:
    time.sleep(1.0)
    before, began = cpu_seconds(one.roots()), time.perf_counter()
    time.sleep(idle_s)
    used, span = cpu_seconds(one.roots()) - before, time.perf_counter() - began
    return {"idle_cpu_percent": 100 * used / span, "pss_mb": pss_bytes(one.roots()) / 1e6}


def idle(
    folder: Path,
    services: Mapping[str, Any],
    *,
    peer: str,
    seconds: float,
    options: Mapping[str, Any] | None = None,
) -> Numbers:
    """Measure the cost of a worker that has run one task and waits for the next."""
    return latency(folder, services, peer=peer, n=1, idle_s=seconds, options=options)


def cold_start(
    folder: Path, services: Mapping[str, Any], *, peer: str, options: Mapping[str, Any] | None = None
) -> Numbers:
    """From starting the worker's process to the end of the one task that was queued."""
    place = new_place(folder, 2, services)
    one = open_peer(peer, place, options or {})
    one.prepare()
    try:
        one.put("noop", 0)
        began = time.perf_counter()
        one.start(1)
        if not place.board.wait(range(1), timeout_s=30, every_s=0.002):
            raise Unexpected("the task did not end")
        return {"seconds": place.board.end(0) - began}
    finally:
        one.stop()


def forked(
    folder: Path,
    services: Mapping[str, Any],
    *,
    n: int,
    heavy: int,
    options: Mapping[str, Any] | None = None,
) -> Numbers:
    """Our worker with a process for each task: no-ops, then tasks that import 300 MB, then no-ops again.

    Of these last no-ops, only those count that start after the worker has adapted to short tasks again.
    """
    from benchmarks.peers.ours import Ours

    place = new_place(folder, 2 * n + heavy, services)
    board = place.board
    before, large, after = range(n), range(n, n + heavy), range(n + heavy, 2 * n + heavy)
    one = Ours(place, {**(options or {}), "reuse": False})
    one.prepare()
    try:
        one.put_many("noop", before)
        one.put_many("heavy", large)
        one.put_many("noop", after)
        one.start(1)
        if not one.wait(range(board.slots), PATIENCE_S):
            raise Unexpected("not all tasks ended")
    finally:
        one.stop()
    return {
        "rate": n / board.span(before),
        "rate_heavy": heavy / board.span(large),
        "rate_after_heavy": (n - LEARNING) / board.span(after[LEARNING:]),
        **faults(board, range(board.slots)),
    }


def redelivery(
    folder: Path,
    services: Mapping[str, Any],
    *,
    peer: str,
    how: str,
    options: Mapping[str, Any] | None = None,
    timeout_s: float = 120.0,
    at_second: int | None = None,
) -> Numbers:
    """A second worker runs and waits; from the loss of the first to the second start of its task.

    `how` is `kill` (SIGKILL to all its processes), or `stop` (SIGSTOP: its processes exist and do not answer).
    With `at_second`, the loss comes at that second of a minute.
    """
    place = new_place(folder, 4, services)
    board = place.board
    one = open_peer(peer, place, options or {})
    one.prepare()
    victims: list[int] = []
    try:
        one.start(2 if one.driver_runs_workers else 1)
        one.put("stuck_once", 0)
        _await_begun(one, board, 0)
        if one.driver_runs_workers:
            victims = [board.pid(0)]
        else:
            victims = tree(one.roots())
            one.start(1)
        # At a random moment of the rhythm in which the second worker polls.
        time.sleep(2.5 + random.random())
        if at_second is not None:
            time.sleep((at_second - time.time() % 60) % 60)
        if how == "stop":
            import signal

            lost_at = time.perf_counter()
            kill(victims, signal.SIGSTOP)
        else:
            lost_at = time.perf_counter()
            kill(victims)
        if not board.wait_begun(0, 2, timeout_s=timeout_s, every_s=0.005):
            raise Unexpected(f"not within {timeout_s:g} s")
        return {"seconds": board.start(0) - lost_at}
    finally:
        kill(victims)
        one.stop()


def kept_leases(
    folder: Path, services: Mapping[str, Any], *, n: int, slots: int, lease_s: float, times: float
) -> Numbers:
    """Two live workers run `n` tasks that each take `times` as long as the lease: how many start more than once."""
    from benchmarks.peers.ours import Ours, make_task

    place = new_place(folder, n, services)
    board, indices = place.board, range(n)
    one = Ours(place, {"slots": slots, "lease": f"{lease_s:g}s", "look_ahead": 0})
    one.prepare()
    try:
        one.put_alone([make_task("sleep", index, lease_s * times) for index in indices])
        one.start(2)
        if not one.wait(indices, PATIENCE_S):
            raise Unexpected(f"{board.lost(indices)} of {n} tasks did not end")
        time.sleep(lease_s * 2)
        return {"repeated": float(board.repeated(indices)), "leases": float(n), "lost": float(board.lost(indices))}
    finally:
        one.stop()


def backlog(
    folder: Path, services: Mapping[str, Any], *, queued: int, file: str | None = None, window: int = 1000
) -> Numbers:
    """Drain `window` tasks while about `queued` wait, in a new file or in the one given; the median of three workers."""
    from benchmarks.peers.ours import Ours

    turns = 3
    queue = f"backlog-{time.time_ns()}"
    slots = queued if queued <= window else queued + turns * window
    rates = []
    for turn in range(turns):
        fresh = turn == 0 or queued <= window
        board = Board(folder / "board", slots)
        one = Ours(Place(Path(file) if file else folder, board, services), {"max_tasks": window, "queue": queue})
        one.prepare()
        try:
            if fresh:
                one.salt = f"{queue} {turn} "
                one.put_many("noop", range(slots))
            one.start(1)
            one.workers[0].wait(PATIENCE_S)
        finally:
            one.stop()
        ran = [index for index in range(slots) if board.times_ended(index)]
        if len(ran) != window:
            raise Unexpected(f"{len(ran)} tasks ran, expected {window}")
        rates.append(window / board.span(ran))
    return {"rate": statistics.median(rates)}


def publish(folder: Path, services: Mapping[str, Any], *, peer: str, n: int) -> Numbers:
    """Publish messages that are made already, all confirmed by the service."""
    from benchmarks.peers.ours import make_task
    from benchmarks.peers.pubsub import encode

    one: Any = open_peer(peer, new_place(folder, 1, services), {})
    one.prepare()
    try:
        one.put("noop", 0)
        if peer == "pubsub":
            messages = [encode("noop", index) for index in range(n)]
            began = time.perf_counter()
            one.publish(messages)
        else:
            tasks = [make_task("noop", index) for index in range(n)]
            began = time.perf_counter()
            one.put_alone(tasks)
        return {"rate": n / (time.perf_counter() - began)}
    finally:
        one.stop()


def limit(folder: Path, services: Mapping[str, Any], *, name: str, **parameters: Any) -> Numbers:
    """Measure a limit of the machine: a function of `benchmarks.limits`."""
    module, _, function = name.partition(":")
    measure: Callable[..., Numbers] = getattr(importlib.import_module(f"benchmarks.limits.{module}"), function)
    return measure(folder, **parameters)


def jobs(folder: Path, services: Mapping[str, Any], *, name: str, **parameters: Any) -> Numbers:
    """Measure jobs: a function of `benchmarks.jobs`."""
    found: Numbers = getattr(importlib.import_module("benchmarks.jobs"), name)(folder, services, **parameters)
    return found


def calls(folder: Path, services: Mapping[str, Any], *, name: str, **parameters: Any) -> Numbers:
    """Measure calls of a function: a function of `benchmarks.calls`."""
    found: Numbers = getattr(importlib.import_module("benchmarks.calls"), name)(folder, services, **parameters)
    return found


def in_new_process(command: Sequence[str], *, environ: Mapping[str, str], timeout_s: float = PATIENCE_S) -> str:
    """Run a program in a small process, because a fork of a large one would cost more; returns its standard output."""
    done = subprocess.run(command, env=dict(environ), capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode:
        raise Unexpected(done.stderr[-2000:])
    return done.stdout
