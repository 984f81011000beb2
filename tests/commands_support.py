"""Finds command lines in documents and pipelines that do not exist (`make`, `runtime`, `python -m infra`,
`scripts`)."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_GLOBAL = {"--help", "-h"}
_SHOWN = re.compile(r"(?<![\w-])(-{1,2}[a-zA-Z][\w-]*)")


def find_problem(words: Sequence[str]) -> str | None:
    """Return the problem with a command line (its words as a shell splits them), or None if the command exists."""
    line = " ".join(words)
    match list(words):
        case ["make", *rest]:
            unknown = [word for word in rest if "=" not in word and not word.startswith("-") and word not in _targets()]
        case ["python", "-m", "infra", verb, *rest]:
            known = _infra_options(verb)
            unknown = [verb] if known is None else sorted(_options(rest) - known)
        case ["runtime", *rest]:
            unknown = _unknown_of_runtime(rest)
        case [script, *_] if script.startswith("scripts/"):
            unknown = [] if (ROOT / script).is_file() else [script]
        case _:
            return None
    return f"`{line}`: no {', '.join(unknown)}" if unknown else None


def find_command_lines(markdown: str) -> Iterator[list[str]]:
    """Find our command lines in a document: each line of a fenced block, and each text in backticks."""
    prose, blocks = [], []
    for number, part in enumerate(re.split(r"^ *```\w*$", markdown, flags=re.MULTILINE)):
        (blocks if number % 2 else prose).append(part)
    shown = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    shown += re.findall(r"`([^`\n]+)`", "\n".join(prose))
    for line in shown:
        for piece in re.split(r"\||&&|;", re.sub(r"\s{2,}\S.*|\s#.*", "", line.strip().removeprefix("$ "))):
            words = piece.replace(".venv/bin/", "").split()
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                del words[0]
            ours = words and (words[0] in ("make", "runtime") or words[0].startswith("scripts/"))
            if ours or words[:3] == ["python", "-m", "infra"]:
                # Words in capitals or brackets are placeholders; an ellipsis stands for omitted words.
                yield [word.strip("[]") for word in words if word.strip("[]") != "…"]


@functools.cache
def _targets() -> frozenset[str]:
    return frozenset(re.findall(r"^([\w./-]+):(?!=)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


@functools.cache
def _infra_options(verb: str) -> frozenset[str] | None:
    done = subprocess.run(
        [sys.executable, "-m", "infra", verb, "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return frozenset(_SHOWN.findall(done.stdout)) | _GLOBAL if done.returncode == 0 else None


def _unknown_of_runtime(words: Sequence[str]) -> list[str]:
    from runtime.cli.commands import COMMANDS, load_command
    from runtime.cli.worker import build_parser

    if not words or words[0] in ("--help", "--version", "--debug", "…", "COMMAND"):
        return []
    if words[0] not in COMMANDS:
        return [words[0]]
    if words[0] == "worker":
        known = {option for action in build_parser(fleet=True)._actions for option in action.option_strings}
        return sorted(_options(words[1:]) - known)
    command: Any = load_command(words[0])
    rest = list(words[1:])
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        names = [name for name in rest[0].split("|") if name not in command.commands]
        if names:
            return names
        command, rest = command.commands[rest[0].split("|")[0]], rest[1:]
    known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)} | _GLOBAL
    return sorted(_options(rest) - known)


def _options(words: Sequence[str]) -> set[str]:
    """Return the options among `words`, up to a `--`, after which they belong to another command."""
    ours = list(words)[: list(words).index("--")] if "--" in words else words
    return {word.partition("=")[0] for word in ours if re.match(r"--?[a-zA-Z]", word)}
