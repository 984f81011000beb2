"""`runtime worker`: serve a queue from this machine. Dispatched without typer, since fleets start it often."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Literal, NoReturn

from runtime.errors import InvalidValue, RequestRefused, UnknownName
from runtime.units import parse_duration

if TYPE_CHECKING:
    from runtime.worker.options import EntryKind, WorkerOptions

_DESCRIPTION = "Serve a queue: lease tasks, run each in a process of its own, record how it ended, repeat."
_EPILOG = """\
examples:
  runtime worker                                        one task at a time, until stopped
  runtime worker --slots auto --idle-timeout 10s        all CPUs; leaves when the queue is empty
  runtime worker --gpus-per-slot 0.25 --slots 8         eight attempts share two GPUs
  runtime worker --reuse-process                        warm children, for many small tasks
  runtime worker --stack marin-us-west4 --queue default  a queue of a stack in the cloud
  runtime worker --on hpc --count 100 --gpus 1 --stack marin-us-west4
                                                        a fleet: a hundred workers, launched as one job

SIGTERM, Ctrl-C or a preemption notice: attempts are asked to checkpoint, get the grace period, and go back to the
queue without spending their failure budget. A second signal ends them now.
Exit codes: 0 drained or asked to stop, 1 too many tasks failed in a row, 2 refused, 3 infrastructure failed.
"""
FLEET_OPTIONS = frozenset(
    [
        "--on",
        "--count",
        "--name",
        "--image",
        "--cpus",
        "--memory",
        "--gpus",
        "--time-limit",
        "--retries",
        "--env",
        "--secret",
        "--set",
        "--ignore",
        "--again",
        "--dry-run",
        "--output",
        "-o",
    ]
)
"""Options that make the command launch workers elsewhere; `runtime.cli.worker_fleet` explains them."""
MOST_DIGITS = 18
_UNKNOWN = re.compile(r"unrecognized arguments: (\S+)")
_INVALID_CHOICE = re.compile(
    r"argument (?P<option>\S+): invalid choice: '(?P<value>.*?)' \(choose from (?P<known>.*)\)"
)


class WorkerParser(argparse.ArgumentParser):
    """Raises a `RequestRefused` instead of printing and exiting; takes no abbreviated options."""

    def __init__(self, *, prog: str, description: str, epilog: str | None = None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            # Each `add_argument` makes a formatter, which would load shutil for the width of the terminal.
            formatter_class=partial(argparse.RawDescriptionHelpFormatter, width=80),
        )

    def format_help(self) -> str:
        self.formatter_class = argparse.RawDescriptionHelpFormatter
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        hint = f"`{self.prog} --help` explains each option"
        if unknown := _UNKNOWN.match(message):
            word = unknown[1].partition("=")[0]
            if word.startswith("-"):
                shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
                known = [name for action in shown for name in action.option_strings]
                raise UnknownName("option", word, known, where=f"in `{self.prog}`", hint=hint)
            raise RequestRefused(f"`{self.prog}` takes no argument `{word}`", facts=[self._usage_line()], hint=hint)
        if choice := _INVALID_CHOICE.fullmatch(message):
            known = re.findall(r"'(.*?)'", choice["known"]) or choice["known"].split(", ")
            raise UnknownName("choice", choice["value"], known, where=f"for `{choice['option']}`", hint=hint)
        text = re.sub(r"^argument (\S+): ", lambda found: f"`{found[1].split('/')[0]}` of `{self.prog}`: ", message)
        raise RequestRefused(text.replace("'", "`"), facts=[self._usage_line()], hint=hint)

    def _usage_line(self) -> str:
        return " ".join(self.format_usage().split())


def build_parser(*, fleet: bool = False) -> WorkerParser:
    """Make the parser of a worker that runs here; with `fleet` also of the options that launch workers elsewhere."""
    parser = WorkerParser(prog="runtime worker", description=_DESCRIPTION, epilog=_EPILOG)
    add = parser.add_argument
    add("--queue", metavar="NAME", help="queue to serve (default: the stack's `default`)")
    add("--stack", metavar="NAME", help="stack to use (default: the configured one, else local)")
    add("--slots", default="1", metavar="N|auto", help="attempts at a time; auto is one per CPU or GPU share (1)")
    add(
        "--gpus-per-slot", default="0", metavar="F", help="GPUs of each slot: whole ones, or a part of one such as 0.25"
    )
    add("--idle-timeout", default="never", metavar="TIME", help="leave after so long without work: 10s, 5m, never")
    add("--wait-for-first", action="store_true", help="count idle time only after the first task came")
    add("--max-tasks", type=_whole, metavar="N", help="leave after N tasks")
    add("--once", action="store_true", help="run one task and leave; leaves empty-handed after --idle-timeout (10s)")
    add(
        "--max-consecutive-failures",
        type=_from_zero,
        default=3,
        metavar="N",
        help="leave with code 1 when N distinct tasks in a row failed and none succeeded before; 0 never does (3)",
    )
    add("--lease", default="30s", metavar="TIME", help="how long a silent worker keeps its tasks (30s)")
    add("--grace", default="30s", metavar="TIME", help="what attempts get to checkpoint when asked to stop (30s)")
    add("--reuse-process", action="store_true", help="run many functions and workflows in one warm child")
    add("--accept", metavar="KINDS", help="kinds of tasks to run: workflow,command,function (all)")
    add("--labels", action="append", default=[], metavar="K=V", help="shown by `runtime status`; may be repeated")
    add("--metrics-port", type=int, metavar="PORT", help="serve Prometheus metrics; 0 picks a port")
    add("--metrics-host", metavar="HOST", help="address to serve them on; 0.0.0.0 or :: for all (127.0.0.1)")
    add("--durability", choices=["full", "normal"], help="normal: a power cut may undo the last settlements (full)")
    add("--look-ahead", type=_from_zero, metavar="N", help="tasks to hold beyond the slots (default: a second's worth)")
    add("--log-format", choices=["auto", "human", "json"], default="auto", help="lines on stderr (auto)")
    if fleet:
        from runtime.cli.worker_fleet import add_options

        add_options(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    helps = "--help" in argv or "-h" in argv
    if not helps and any(word.partition("=")[0] in FLEET_OPTIONS for word in argv):
        from runtime.cli.worker_fleet import launch_fleet

        return launch_fleet(argv)
    arguments = build_parser(fleet=helps).parse_args(argv)
    options = read_options(arguments)
    from runtime.worker.run import run_worker
    from runtime.worker.worker_log import LogFormat, WorkerLog

    return run_worker(
        arguments.queue,
        options,
        stack=arguments.stack,
        durability=arguments.durability,
        reporter=WorkerLog.for_stderr(LogFormat(arguments.log_format)),
    ).exit_code


def read_options(arguments: object) -> WorkerOptions:
    from runtime.worker.options import WorkerOptions

    get = vars(arguments).get
    given = get("idle_timeout") or "never"
    idle = None if given == "never" else parse_duration(given, field="idle timeout")
    once = bool(get("once"))
    if once and idle is None:
        idle = timedelta(seconds=10)
    port, host = get("metrics_port"), get("metrics_host")
    if host is not None and port is None:
        raise RequestRefused("`--metrics-host` goes with `--metrics-port`", hint="--metrics-port 9100")
    return WorkerOptions(
        slots=_slots(get("slots") or "1"),
        gpus_per_slot=_gpus(get("gpus_per_slot") or "0"),
        idle_timeout=idle,
        wait_for_first=bool(get("wait_for_first")),
        max_tasks=1 if once else get("max_tasks"),
        max_consecutive_failures=get("max_consecutive_failures") or 0,
        lease=_lease(get("lease") or "30s"),
        grace=parse_duration(get("grace") or "30s", field="grace"),
        reuse_process=bool(get("reuse_process")),
        accept=_kinds(get("accept")),
        labels=dict(_label(text) for text in get("labels") or []),
        look_ahead=0 if once else get("look_ahead"),
        owns_process=True,
        metrics_address=None if port is None else (host or "127.0.0.1", port),
    )


def _whole(text: str) -> int:
    if not _is_whole(text) or int(text) < 1:
        raise InvalidValue("number of tasks", text, "a whole number from 1")
    return int(text)


def _is_whole(text: str) -> bool:
    """Return whether `text` is a number from 0 that is short enough for Python to read."""
    return text.isdecimal() and len(text) <= MOST_DIGITS


def _from_zero(text: str) -> int:
    if not _is_whole(text):
        raise InvalidValue("number", text, "a whole number from 0")
    return int(text)


def _slots(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    if not _is_whole(text) or int(text) < 1:
        raise InvalidValue("number of slots", text, "a whole number from 1, or auto")
    return int(text)


def _gpus(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidValue("number of GPUs", text, "a whole number, or a part of one such as 0.25") from None


def _lease(text: str) -> timedelta:
    lease = parse_duration(text, field="lease")
    if lease < timedelta(seconds=1):
        raise InvalidValue("lease", text, "1s or more: a third of it must be enough for a renewal")
    return lease


def _kinds(text: str | None) -> frozenset[EntryKind]:
    from runtime.worker.options import ENTRY_KINDS

    if text is None:
        return frozenset(ENTRY_KINDS)
    named = {word.strip() for word in text.split(",")} - {""}
    for word in sorted(named.difference(ENTRY_KINDS)):
        raise UnknownName("kind of task", word, ENTRY_KINDS, where="for `--accept`")
    if not named:
        raise InvalidValue("list of kinds", text, "some of workflow, command, function")
    return frozenset(kind for kind in ENTRY_KINDS if kind in named)


def _label(text: str) -> tuple[str, str]:
    matched = re.fullmatch(r"([^=\s]+)=(.*)", text)
    if not matched:
        raise InvalidValue("label", text, "key=value")
    return matched[1], matched[2]
