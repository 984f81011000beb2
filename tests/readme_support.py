"""The README's launch, done as a reader would: its files and command lines, on a target of this machine."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"
EXAMPLE_ID = "j-91c0"
LIMIT_S = 400


@dataclass(frozen=True)
class Seen:
    """The final view of the job for a reader."""

    state: str
    succeeded: int
    log: tuple[str, ...]
    """The lines about steps without their numbers; sorted, because seeds may run at the same time."""
    explained: str
    fetched: Mapping[str, float]
    """File → the intercept that it holds, rounded: the points lie around `y = 2x + 1`."""


AS_PROMISED = Seen(
    state="succeeded",
    succeeded=3,
    log=tuple(sorted(f"[{seed}] step {step}: loss" for seed in range(3) for step in range(0, 200, 50))),
    explained="job `ID` succeeded",
    fetched={f"{seed}/result.json": 1.0 for seed in range(3)},
)


def read_blocks() -> dict[str, str]:
    """Return the README's job file, targets file and command lines from its section on launching."""
    section = README.read_text().partition("\n## Launch\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL)
    return {language or "commands": text for language, text in blocks}


def follow_readme(folder: Path, on: str, *, settings: Mapping[str, Any] | None = None) -> Seen:
    """Launch the README's job on its target `on`, and follow all its steps.

    `settings` are the target's settings here; None for a target that needs none.
    """
    blocks = read_blocks()
    targets = tomllib.loads(blocks["toml"])["targets"]
    assert settings is None or targets[on]["kind"] == settings["kind"]
    run_in(["runtime", "init", str(folder)], folder.parent)
    assert (folder / "job.yaml").read_text() == blocks["yaml"]
    (folder / "runtime.toml").write_text(_toml(targets | ({on: settings} if settings else {})))
    launches, others = split_commands(blocks["commands"])
    job = run_in(launches[on], folder).splitlines()[0]
    said = {words[1]: run_in([job[:10] if word == EXAMPLE_ID else word for word in words], folder) for words in others}
    status = json.loads(run_in(["runtime", "status", job, "-o", "json"], folder))
    return Seen(
        state=status["state"],
        succeeded=status["totals"]["succeeded"],
        log=tuple(sorted(line.rpartition(" ")[0] for line in said["logs"].splitlines() if "] step " in line)),
        explained=said["explain"].splitlines()[0].replace(job[:10], "ID"),
        fetched={
            str(path.relative_to(folder / "results")): round(json.loads(path.read_text())["intercept"], 1)
            for path in (folder / "results").rglob("*")
            if path.is_file() and not path.name.startswith(".")
        },
    )


def split_commands(text: str) -> tuple[dict[str, list[str]], list[list[str]]]:
    """Return the launches by target, and the commands that follow."""
    lines = [words for line in text.splitlines() if (words := shlex.split(line, comments=True))]
    launches = {words[words.index("--on") + 1]: words for words in lines if words[1] == "launch"}
    return launches, [words for words in lines if words[1] != "launch"]


def _toml(targets: Mapping[str, Mapping[str, Any]]) -> str:
    lines = []
    for name, target in targets.items():
        lines += [f"[targets.{name}]", *(f"{key} = {json.dumps(value)}" for key, value in target.items())]
    return "\n".join(lines) + "\n"


def run_in(words: Sequence[str], folder: Path) -> str:
    """Run one of our commands and return its output; a failing command fails the test."""
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout
