"""`runtime worker --on TARGET --count N`: a fleet of workers, which is one job of N runs of `runtime worker`.

Everything that does not belong to the fleet goes to each worker as it was typed, once the worker's own parser here has
accepted it. Imported only for fleets and for help: a plain worker starts without it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from runtime.cli.console import note
from runtime.cli.worker import FLEET_OPTIONS, WorkerParser, build_parser, read_options
from runtime.errors import InvalidValue, NotPossible, RequestRefused, UnknownName

if TYPE_CHECKING:
    from runtime.config import Settings
    from runtime.jobs.plan import Target
    from runtime.stack.open import OpenStack

NAME: Final = "fleet"
FAILURES: Final = 3
PREEMPTIONS: Final = 100_000
"""As good as no limit: a fleet on machines that are taken away lasts as long as its queue."""
GRACE: Final = timedelta(minutes=2)
LEEWAY: Final = timedelta(seconds=30)
"""Time for a worker to settle after its attempts' grace."""
_NOT_THERE: Final = (
    "command -v runtime >/dev/null 2>&1 || { "
    'echo "error: there is no command runtime on $(uname -n), which a worker of a fleet needs" >&2; '
    'echo "hint: name an image that has research-runtime (--image), or an environment (--set environment.name=PATH)" >&2; '
    'exit 127; }; exec runtime worker "$@"'
)


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "fleets", "With --on, N workers are launched as one job, and this command returns."
    )
    add = group.add_argument
    add("--on", metavar="TARGET", help="launch the workers there: a target that `runtime targets list` shows")
    add("--count", metavar="N", help="how many workers (1)")
    add("--name", metavar="NAME", help=f"name of the fleet's job; another name is another fleet ({NAME})")
    add("--image", metavar="IMAGE", help="container image that has `runtime`")
    add("--cpus", metavar="N", help="CPUs of each worker")
    add("--memory", metavar="SIZE", help="memory of each worker: 16GiB")
    add("--gpus", metavar="[TYPE:]N", help="GPUs of each worker")
    add("--time-limit", metavar="TIME", help="wall clock of each attempt of a worker")
    add("--retries", metavar="N", help=f"failures of a worker that are tried again ({FAILURES})")
    add("--env", action="append", default=[], metavar="NAME[=VALUE]", help="a variable of the workers; may be repeated")
    add("--secret", action="append", default=[], metavar="NAME=SOURCE", help="a secret of the workers, by reference")
    add("--set", action="append", default=[], metavar="FIELD=VALUE", help="any field of the job file")
    add("--ignore", action="append", default=[], metavar="FIELD", help="drop a field that the target refuses")
    add("--again", action="store_true", help="another fleet, though the same was launched before")
    add("--dry-run", action="store_true", help="print what would be launched, and launch nothing")
    add("--output", "-o", choices=["text", "json"], default="text", help="how to print the job (text)")


