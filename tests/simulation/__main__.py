"""Tries seeds, replays one, and shrinks one: `python -m tests.simulation --help`."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field

from tests.simulation.choices import read_tape, write_tape
from tests.simulation.patched import SEEDS, find_broken, find_patches
from tests.simulation.scenarios import SCENARIOS, Result, run
from tests.simulation.shrink import shrink

AGAIN_EVERY = 20
"""One seed in so many runs twice, and both runs must be equal."""

SPAN = 5
"""Worlds that a process tries between two reports."""

COLLECT_EVERY = 10
"""Garbage is collected between worlds, once in so many."""

REPORTED_EVERY_S = 60.0
"""A long run says how far it is once in so many seconds."""


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation",
        description="Run the real code in simulated worlds, each of which follows from its seed.",
        epilog="examples: run control --seeds 10000 · run workers --seconds 60 · replay control 174 · shrink control 174",
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    runs = verbs.add_parser("run", help="try many seeds; exits 1 if a law is broken")
    runs.add_argument("scenario", choices=SCENARIOS)
    runs.add_argument("--seeds", type=int, help="how many (default: as many as fit into --seconds)")
    runs.add_argument("--seconds", type=float, default=60.0, help="stop after this time without --seeds (default 60)")
    runs.add_argument("--first", type=int, help="the first seed (default: drawn)")
    runs.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    runs.add_argument("--keep-going", action="store_true", help="go on after a law was broken, and count")
    for verb, about in (
        ("replay", "run one world again, and print what happened"),
        ("shrink", "find the shortest tape that breaks the same law"),
    ):
        one = verbs.add_parser(verb, help=about)
        one.add_argument("scenario", choices=SCENARIOS)
        one.add_argument("seed", help="a seed, or a tape in quotes")
        one.add_argument("--seconds", type=float, default=60.0, help="how long to shrink (default 60)")
        one.add_argument("--all", action="store_true", help="print every step, not the last 200")
    finds = verbs.add_parser("find", help="try seeds until one breaks a law, shrink its tape, and print both as JSON")
    finds.add_argument("scenario", choices=SCENARIOS)
    finds.add_argument("--seeds", type=int, default=2000)
    finds.add_argument("--first", type=int, default=1)
    finds.add_argument("--seconds", type=float, default=20.0, help="how long to shrink (default 20)")
    taken_out = verbs.add_parser("patches", help="take out what was once mended, and see that a seed finds each")
    taken_out.add_argument("names", nargs="*", help="of files in tests/simulation/patches (default: all)")
    taken_out.add_argument("--seeds", type=int, default=SEEDS)
    verbs.add_parser("scenarios", help="print their names")
    told = parser.parse_args(args)
    if told.verb == "scenarios":
        print(*SCENARIOS, sep="\n")
        return 0
    if told.verb == "run":
        return run_many(told)
    if told.verb == "find":
        return find(told.scenario, told.first, told.seeds, told.seconds)
    if told.verb == "patches":
        return try_patches(told.names, seeds=told.seeds)
    seed, tape = (int(told.seed), None) if told.seed.isdigit() else (0, read_tape(told.seed))
    result = run(told.scenario, seed, tape)
    if told.verb == "shrink":
        if result.broken is None:
            print("no law is broken")
            return 2
        law = result.broken.law
        tape = shrink(lambda tape: law_of(run(told.scenario, 0, tape)), result.tape, law, patience_s=told.seconds)
        print(f"{len(result.tape)} decisions, {len(tape)} after shrinking:\n{write_tape(tape)}\n")
        seed = 0
    show(run(told.scenario, seed, tape, tracing=True), most=None if told.all else 200)
    return 1 if result.broken else 0


def find(scenario: str, first: int, seeds: int, seconds: float) -> int:
    for tried, seed in enumerate(range(first, first + seeds), 1):
        result = run(scenario, seed)
        if result.broken is not None:
            law = result.broken.law
            tape = shrink(lambda tape: law_of(run(scenario, 0, tape)), result.tape, law, patience_s=seconds)
            print(json.dumps({"tried": tried, "seed": seed, "law": law, "tape": write_tape(tape)}))
            return 1
    print(json.dumps({"tried": seeds}))
    return 0


def try_patches(names: list[str], *, seeds: int) -> int:
    missed = 0
    for patch in find_patches(names):
        began = time.monotonic()
        found = find_broken(patch, seeds=seeds, shrink_s=20.0)
        took = time.monotonic() - began
        if found is None:
            missed += 1
            print(
                f"MISSED {patch.name}: no law is broken in {seeds:,} seeds of {patch.scenario} ({took:.0f} s)",
                flush=True,
            )
            continue
        print(
            f"{patch.name}: seed {found.seed} of {patch.scenario} ({took:.0f} s): {found.law}\n  {found.tape}",
            flush=True,
        )
    return 1 if missed else 0


def law_of(result: Result) -> str | None:
    return result.broken.law if result.broken else None


def show(result: Result, *, most: int | None) -> None:
    lines = result.trace or []
    print("\n".join(lines if most is None else lines[-most:]))
    if result.cause is not None:
        import traceback

        traceback.print_exception(result.cause)
    print(f"\n{result.steps} steps, {result.seconds:.0f} s: {result.broken or 'every law holds'}")


def run_many(told: argparse.Namespace) -> int:
    first = told.first if told.first is not None else random.SystemRandom().randrange(10**9)
    began = time.monotonic()
    seen = Seen()
    parts = spans(first, told.seeds, began + told.seconds)
    running: set[Future[Seen]] = set()
    pool = ProcessPoolExecutor(told.processes, multiprocessing.get_context("fork"), initializer=begin_process)
    with pool, contextlib.suppress(KeyboardInterrupt):
        for span in parts:
            running.add(pool.submit(run_some, told.scenario, span))
            while len(running) >= 2 * told.processes:
                running = collect(running, seen, told.scenario)
            if seen.broken and not told.keep_going:
                break
            if time.monotonic() - began > REPORTED_EVERY_S * (seen.reports + 1):
                seen.reports += 1
                print(seen.describe(told.scenario, time.monotonic() - began), file=sys.stderr, flush=True)
        while running:
            running = collect(running, seen, told.scenario)
    print(
        seen.describe(told.scenario, time.monotonic() - began), f"with {told.processes} processes, seeds from {first}"
    )
    for law, count in seen.broken.most_common():
        seed, what = seen.examples[law]
        print(f"BROKEN in {count:,}: {what}\n  python -m tests.simulation shrink {told.scenario} {seed}")
    return 1 if seen.broken else 0


def spans(first: int, count: int | None, until: float) -> Iterator[range]:
    """Consecutive seeds, a few worlds at a time."""
    last = sys.maxsize if count is None else first + count
    while first < last if count is not None else time.monotonic() < until:
        yield range(first, min(first + SPAN, last))
        first += SPAN


def begin_process() -> None:
    """Ctrl-C ends the parent, which then prints what was seen; garbage is collected between worlds alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()
    gc.disable()


