"""`runtime quickstart`: the main job end to end, and what came of it."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from runtime.cli.commands import OutputOption
from runtime.cli.console import note, paint, say_block
from runtime.cli.output import OutputFormat, format_count, print_json, progress, render_table
from runtime.config import load_settings
from runtime.errors import WorkFailed
from runtime.units import count_noun, format_duration

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from runtime.cli.output import Progress
    from runtime.client.quickstart import Audit, QuickstartResult

_WIDTH = 110


def quickstart(
    path: Annotated[
        Path | None, Option(metavar="DIR", help="Tree of source files to read (this Python's standard library).")
    ] = None,
    workers: Annotated[int, Option(metavar="N", help="Worker processes to start.")] = 2,
    kill: Annotated[bool, Option("--kill/--no-kill", help="Kill one of them in the middle.")] = True,
    keep: Annotated[
        bool, Option("--keep", help="Use a folder of its own, which the next quickstart leaves alone.")
    ] = False,
    output: OutputOption = OutputFormat.TEXT,
) -> int:
    """Run the main job end to end on this machine.

    It cuts a tree of source files into shards, puts a task for each into a queue, starts real workers, kills one of
    them with SIGKILL in the middle, and finds near-duplicate files over all shards. Then it counts, from the records,
    what became of every task and file. Nothing outside its own folder is touched, and nothing is contacted.

    \b
    Examples:
      runtime quickstart
      runtime quickstart --path ~/src/my-project --workers 4
      runtime quickstart --no-kill -o json
    """
    from runtime.client.quickstart import run_quickstart

    with _Screen() as screen:
        result = run_quickstart(screen, path=path, workers=workers, kill=kill, keep=keep)
    if output is OutputFormat.JSON:
        print_json({**_fields(result), "next": _next_commands(result)})
    else:
        say_block(render_result(result, _next_commands(result)))
    if not result.audit.clean:
        raise WorkFailed(
            "something was lost or recorded twice",
            facts=_audit_lines(result.audit),
            hint=f"this is a bug in research-runtime: please report it with `{result.folder}`",
        )
    return 0


class _Screen(ExitStack):
    """Lines and a progress bar on stderr."""

    _bar: Progress | None = None

    def say(self, text: str) -> None:
        note(text)

    def progress(self, done: int, total: int) -> None:
        if self._bar is None:
            self._bar = self.enter_context(progress("map", total, "shards", every=2))
        self._bar.set(done=done)
        if done >= total:
            self.close()


def render_result(result: QuickstartResult, commands: Sequence[str]) -> str:
    """Render the table of results, the audit, the folders, and the next commands."""
    value, audit = result.value, result.audit
    parts = [
        _heading(f"{count_noun(audit.files, 'file')}, {result.bytes / 1e6:.1f} MB, below {result.root}"),
        _languages(value["languages"]),
        _heading(
            f"Near-duplicates: {count_noun(value['clusters'], 'group')} of files, "
            f"{count_noun(value['spare_tokens'], 'token')} to spare"
        ),
        _clusters(value["largest"]),
        _heading("What happened, counted from the records and outputs"),
        "".join(f"{line}\n" for line in (*_audit_lines(audit), *_kill_lines(result))),
        _heading("Where it lies"),
        f"records  {result.folder / 'local.db'}\ncode     {result.folder / 'curation'}\nlogs     {result.folder / 'logs'}\n",
        _heading("Try next"),
        "".join(f"  {command}\n" for command in commands),
    ]
    return "".join(parts)


def _languages(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = ("files", "code", "comment", "docstring", "blank", "tokens")
    header = ["language", "files", "lines of code", "comments", "docstrings", "blank", "tokens"]
    return render_table(
        header, [[row["language"], *(format_count(row[name]) for name in columns)] for row in rows], _WIDTH
    )


def _clusters(rows: Sequence[Mapping[str, Any]]) -> str:
    cells = [
        [f"{row['similarity']:.2f}", str(len(row["files"])), format_count(row["spare_tokens"]), _names(row["files"])]
        for row in rows[:8]
    ]
    return render_table(["similarity", "files", "tokens to spare", "which"], cells, _WIDTH) or "none\n"


def _names(files: Sequence[str]) -> str:
    shown = ", ".join(files[:2])
    return shown if len(files) <= 2 else f"{shown} and {len(files) - 2} more"


def _audit_lines(audit: Audit) -> list[str]:
    tasks = f"{audit.submitted} submitted, {audit.recorded} recorded, {audit.lost} lost, "
    tasks += f"{audit.recorded_twice} recorded twice"
    files = f"{format_count(audit.files)} in the recorded outputs, {audit.files_missing} missing, "
    files += f"{audit.files_twice} twice"
    lost = f", {audit.attempts_lost} of them lost with its worker and done again" if audit.attempts_lost else ""
    return [
        f"tasks     {tasks}",
        f"attempts  {audit.attempts}{lost}",
        f"workers   {audit.workers}, {audit.workers_lost} lost",
        f"files     {files}",
    ]


def _kill_lines(result: QuickstartResult) -> list[str]:
    lines = [f"time      {format_duration(result.seconds)}"]
    if result.killed and not result.audit.attempts_lost:
        lines.append(f"worker {result.killed} was killed between two attempts, so there was none to do again")
    return lines


def _next_commands(result: QuickstartResult) -> list[str]:
    """Return three commands that work in this shell as printed."""
    settings = load_settings()
    elsewhere = settings.outputs is not None or settings.stack not in (None, "local")
    prefix = f"RUNTIME_DATA_DIR={shlex.quote(str(result.folder))} " + ("RUNTIME_STACK=local " if elsewhere else "")
    program = _program()
    task = result.audit.redone[0] if result.audit.redone else "last"
    return [
        f"{prefix}{program} status curation",
        f"{prefix}{program} explain {task}",
        f"cp -r {shlex.quote(str(result.folder / 'curation'))} my-curation    # curation.py is where you start your own",
    ]


def _program() -> str:
    """Return `runtime`, or its path if the shell would not find this one."""
    ours = Path(sys.executable).parent / "runtime"
    found = shutil.which("runtime")
    if not ours.exists() or (found and Path(found).resolve() == ours.resolve()):
        return "runtime"
    shown = os.path.relpath(ours)
    return shlex.quote(shown if not shown.startswith("..") else str(ours))


def _fields(result: QuickstartResult) -> dict[str, Any]:
    audit = {name: getattr(result.audit, name) for name in result.audit.__slots__}
    fields = {name: getattr(result, name) for name in result.__slots__}
    return {**fields, "audit": {**audit, "clean": result.audit.clean}}


def _heading(text: str) -> str:
    return f"\n{paint(text, 'bold')}\n"