def launch_fleet(argv: Sequence[str]) -> int:
    """Launch N workers as one job, or find the fleet that the same command launched before."""
    parser = WorkerParser(prog="runtime worker", description="")
    add_options(parser)
    given, words = parser.parse_known_args(argv)
    arguments = build_parser().parse_args(words)
    options = read_options(arguments)
    if given.on is None:
        used = next(word.partition("=")[0] for word in argv if word.partition("=")[0] in FLEET_OPTIONS)
        raise RequestRefused(
            f"`{used}` of `runtime worker` belongs to a fleet, and no target is named to launch it on",
            hint="--on TARGET launches workers there; without it, one worker runs here",
        )
    from runtime.cli.launch import build_request, print_dry_run, read_gpus, report_started
    from runtime.cli.output import OutputFormat
    from runtime.client.jobs.launch import launch
    from runtime.client.jobs.prepare import LaunchOptions
    from runtime.client.jobs.targets import find_target
    from runtime.config import load_settings
    from runtime.stack.open import open_stack

    settings = load_settings()
    names = [name for name in given.on.split(",") if name]
    targets = [find_target(name, settings) for name in names]
    count = _read_count(given.count)
    with open_stack(arguments.stack, queue=arguments.queue) as stack:
        env = _find_queue(stack, targets, settings)
    flags: dict[str, Any] = {
        "name": given.name or NAME,
        "code.mode": "image",
        "image": given.image,
        "resources.cpus": _read_number("cpus", given.cpus, float),
        "resources.memory": given.memory,
        **read_gpus(given.gpus),
        "time_limit": given.time_limit,
        "grace_period": (max(GRACE, options.grace_time + LEEWAY)).total_seconds(),
        "array.count": count,
        "array.max_parallel": count,
        "retry.failure": _read_number("retries", given.retries or str(FAILURES), int),
        "retry.preemption": PREEMPTIONS,
        # Refused, and not found: another attempt would end the same way.
        "retry.on_exit": {"2": "fail", "127": "fail"},
    }
    variables = [f"{name}={value}" for name, value in env.items()] + given.env
    request = build_request(None, _command(words, targets), flags, variables, given.secret, [], given.set)
    launch_options = LaunchOptions(again=given.again, ignore=tuple(given.ignore))
    output = OutputFormat(given.output)
    if given.dry_run:
        return print_dry_run(request, names, settings, launch_options, output)
    with launch(request, names, settings=settings, options=launch_options, progress=note) as job:
        return report_started(job, follow=False, output=output)


def _command(words: Sequence[str], targets: Sequence[Target]) -> list[str]:
    """The words that start a worker: on this machine by this Python, elsewhere by the image's or environment's `runtime`."""
    if all(target.kind == "local" for target in targets):
        return [sys.executable, "-m", "runtime", "worker", *words]
    return ["sh", "-c", _NOT_THERE, "runtime", *words]


def _find_queue(stack: OpenStack, targets: Sequence[Target], settings: Settings) -> dict[str, str]:
    """The variables by which a worker elsewhere finds the stack and the queue that a worker here would serve.

    Raises `NotPossible` for a queue in a file of this machine, which other machines cannot serve.
    """
    from runtime.outputs import SqliteQueueOutput
    from runtime.stack.find import LOCAL, find_published_url, is_location

    queue, outputs = stack.default_queue, stack.outputs
    by_url = queue.startswith(("sqlite:", "pubsub:"))
    if not by_url and stack.name != LOCAL and queue not in outputs.queues:
        raise UnknownName("queue", queue, outputs.queues, where=f"in stack `{stack.name}`")
    output = outputs.queues.get(queue)
    in_file = queue.startswith("sqlite:") if by_url else stack.name == LOCAL or isinstance(output, SqliteQueueOutput)
    if in_file and (away := [target for target in targets if target.kind != "local"]):
        raise NotPossible(
            f"queue `{queue}` of stack `{stack.name}` lies in a file of this machine, which target `{away[0].name}` "
            f"({away[0].kind}) cannot serve",
            hint="name a stack whose queue can be reached from there (--stack NAME), or launch the fleet with --on local",
        )
    if queue.startswith("sqlite:") and not Path(queue.partition(":")[2]).expanduser().is_absolute():
        raise InvalidValue(
            "queue", queue, "sqlite: and an absolute path, since workers of a fleet start in another folder"
        )
    found = {"RUNTIME_QUEUE": queue}
    if stack.name == LOCAL:
        return {**found, "RUNTIME_STACK": LOCAL, "RUNTIME_DATA_DIR": str(settings.data_dir.absolute())}
    source = (
        stack.found.source if is_location(stack.found.source) else find_published_url(stack.name, settings=settings)
    )
    if source and not source.startswith(("/", "~", ".", "file:")):
        found["RUNTIME_OUTPUTS"] = source
    return {**found, "RUNTIME_STACK": stack.name}


def _read_count(text: str | None) -> int:
    if text is not None and not (text.isdecimal() and int(text) > 0):
        raise InvalidValue("number of workers", text, "a whole number from 1")
    return int(text or 1)


def _read_number(name: str, text: str | None, kind: type[float] | type[int]) -> float | None:
    try:
        return None if text is None else kind(text)
    except ValueError:
        raise InvalidValue(name, text, "a number" if kind is float else "a whole number from 0") from None
