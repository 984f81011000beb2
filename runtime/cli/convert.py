"""`runtime convert`: job files and stack files made of what people launched with before."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Final

from typer import Argument, Option

from runtime.cli.commands import new_app
from runtime.cli.console import note, write_text
from runtime.errors import NotPossible

app = new_app("Make job files and stack files of what you launched with before.")

LINES_FILE = "runs.jsonl"

# Docker's `{{.Names}}`, `{{json .}}` and `{{end}}` belong to a command, and are none of these.
_TEMPLATE: Final = re.compile(
    r"\{\{[-+]?\s*(?!(?:end|else|break|continue)\b)[A-Za-z_][\w.]*(?:\[[^\]\n]*\])?\s*(?:\|[^{}\n]*)?[-+]?\}\}"
    r"|\{%[-+]?\s*[a-z]+\b[^\n]*%\}"
)
"""A variable or a statement of a template that was not rendered."""

_NAME_IT = "name the YAML file of the ReplicaSet"


@app.callback()
def _convert() -> None:
    pass


@app.command("phoebe")
def phoebe(
    template: Annotated[Path, Argument(metavar="TEMPLATE.yaml", help="The ReplicaSet.")],
    runs: Annotated[
        Path | None, Argument(metavar="RUNS", help="The launch script with its list RUNS, or a YAML list.")
    ] = None,
    to: Annotated[Path | None, Option(metavar="FOLDER", help="Write job.yaml there.")] = None,
) -> int:
    """A ReplicaSet whose pods share a GPU, and a list of runs, as one job array: each seed ends once.

    The script is read and never executed. What changes, and what is left out, stands above the job.

    \b
    Examples:
      runtime convert phoebe worker.yaml
      runtime convert phoebe multi-seed-template.yaml launch-multi-seed.py --to jobs
      runtime launch --on phoebe -f jobs/job.yaml
    """
    from runtime.launchers.kubernetes.convert import convert, read_runs, render, render_lines

    listed = read_runs(_read(runs), source=str(runs)) if runs else []
    made = convert(_load(template), listed, lines_file=LINES_FILE)
    text = render(made)
    if to is None:
        if made.lines:
            raise NotPossible(
                "the runs differ in their commands, which takes a second file",
                hint=f"runtime convert phoebe {template} {runs} --to FOLDER",
            )
        write_text(text)
        return 0
    to.mkdir(parents=True, exist_ok=True)
    for name, content in (("job.yaml", text), (LINES_FILE, render_lines(made))):
        if content:
            _write(to / name, content)
    return 0


@app.command("marin")
def marin(
    cluster: Annotated[Path, Argument(metavar="CLUSTER.yaml", help="The file that `ray up` takes.")],
    to: Annotated[Path | None, Option("--output", "-o", metavar="FILE", help="Write the stack file there.")] = None,
) -> int:
    """A cluster file of Ray for Google's TPUs, as Marin's are, as the settings of a stack.

    Heads, pools, image, mounts, variables and set-up are carried over, and secrets by their names in Secret Manager.
    What is different, or left out, stands at the top of the stack file, each with its next step.

    \b
    Examples:
      runtime convert marin infra/marin-us-central2.yaml
      runtime convert marin infra/marin-us-central2.yaml -o Pulumi.marin-us-central2.yaml
      python -m infra check --stack marin-us-central2
    """
    from runtime.clusters.convert.cluster import MOST_BYTES, convert_cluster, render
    from runtime.units import count_noun

    made = convert_cluster(_load_cluster(cluster, MOST_BYTES))
    text = render(made)
    if to is None:
        write_text(text)
    else:
        _write(to, text)
    count = count_noun(len(made.notes), "thing")
    note(f"{count} of `{cluster}` differ or are left out; the top of the stack file has each with its next step")
    return 0


def _load_cluster(path: Path, most_bytes: int) -> Any:
    import yaml

    from runtime.jobs.spec_file import describe_syntax, load_yaml

    hint = "name the file that `ray up` takes"
    try:
        # A pipe has no size.
        with path.open("rb") as opened:
            content = opened.read(most_bytes + 1)
        text = content.decode()
    except (OSError, UnicodeDecodeError) as problem:
        said = getattr(problem, "strerror", None) or "it is no text"
        raise NotPossible(f"cannot read `{path}`: {said.lower()}", hint=hint) from None
    if len(content) > most_bytes:
        raise NotPossible(f"`{path}` is larger than {most_bytes:,} bytes, which no cluster file is", hint=hint)
    if _TEMPLATE.search(text):
        raise NotPossible(
            f"`{path}` is a template, and not the cluster file that is made of it",
            hint="make the cluster files first, with `python infra/update-cluster-configs.py` for Marin's",
        )
    try:
        return load_yaml(text)
    except yaml.YAMLError as problem:
        raise NotPossible(f"`{path}` is no YAML: {describe_syntax(problem)}", hint=hint) from None


def _write(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as opened:
            opened.write(text)
    except FileExistsError:
        raise NotPossible(f"`{path}` is there already", hint="name another place, or move it away") from None
    except (FileNotFoundError, NotADirectoryError):
        raise NotPossible(f"`{path.parent}` is no folder", hint="make it, or name another place") from None
    note(f"wrote {path}")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        said = getattr(problem, "strerror", None) or "it is no text"
        raise NotPossible(f"cannot read `{path}`: {said.lower()}", hint=_NAME_IT) from None


def _load(path: Path) -> Any:
    import yaml

    from runtime.jobs.spec_file import describe_syntax

    try:
        documents = [each for each in yaml.safe_load_all(_read(path)) if each is not None]
    except yaml.YAMLError as problem:
        raise NotPossible(f"`{path}` is no YAML: {describe_syntax(problem)}", hint=_NAME_IT) from None
    if len(documents) != 1:
        raise NotPossible(f"`{path}` has {len(documents)} documents, expected one ReplicaSet", hint=_NAME_IT)
    return documents[0]