def collect(running: set[Future[Seen]], seen: Seen, scenario: str) -> set[Future[Seen]]:
    done, rest = wait(running, return_when=FIRST_COMPLETED)
    for one in done:
        seen.add(one.result(), scenario)
    return rest


@dataclass
class Seen:
    """What some worlds came to."""

    worlds: int = 0
    steps: int = 0
    virtual_s: float = 0.0
    worked_s: float = 0.0
    reports: int = 0
    broken: Counter[str] = field(default_factory=Counter)
    examples: dict[str, tuple[int, str]] = field(default_factory=dict)
    """By law a seed that breaks it, and what is broken there."""

    def add(self, other: Seen, scenario: str) -> None:
        self.worlds, self.steps = self.worlds + other.worlds, self.steps + other.steps
        self.virtual_s, self.worked_s = self.virtual_s + other.virtual_s, self.worked_s + other.worked_s
        self.broken.update(other.broken)
        for law, (seed, what) in other.examples.items():
            if law not in self.examples:
                print(f"broken: {what}: {scenario} {seed}", file=sys.stderr, flush=True)
            self.examples.setdefault(law, (seed, what))

    def describe(self, scenario: str, took_s: float) -> str:
        worked_h = self.worked_s / 3600
        return (
            f"{scenario}: {self.worlds:,} worlds, {self.steps:,} steps, {self.virtual_s / 3600:,.1f} virtual hours, "
            f"{worked_h:,.1f} of workers, {self.broken.total():,} broken, in {took_s:.1f} s: "
            f"{self.worlds / took_s:,.0f} worlds and {worked_h / took_s:,.2f} hours of workers a second"
        )


def run_some(scenario: str, span: range) -> Seen:
    seen = Seen()
    for seed in span:
        if seed % COLLECT_EVERY == 0:
            gc.collect()
        result = run(scenario, seed)
        seen.worlds, seen.steps = seen.worlds + 1, seen.steps + result.steps
        seen.virtual_s, seen.worked_s = seen.virtual_s + result.seconds, seen.worked_s + result.worked_s
        if seed % AGAIN_EVERY == 0 and differs(result, run(scenario, seed)):
            seen.broken["a seed is the whole run"] += 1
            seen.examples.setdefault("a seed is the whole run", (seed, f"seed {seed} ran differently the second time"))
        if result.broken is not None:
            seen.broken[result.broken.law] += 1
            seen.examples.setdefault(result.broken.law, (seed, str(result.broken)))
    return seen


def differs(one: Result, other: Result) -> bool:
    return (one.tape, one.steps, one.seconds, law_of(one)) != (other.tape, other.steps, other.seconds, law_of(other))


if __name__ == "__main__":
    sys.exit(main())
