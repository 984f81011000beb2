"""`runtime init`: a small project that runs."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated, Final

from typer import Argument

from runtime.cli.commands import OutputOption
from runtime.cli.console import note
from runtime.cli.output import OutputFormat, print_list
from runtime.errors import NotPossible

TRAIN: Final = '''\
"""A workflow and a script in one file, to replace with your own: fits a line to noisy points."""

import argparse
import json
import os
import random


def fit(seed: int = 0, lr: float = 0.1, steps: int = 200) -> dict:
    """Fit `y = 2x + 1` by gradient descent; returns slope, intercept and loss."""
    rng = random.Random(seed)
    points = [(x, 2 * x + 1 + rng.gauss(0, 0.1)) for x in (rng.random() for _ in range(100))]
    slope = intercept = loss = 0.0
    for step in range(steps):
        errors = [(slope * x + intercept - y, x) for x, y in points]
        loss = sum(error * error for error, _ in errors) / len(points)
        slope -= lr * 2 * sum(error * x for error, x in errors) / len(points)
        intercept -= lr * 2 * sum(error for error, _ in errors) / len(points)
        if step % 50 == 0:
            print(f"step {step}: loss {loss:.4f}", flush=True)
    return {"slope": slope, "intercept": intercept, "loss": loss}


# `runtime run train fit --seed=1` and `runtime submit train fit --seed=1` find the function here.
workflows = {"fit": fit}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="What job.yaml runs.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=0.1)
    given = parser.parse_args()
    result = fit(given.seed, given.lr)
    folder = os.environ.get("RUNTIME_OUTPUT_DIR", ".")
    with open(os.path.join(folder, "result.json"), "w") as file:
        json.dump(result, file)
    print(json.dumps(result))
'''

JOB: Final = """\
# A job: a command and the resources it needs. `runtime launch --on local -f job.yaml` runs it here.
name: fit
command: [sh, -c, "python3 train.py --seed $SEED"]
array: {seeds: 3}                  # three runs; SEED is 0, 1 and 2
resources: {cpus: 1, memory: 512MiB}
time_limit: 10m
retry: {failure: 1}
"""

SETTINGS: Final = """\
# Settings of this project. Relative paths start here.

# workflow_packages = ["mylab"]    # packages in which `runtime submit PROJECT WORKFLOW` looks for PROJECT
# env_files = [".env"]             # variables for workflows that run here

# Places to launch on. `local` needs no entry.
# [targets.hpc]
# kind = "slurm"
# host = "login.hpc.example.org"
# records = "/scratch/lab/runtime"
"""

FILES: Final = {"train.py": TRAIN, "job.yaml": JOB, "runtime.toml": SETTINGS}


def init(
    folder: Annotated[
        Path, Argument(metavar="[FOLDER]", help="Made if missing; the working directory by default.")
    ] = Path(),
    output: OutputOption = OutputFormat.TEXT,
) -> int:
    """Make a small project that runs: a workflow, a job file and settings.

    A file that is there already is never changed; then nothing is made.

    \b
    Examples:
      runtime init demo && cd demo
      runtime run train fit --seed=1
      runtime submit --grid seed=0:10 train fit && runtime worker --idle-timeout 2s && runtime results last
      runtime launch --on local -f job.yaml --follow
    """
    there = [name for name in FILES if os.path.lexists(folder / name)]
    if there:
        raise NotPossible(
            f"`{folder.absolute()}` has {', '.join(f'`{name}`' for name in there)} already",
            facts=["nothing was made"],
            hint="name a new folder: runtime init demo",
        )
    made: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in FILES.items():
            with (folder / name).open("x", encoding="utf-8") as file:
                made.append(folder / name)
                file.write(text)
    except OSError as problem:
        for path in made:  # Otherwise the next try would find them there.
            path.unlink(missing_ok=True)
        raise NotPossible(
            f"cannot make `{problem.filename or folder}`: {(problem.strerror or str(problem)).lower()}",
            hint="name another folder",
        ) from problem
    print_list([{"path": str(folder / name)} for name in FILES], {"FILE": lambda row: row["path"]}, output)
    first = f"cd {shlex.quote(str(folder))} && " if folder != Path() else ""
    note(f"try: {first}runtime run train fit --seed=1")
    return 0
