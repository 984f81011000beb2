"""Measures everything that the goals compare, all in turn and then all again, and prints the ratios.

One run is one table: each cell is measured once per round, in a process of its own, and a ratio is of the medians
of all rounds. Nothing here decides what is good; `goals` does, and `ratios` works it out.
"""

from __future__ import annotations

import argparse
import compileall
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.goals import CELLS, CHECKS, cells_of
from benchmarks.processes import ROOT, adopt_orphans, end_descendants, environment
from benchmarks.ratios import Verdict, judge, render, render_markdown
from benchmarks.services import ServiceMissing, Services

ROUNDS = 5
CELL_TIMEOUT_S = 300
FINISHED = 1_000_000
JOBS = (21, 22, 23, 24, 25)
"""Goals about jobs, which have a table of their own in the document."""


def main() -> int:
    arguments = _parse()
    checks = tuple(check for check in CHECKS if not arguments.only or check.goal in arguments.only)
    names = [name for name in cells_of(checks) if not arguments.cells or name in arguments.cells]
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    _compile()
    began = time.monotonic()
    with (
        Services() as services,
        tempfile.TemporaryDirectory(prefix="bench-", dir=arguments.folder, ignore_cleanup_errors=True) as scratch,
    ):
        run = Run(services, Path(scratch))
        try:
            for number in range(arguments.rounds):
                run.round(number, arguments.rounds, names)
        except KeyboardInterrupt:
            print("interrupted: what follows is of the rounds so far", file=sys.stderr)
        finally:
            end_descendants(but=services.pids)
    verdicts = [judge(check, run.rounds) for check in checks]
    report = _report(run, verdicts, time.monotonic() - began)
    if arguments.save:
        Path(arguments.save).write_text(json.dumps(report, indent=1) + "\n")
    if arguments.document:
        _write_into(Path(arguments.document), run, report, verdicts)
    if arguments.output == "json":
        print(json.dumps(report, indent=1))
    else:
        _print(report, run, verdicts, markdown=arguments.output == "markdown")
    return 0


