"""`runtime completion`: the script that makes a shell complete commands, options, jobs, experiments and targets.

What is completed comes from this machine's files alone: no backend, queue or bucket is asked, and no file is written. A
file that cannot be read, or that is not to be believed, is passed over.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Final

from typer import Argument

from runtime.cli.console import write_text

if TYPE_CHECKING:
    from typer import _click

    from runtime.config import Settings

OFFERED: Final = 200
_PLAIN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,199}")
"""A name that no shell reads as more than a word; others are not offered."""


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(shell: Annotated[Shell, Argument(metavar="SHELL", help="bash, zsh or fish.")]) -> None:
    """Print the completion script of a shell.

    \b
    To complete from the next terminal on:
      bash   runtime completion bash > ~/.local/share/bash-completion/completions/runtime
      zsh    runtime completion zsh > ~/.zfunc/_runtime
             (with `fpath+=~/.zfunc` before `compinit` in ~/.zshrc)
      fish   runtime completion fish > ~/.config/fish/completions/runtime.fish
    """
    from typer._completion_shared import get_completion_script

    script = get_completion_script(prog_name="runtime", complete_var="_RUNTIME_COMPLETE", shell=shell.value)
    write_text(script + "\n")


def add_candidates(command: _click.Command) -> None:
    """Let the arguments and options of a command that take a job, an experiment or a target be completed with those."""
    for inner in getattr(command, "commands", {}).values():
        add_candidates(inner)
    for param in command.params:
        words = set(re.findall(r"\b[A-Z]+\b(?!\.[a-z])", param.metavar or ""))
        kinds = [find for word, find in _FINDERS.items() if word in words]
        if kinds:
            param._custom_shell_complete = _completer(kinds)


def _completer(kinds: list[Callable[[Settings, str], Iterator[str]]]) -> Callable[[Any, Any, str], list[str]]:
    def complete(ctx: Any, param: Any, incomplete: str) -> list[str]:
        from runtime.config import load_settings

        # Of a list such as `--on hpc,lab` the last word is completed.
        before, comma, word = incomplete.rpartition(",")
        offered: dict[str, None] = {}
        with contextlib.suppress(Exception):
            settings = load_settings()
            for find in kinds:
                with contextlib.suppress(Exception):
                    fitting = (
                        each for each in find(settings, word) if each.startswith(word) and _PLAIN.fullmatch(each)
                    )
                    offered |= dict.fromkeys(islice(fitting, OFFERED))
        return [f"{before}{comma}{each}" for each in offered]

    return complete


def _find_jobs(settings: Settings, word: str) -> Iterator[str]:
    from runtime.client.jobs.job_cache import list_names

    known = list_names(settings)
    yield "last"
    # Ids are long and alike: they are offered to people who have begun to type one.
    yield from (name for _, name in known if name)
    if word.startswith("j-"):
        yield from (job for job, _ in known)


def _find_experiments(settings: Settings, word: str) -> Iterator[str]:
    from runtime.client.resolve_id import list_remembered

    yield "last"
    yield from list_remembered(settings.data_dir)
    if settings.stack in (None, "local"):
        yield from _read_local(settings)


def _read_local(settings: Settings) -> Iterator[str]:
    """The experiments in the task file of the stack `local`."""
    import sqlite3
    from urllib.parse import quote

    from runtime.file_trust import is_ours

    path = settings.data_dir / "local.db"
    if not is_ours(str(path)):
        return
    with contextlib.closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=0.2)) as opened:
        found = opened.execute("SELECT name FROM experiments ORDER BY created DESC LIMIT ?", (OFFERED * 10,))
        yield from (str(name) for (name,) in found.fetchall())


def _find_targets(settings: Settings, word: str) -> Iterator[str]:
    from runtime.client.jobs.targets import list_usable_targets

    yield from (each.name for each in list_usable_targets(settings))


_FINDERS: Final[dict[str, Callable[[Settings, str], Iterator[str]]]] = {
    "JOB": _find_jobs,
    "EXPERIMENT": _find_experiments,
    "TARGET": _find_targets,
}
"""Word of a metavar → what completes it."""
