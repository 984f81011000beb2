"""`runtime dev`: a machine that runs the command again whenever a file changes."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any, Final

from typer import Option

from runtime.cli import job_options
from runtime.cli.commands import OutputOption
from runtime.cli.console import INTERRUPTED, ask, note, write_log
from runtime.cli.launch import STDIN, TIMED_OUT, build_request, print_dry_run, read_gpus
from runtime.cli.output import OutputFormat, describe_state
from runtime.errors import InfrastructureFailure, InvalidValue, NotPossible
from runtime.units import count_noun, format_duration

if TYPE_CHECKING:
    from runtime.client.jobs.dev import CommandEnd, DevMachine, Folder
    from runtime.jobs.log_follower import RunLog

CONTEXT_SETTINGS = {"allow_interspersed_args": False}
LOST_MACHINE: Final = ("stopped", "preempted")


def dev(
    command: job_options.CommandArgument = None,
    on: Annotated[str | None, Option(metavar="TARGET", help="Where.")] = None,
    file: job_options.FileOption = None,
    name: job_options.NameOption = None,
    image: job_options.ImageOption = None,
    cpus: Annotated[float | None, Option(help="Of the machine.")] = None,
    memory: Annotated[str | None, Option(metavar="SIZE", help="Of the machine: 16GiB, 16GiB..")] = None,
    gpus: Annotated[str | None, Option(metavar="[TYPE:]N", help="Of the machine; below 1 a part of one.")] = None,
    time_limit: Annotated[
        str | None, Option(metavar="8h", help="When the machine is given back at the latest.")
    ] = None,
    env: job_options.EnvOption = None,
    secret: job_options.SecretOption = None,
    set_: job_options.SetOption = None,
    ignore: job_options.IgnoreOption = None,
    once: Annotated[
        bool, Option("--once", help="Run once, give the machine back, and end with the exit code.")
    ] = False,
    keep: Annotated[bool, Option("--keep", help="At the end leave the machine for the next `runtime dev`.")] = False,
    dry_run: job_options.DryRunOption = False,
    yes: job_options.CostOption = False,
    again: Annotated[bool, Option("--again", help="A new machine, though one is held for this folder.")] = False,
    output: OutputOption = OutputFormat.TEXT,
) -> int:
    """Take a machine, run the command there, and run it again whenever a file changes.

    The folder you are in is looked at once a second, by the rules of `runtime launch`. A change ends the command that
    runs and sends the new tree. Ctrl-C gives the machine back. A machine that hears nothing for 15 minutes, or comes to
    its time limit, is given back by itself; until then the same `runtime dev` goes on with it, with any command.

    \b
    Examples:
      runtime dev --on tpu --set resources.tpu.type=v4-8 -- python train.py
      runtime dev --on hpc --gpus a100:1 --time-limit 2h -- python train.py
      runtime dev --on hpc --keep --once -- python test.py

    Exit codes: with `--once` the command's own; otherwise 0 given back, 1 lost, 124 time limit, 130 left at once.
    """
    from dataclasses import replace

    from runtime.client.jobs.dev import Folder, open_machine
    from runtime.client.jobs.prepare import LaunchOptions
    from runtime.config import load_settings

    flags: dict[str, Any] = {
        "name": name,
        "image": image,
        "resources.cpus": cpus,
        "resources.memory": memory,
        **read_gpus(gpus),
        "time_limit": time_limit,
    }
    base = file.parent.absolute() if file is not None and file != STDIN else None
    options = LaunchOptions(
        again=again,
        ignore=tuple(ignore or ()),
        base=base,
        assume_yes=yes,
        agree=(lambda: ask("start it? [y/N] ").strip().lower() in {"y", "yes"}) if sys.stdin.isatty() else None,
    )
    request = build_request(file, command or [], flags, env or [], secret or [], [], set_ or [])
    settings = load_settings()
    if dry_run:
        return print_dry_run(request, [on] if on else [], settings, replace(options, hold=True), output)
    if output is OutputFormat.JSON:
        raise InvalidValue("output", "json", "text: a session with a machine is no data, except with --dry-run")
    targets = request.choose_targets([on] if on else [], settings)
    if len(targets) > 1:
        raise NotPossible("a development machine is on one target", hint="name it with `--on`")
    machine, prepared = open_machine(request, targets[0], settings, options, progress=note)
    with machine.job:
        session = Session(machine, Folder(prepared), once=once, keep=keep)
        if not machine.job.new:
            note(f"going on with {machine.job.id} on {machine.job.target.name}")
        if prepared.snapshot is not None and not machine.job.new:
            session.send(prepared.snapshot, anyway=once)
        with interrupts(session):
            return session.run()


class Session:
    """What a person sees of a machine, until it is given back."""

    def __init__(self, machine: DevMachine, folder: Folder, *, once: bool, keep: bool) -> None:
        self.machine, self.folder, self.once, self.keep = machine, folder, once, keep
        self.asked = False
        """Whether the person, or a closed terminal, has asked for the end."""
        self._where = ""
        self._said: str | None = None
        self._code: int | None = None

    def run(self) -> int:
        """Follow the machine until the end of the session; returns the exit code."""
        try:
            state = self._follow()
        except KeyboardInterrupt:
            return self._leave()
        except NotPossible:
            raise  # another client has it now
        except BaseException:
            # As when nobody reads what is printed: the machine must not stay behind.
            if not self.keep:
                with suppress(Exception):
                    self.machine.give_back()
            raise
        if state is not None:
            return state
        try:
            return self._end()
        except KeyboardInterrupt:
            return self._leave()

    def _follow(self) -> int | None:
        """Returns the exit code if the job has ended by itself, and None if the session is over before."""
        from runtime.cli.jobs import stuck_teller
        from runtime.jobs.hosts.bucket import poll_again_s
        from runtime.shim.dev_loop import SILENT_S

        job, tell = self.machine.job, stuck_teller(self.machine.job.id)
        answered = time.monotonic()
        while not self.asked:
            try:
                self.machine.beat()
                if not self.once:
                    self._sync()
                status = job.status()
                self._read()
                answered = time.monotonic()
            except InfrastructureFailure as problem:
                if time.monotonic() - answered >= SILENT_S:
                    raise
                self._say(f"tries again: {problem.message}")
                time.sleep(1.0)
                continue
            if status.state.terminal:
                note(f"job {job.id} {describe_state(status.state, status.reason)}: the machine is given back")
                return self._judge(status)
            if self.once and self._code is not None:
                return None
            tell(status)
            time.sleep(poll_again_s(job.files))
        return None

    def _judge(self, status: Any) -> int:
        from runtime.end_reasons import EndReason
        from runtime.jobs.spec import JobState

        if status.reason is EndReason.TIMEOUT:
            return TIMED_OUT
        return (self._code or 0) if status.state is JobState.SUCCEEDED else 1

    def _sync(self) -> None:
        try:
            snapshot = self.folder.look()
        except (NotPossible, OSError) as problem:
            self._say(f"cannot read the folder, tries again: {problem}")
            return
        if snapshot is not None:
            self._said = None
            self.send(snapshot)

    def send(self, snapshot: Any, *, anyway: bool = False) -> None:
        if self.machine.send(snapshot, anyway=anyway):
            note(f"-- sent tree {self.machine.tree}: {count_noun(snapshot.files, 'file')}")

    def _read(self) -> None:
        for end in self.machine.read(self._write, self._report_place):
            if end.tree < self.machine.tree and self.once:
                continue
            note(f"-- {self._describe(end)}")
            if end.reason not in LOST_MACHINE:
                self._code = end.exit_code

    def _write(self, log: RunLog, attempt: int, tree: int) -> None:
        if tree >= self.machine.tree or not self.once:
            write_log(log.read(attempt))

    def _report_place(self, host: str) -> None:
        if host and host != self._where:
            self._where = host
            note(f"-- runs on {host}")

    def _describe(self, end: CommandEnd) -> str:
        from runtime.jobs.death_cause import describe_code

        then = "" if self.once else "; waiting for a change"
        lasted = format_seconds(end.lasted_s)
        if end.reason == "setup_failed":
            return f"could not begin: {end.message}{then}"
        if end.reason in LOST_MACHINE:
            return f"lost the machine after {lasted}: {end.message}; the next start goes on with the newest tree"
        if end.reason == "requeue" and end.message:
            return f"ended after {lasted}: {end.message}"
        said = f" ({end.message})" if end.message else ""
        return f"ran {lasted}, exit code {describe_code(end.exit_code)}{said}{then}"

    def _say(self, text: str) -> None:
        if text != self._said:
            self._said = text
            note(f"-- {text}")

    def _end(self) -> int:
        job = self.machine.job
        code = self._code if self.once and self._code is not None else 0
        if self.keep:
            note(f"-- the machine stays held for 15 minutes; `runtime cancel {job.id[:10]}` gives it back")
            return code
        left = self._release()
        note("-- giving the machine back")
        for each in left:
            note(f"left behind: {each}")
        status = job.wait()
        with suppress(InfrastructureFailure):
            self._read()
        note(f"job {job.id} {describe_state(status.state, status.reason)}: the machine is given back")
        return code

    def _release(self) -> list[str]:
        """Ctrl-C ends the connection of a terminal's `ssh` too, so that the first try may fail."""
        try:
            return self.machine.give_back()
        except InfrastructureFailure:
            return self.machine.give_back()

    def _leave(self) -> int:
        note("left at once: the machine is given back by itself, at the latest after 15 minutes without a beat")
        return INTERRUPTED


def format_seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else format_duration(round(seconds))


@contextmanager
def interrupts(session: Session) -> Iterator[None]:
    """Have the first signal end the session in order, and the second one at once."""

    def hear(number: int, frame: object) -> None:
        if session.asked:
            raise KeyboardInterrupt
        session.asked = True

    before = {number: signal.signal(number, hear) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