class Run:
    """Rounds of measurements, and the reasons for those that could not be made."""

    def __init__(self, services: Services, scratch: Path) -> None:
        self.rounds: dict[str, list[Mapping[str, float]]] = {}
        self.problems: dict[str, str] = {}
        self.left_running: list[str] = []
        self._services = services
        self._scratch = scratch
        self._serial = 0
        self._finished: Path | None = None

    @property
    def filesystem(self) -> str:
        from runtime.records.sqlite_file import filesystem_kind

        return filesystem_kind(self._scratch) or "a file system that the system does not name"

    def round(self, number: int, of: int, names: Sequence[str]) -> None:
        """Measure all cells, one after the other."""
        wanted = [name for name in ["disk", *names] if number == 0 or not CELLS[name].once]
        for _, group in groupby(wanted, key=lambda name: CELLS[name].together or name):
            self._measure(list(group), f"round {number + 1}/{of}")

    def _measure(self, names: Sequence[str], where: str) -> None:
        began = time.monotonic()
        running = [(name, *self._start(name)) for name in names if self._can_run(name)]
        for name, process, answer in running:
            numbers = self._finish(name, process, answer, began)
            said = " ".join(f"{key}={value:.4g}" for key, value in (numbers or {}).items())
            print(f"{where}  {name}  {time.monotonic() - began:.0f} s  {said or self.problems[name]}", file=sys.stderr)
            if numbers is not None:
                self.rounds.setdefault(name, []).append(numbers)
        if end_descendants(but=self._services.pids):
            self.left_running += names

    def _can_run(self, name: str) -> bool:
        cell = CELLS[name]
        if cell.package and importlib.util.find_spec(cell.package) is None:
            self.problems[name] = f"`{cell.package}` is not installed here: `make bench` sets it up"
            return False
        try:
            for service in cell.needs:
                self._services.need(service)
        except ServiceMissing as problem:
            self.problems[name] = str(problem)
            return False
        return True

    def _start(self, name: str) -> tuple[subprocess.Popen[bytes], Path]:
        cell = CELLS[name]
        self._serial += 1
        spec, answer = (self._scratch / f"{self._serial}-{part}.json" for part in ("spec", "answer"))
        parameters = dict(cell.parameters)
        if parameters.get("file") == "finished":
            parameters["file"] = str(self._make_finished())
        spec.write_text(
            json.dumps(
                {
                    "measure": cell.measure,
                    "parameters": parameters,
                    "services": self._services.addresses,
                    "folder": str(self._scratch / str(self._serial)),
                }
            )
        )
        return self._spawn(spec, answer), answer

    def _spawn(self, spec: Path, answer: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "benchmarks.cell", str(spec), str(answer)]
        # A session of its own: Ctrl-C reaches only this process, which then ends the cell with its descendants.
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
            env=environment(),
            start_new_session=True,
        )

    def _finish(
        self, name: str, process: subprocess.Popen[bytes], answer: Path, began: float
    ) -> Mapping[str, float] | None:
        try:
            process.wait(max(1.0, began + CELL_TIMEOUT_S - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.terminate()
            self.problems[name] = f"took more than {CELL_TIMEOUT_S} s"
            return None
        found: dict[str, Any] = json.loads(answer.read_text()) if answer.exists() else {}
        if "numbers" not in found:
            self.problems[name] = found.get("problem", f"ended with exit code {process.returncode}")
            if found.get("log"):
                print(found["log"], file=sys.stderr)
            if found.get("trace"):
                print(found["trace"], file=sys.stderr)
            return None
        numbers: Mapping[str, float] = found["numbers"]
        return numbers

    def _make_finished(self) -> Path:
        """Return a data folder with a million finished tasks; it is made once per run."""
        if self._finished is None:
            folder = self._scratch / "finished"
            folder.mkdir()
            print(f"making a file with {FINISHED:,} finished tasks", file=sys.stderr)
            command = (
                "import sys; from pathlib import Path; from benchmarks.limits.sqlite import finish_many; "
                "finish_many(Path(sys.argv[1]), n=int(sys.argv[2]))"
            )
            subprocess.run(
                [sys.executable, "-c", command, str(folder), str(FINISHED)], cwd=ROOT, env=environment(), check=True
            )
            self._finished = folder
        return self._finished


def _compile() -> None:
    """Compile the measured code, so that no first start pays for it."""
    for folder in ("runtime", "benchmarks"):
        compileall.compile_dir(str(ROOT / folder), quiet=2)


def _report(run: Run, verdicts: Sequence[Verdict], seconds: float) -> dict[str, Any]:
    return {
        "machine": machine(),
        "filesystem": run.filesystem,
        "seconds": round(seconds),
        "goals": [{**asdict(verdict), "ratio": verdict.ratio} for verdict in verdicts],
        "rounds": run.rounds,
        "problems": run.problems,
        "left_running": run.left_running,
    }


def machine() -> dict[str, Any]:
    import sqlite3

    processor = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "processor": processor,
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
    }


def _print(report: Mapping[str, Any], run: Run, verdicts: Sequence[Verdict], *, markdown: bool) -> None:
    print((render_markdown if markdown else render)(verdicts))
    print()
    for line in (*_notes(run, verdicts), _where(report, run)):
        print(line)


def _where(report: Mapping[str, Any], run: Run) -> str:
    facts = report["machine"]
    rounds = max((len(found) for found in run.rounds.values()), default=0)
    return (
        f"{facts['processor']}, {facts['cpus']} CPUs, {facts['memory_gb']} GB, Linux {facts['kernel']}, "
        f"Python {facts['python']}, SQLite {facts['sqlite']}; {rounds} rounds in {report['seconds'] / 60:.0f} min"
    )


def _write_into(path: Path, run: Run, report: Mapping[str, Any], verdicts: Sequence[Verdict]) -> None:
    """Put each table that was measured between its two marks in a document."""
    for part, of_jobs in (("tasks", False), ("jobs", True)):
        chosen = [verdict for verdict in verdicts if (verdict.check.goal in JOBS) is of_jobs]
        if chosen:
            _write_table(path, part, chosen, run, report)


def _write_table(path: Path, part: str, verdicts: Sequence[Verdict], run: Run, report: Mapping[str, Any]) -> None:
    begin_mark, end_mark = f"<!-- measured {part} -->", f"<!-- end of measured {part} -->"
    text = path.read_text(encoding="utf-8")
    before, begin, rest = text.partition(begin_mark)
    _, end, after = rest.partition(end_mark)
    if not begin or not end:
        print(f"error: `{path}` has no lines {begin_mark} and {end_mark}; nothing written", file=sys.stderr)
        return
    notes = "\n".join(f"- {line}" for line in (_where(report, run), *_notes(run, verdicts)))
    path.write_text(f"{before}{begin}\n{render_markdown(verdicts)}\n\n{notes}\n{end}{after}", encoding="utf-8")


def _notes(run: Run, verdicts: Sequence[Verdict]) -> Iterator[str]:
    holds = [verdict.holds for verdict in verdicts]
    yield f"{holds.count('yes')} of {len(holds)} comparisons hold, {holds.count('no')} do not"
    runs = [numbers for rounds in run.rounds.values() for numbers in rounds if "lost" in numbers]
    lost = sum(numbers["lost"] for numbers in runs)
    again = sum(numbers.get("repeated", 0) for numbers in runs)
    yield f"tasks lost: {lost:.0f}, run more than once: {again:.0f}, in {len(runs)} measurements"
    disk = [numbers["rate"] for numbers in run.rounds.get("disk", ())]
    if disk:
        yield (
            f"queues and results lie on {run.filesystem}, which makes {min(disk):,.0f} to {max(disk):,.0f} fdatasync/s "
            "(one page each)"
        )
    for name, problem in run.problems.items():
        yield f"not measured: {name}: {problem}"
    if run.left_running:
        yield f"ended what was left running after: {', '.join(dict.fromkeys(run.left_running))}"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, metavar="N", help=f"how often each is measured ({ROUNDS})")
    parser.add_argument("--quick", action="store_true", help="one round: a look, not a result")
    parser.add_argument("--only", type=_goals, default=frozenset(), metavar="GOAL,...", help="such as 1,4,9")
    parser.add_argument("--cells", type=_words, default=(), metavar="CELL,...", help="such as ours.full,huey")
    parser.add_argument("-o", "--output", choices=["table", "markdown", "json"], default="table")
    parser.add_argument("--save", metavar="FILE", help="write every number of every round there, as JSON")
    parser.add_argument("--document", metavar="FILE", help="put the table between the marks in FILE, as in docs/")
    parser.add_argument("--folder", metavar="FOLDER", help="where queues lie: the file system that is measured")
    arguments = parser.parse_args()
    if arguments.rounds is None:
        arguments.rounds = 1 if arguments.quick else ROUNDS
    return arguments


def _goals(text: str) -> frozenset[int]:
    known = {check.goal for check in CHECKS}
    asked = frozenset(int(word) for word in text.split(","))
    if asked - known:
        raise argparse.ArgumentTypeError(f"no goal {min(asked - known)} here; there are {sorted(known)}")
    return asked


def _words(text: str) -> Sequence[str]:
    asked = text.split(",")
    unknown = [word for word in asked if word not in CELLS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no cell `{unknown[0]}`; there are {', '.join(CELLS)}")
    return asked


if __name__ == "__main__":
    sys.exit(main())
