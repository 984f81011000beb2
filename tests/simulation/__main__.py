"""Tries seeds, replays one, and shrinks one: `python -m tests.simulation --help`."""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tests.simulation.choices import read_tape, write_tape
from tests.simulation.patched import find_broken, find_patches, write_patch
from tests.simulation.scenarios import SCENARIOS, Result, run
from tests.simulation.shrink import shrink

AGAIN_EVERY = 20
"""One seed in so many runs twice, and both runs must be equal."""

COLLECT_EVERY = 10
"""Garbage is collected between worlds, once in so many."""


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
    taken_out.add_argument("--seeds", type=int, default=2000)
    taken_out.add_argument("--write", action="store_true", help="write laws and tapes into the files")
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
        return try_patches(told.names, seeds=told.seeds, write=told.write)
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


def try_patches(names: list[str], *, seeds: int, write: bool) -> int:
    missed = 0
    for patch in find_patches(names):
        began = time.monotonic()
        found = find_broken(patch, seeds=seeds)
        took = time.monotonic() - began
        if found is None:
            missed += 1
            print(f"MISSED {patch.name}: no law is broken in {seeds:,} seeds of {patch.scenario} ({took:.0f} s)")
            continue
        tried, known = found
        print(f"{patch.name}: seed {tried} of {patch.scenario} ({took:.0f} s): {known.law}\n  {known.tape}", flush=True)
        if write:
            write_patch(known)
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
    each = None if told.seeds is None else -(-told.seeds // told.processes)
    spans = [(first + number * 10**7, each) for number in range(told.processes)]
    began = time.monotonic()
    with multiprocessing.get_context("fork").Pool(told.processes) as pool:
        found = pool.starmap(
            run_some, [(told.scenario, start, each, told.seconds, told.keep_going) for start, each in spans]
        )
    took = time.monotonic() - began
    runs, steps, hours, worked = (sum(one[key] for one in found) for key in ("runs", "steps", "hours", "worked"))
    print(
        f"{told.scenario}: {runs:,} worlds, {steps:,} steps, {hours:,.1f} virtual hours, {worked:,.1f} of workers, "
        f"in {took:.1f} s with {told.processes} processes: {runs / took:,.0f} worlds and {worked / took:,.2f} "
        "hours of workers a second"
    )
    broken: Counter[str] = Counter()
    examples: dict[str, Any] = {}
    for one in found:
        broken.update(one["broken"])
        for law, example in one["examples"].items():
            examples.setdefault(law, example)
    for law, count in broken.most_common():
        seed, what = examples[law]
        print(f"BROKEN in {count:,}: {what}\n  python -m tests.simulation shrink {told.scenario} {seed}")
    return 1 if broken else 0


def run_some(scenario: str, first: int, count: int | None, seconds: float, keep_going: bool) -> dict[str, Any]:
    until = time.monotonic() + seconds
    runs = steps = 0
    virtual_s = worked_s = 0.0
    broken: Counter[str] = Counter()
    examples: dict[str, tuple[int, str]] = {}
    gc.freeze()
    gc.disable()
    for seed in seeds(first, count, until):
        if runs % COLLECT_EVERY == 0:
            gc.collect()
        result = run(scenario, seed)
        runs, steps = runs + 1, steps + result.steps
        virtual_s, worked_s = virtual_s + result.seconds, worked_s + result.worked_s
        found = result.broken
        if seed % AGAIN_EVERY == 0 and differs(result, run(scenario, seed)):
            examples.setdefault("a seed is the whole run", (seed, f"seed {seed} ran differently the second time"))
            broken["a seed is the whole run"] += 1
        if found is not None:
            broken[found.law] += 1
            examples.setdefault(found.law, (seed, str(found)))
            if not keep_going:
                break
    return {
        "runs": runs,
        "steps": steps,
        "hours": virtual_s / 3600,
        "worked": worked_s / 3600,
        "broken": dict(broken),
        "examples": examples,
    }


def seeds(first: int, count: int | None, until: float) -> Iterator[int]:
    seed = first
    while seed - first < count if count is not None else time.monotonic() < until:
        yield seed
        seed += 1


def differs(one: Result, other: Result) -> bool:
    return (one.tape, one.steps, one.seconds, law_of(one)) != (other.tape, other.steps, other.seconds, law_of(other))


if __name__ == "__main__":
    sys.exit(main())
