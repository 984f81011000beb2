"""`runtime launch`: a job on a target."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final

from typer import Option

from runtime.cli import job_options
from runtime.cli.commands import CaptureEveryOption, CaptureOption, OutputOption
from runtime.cli.console import INTERRUPTED, ask, note, note_block, say, write_log, write_text
from runtime.cli.output import OutputFormat, describe_state, print_json
from runtime.errors import InvalidValue, NotPossible, RequestRefused
from runtime.units import count_noun

if TYPE_CHECKING:
    from runtime.client.jobs.handle import JobHandle
    from runtime.client.jobs.prepare import LaunchOptions, LaunchRequest, PreparedLaunch
    from runtime.config import Settings

TIMED_OUT: Final = 124
STDIN: Final = Path("-")
BUNDLE_RECORDS: Final = "/DIR/records"
"""Stands for a bundle's own record root, which is part of the native name: one launch is one native job, independent of the
bundle's folder and of the target's record root."""
CONTEXT_SETTINGS = {"allow_interspersed_args": False}


def launch(
    command: job_options.CommandArgument = None,
    on: Annotated[str | None, Option(metavar="TARGET[,TARGET…]", help="Where: the first that accepts.")] = None,
    file: job_options.FileOption = None,
    name: job_options.NameOption = None,
    image: job_options.ImageOption = None,
    environment: Annotated[
        str | None, Option(metavar="LOCK|frozen|none", help="Its packages: a lock file, or those installed here.")
    ] = None,
    with_packages: Annotated[
        list[str] | None, Option("--with", metavar="NAME==VERSION", help="A package beside those; may repeat.")
    ] = None,
    cpus: Annotated[float | None, Option(help="Of each node.")] = None,
    memory: Annotated[str | None, Option(metavar="SIZE", help="Of each node: 16GiB, 16GiB..")] = None,
    gpus: Annotated[str | None, Option(metavar="[TYPE:]N", help="Of each node; below 1 a part of one.")] = None,
    nodes: Annotated[int | None, Option(help="How many machines.")] = None,
    time_limit: Annotated[str | None, Option(metavar="2h", help="Wall clock of each attempt.")] = None,
    log_limit: Annotated[str | None, Option(metavar="SIZE", help="The most that each log takes; 1GiB.")] = None,
    retries: Annotated[int | None, Option(help="Failures that are tried again.")] = None,
    env: job_options.EnvOption = None,
    secret: job_options.SecretOption = None,
    grid: Annotated[list[str] | None, Option(metavar="NAME=VALUES", help="An array of every combination.")] = None,
    grid_seed: Annotated[
        int | None, Option(metavar="N", help="Seed of the random values in --grid; 0 by default.")
    ] = None,
    seeds: Annotated[int | None, Option(help="An array of N seeds.")] = None,
    max_parallel: Annotated[int | None, Option(help="Of the array's runs at a time.")] = None,
    after: Annotated[
        list[str] | None,
        Option(
            "--after", metavar="[any:|notok:]JOB", help="Start once that job has succeeded, ended, or ended otherwise."
        ),
    ] = None,
    capture: CaptureOption = None,
    capture_every: CaptureEveryOption = None,
    reuse: Annotated[
        list[str] | None,
        Option(metavar="JOB/TAG:TAG", help="An artifact that attempts find in artifacts/TAG; may repeat."),
    ] = None,
    code: Annotated[str | None, Option(metavar="snapshot|none", help="none: the live tree.")] = None,
    set_: job_options.SetOption = None,
    ignore: job_options.IgnoreOption = None,
    dry_run: job_options.DryRunOption = False,
    export: Annotated[Path | None, Option(metavar="DIR", help="Write a bundle to copy over and run there.")] = None,
    follow: Annotated[bool, Option("--follow", help="Print the log until the job has ended.")] = False,
    yes: job_options.CostOption = False,
    again: Annotated[bool, Option("--again", help="A new job, though the same was launched before.")] = False,
    schema: Annotated[bool, Option("--schema", help="Print the JSON Schema of job files, for editors.")] = False,
    output: OutputOption = OutputFormat.TEXT,
) -> int:
    """Start a job on a target: this machine, a host, a Slurm cluster, a Kubernetes namespace.

    The code is the folder you are in, dirty and untracked files included, as it is now. The same launch again is the
    same job and its result; `--again` starts a new one. What the target cannot keep is refused and never dropped.

    \b
    Examples:
      runtime launch --on local python train.py --lr 1e-3
      runtime launch --on hpc --gpus a100:2 --time-limit 12h -- python train.py
      runtime launch --on hpc --grid lr=1e-3,3e-4 --max-parallel 4 -- python train.py --lr {lr}
      runtime launch --on hpc --after j-91c0 -- python evaluate.py
      runtime launch --on hpc --capture out/model:model -- python train.py
      runtime launch --on hpc --reuse train/model:base -- python evaluate.py artifacts/base
      runtime launch --on hpc,local -f job.yaml --follow
      runtime launch --on hpc -f job.yaml --dry-run
      runtime launch --schema > job.schema.json
    """
    from runtime.client.jobs.prepare import LaunchOptions
    from runtime.config import load_settings

    if schema:
        from runtime.jobs.spec import spec_schema

        print_json(spec_schema())
        return 0

    flags = {
        "name": name,
        "image": image,
        **read_environment(environment, with_packages),
        "resources.cpus": cpus,
        "resources.memory": memory,
        **read_gpus(gpus),
        "nodes": nodes,
        "time_limit": time_limit,
        "log_limit": log_limit,
        "retry.failure": retries,
        "array.seeds": seeds,
        "array.max_parallel": max_parallel,
        "code.mode": code,
        "after": [_whole(each) for each in after] if after else None,
        "capture_every": capture_every,
    }
    base = file.parent.absolute() if file is not None and file != STDIN else None
    options = LaunchOptions(
        again=again,
        ignore=tuple(ignore or ()),
        base=base,
        assume_yes=yes,
        agree=_agree if sys.stdin.isatty() else None,
    )
    request = build_request(
        file,
        command or [],
        flags,
        env or [],
        secret or [],
        grid or [],
        set_ or [],
        grid_seed=grid_seed,
        artifacts=read_artifacts(capture, reuse, base),
    )
    settings, targets = load_settings(), [each for each in (on or "").split(",") if each]
    if dry_run:
        return print_dry_run(request, targets, settings, options, output)
    if export is not None:
        return _export(request, targets, settings, options, export, output)
    from runtime.client.jobs.launch import launch as start

    with start(request, targets, settings=settings, options=options, progress=note) as job:
        return report_started(job, follow=follow, output=output)


def read_artifacts(
    capture: Sequence[str] | None, reuse: Sequence[str] | None, base: Path | None
) -> dict[str, Mapping[str, str]]:
    if not (capture or reuse):
        return {}
    from runtime.cli.submit_options import ArtifactOptions
    from runtime.client.artifacts import relative_path
    from runtime.config import working_folder

    named, here = ArtifactOptions.read(capture, None, reuse), base or working_folder()
    captured = {tag: relative_path(path, here) for tag, path in named.capture.items()}
    return {field: by_tag for field, by_tag in (("capture", captured), ("reuse", named.reuse)) if by_tag}


def read_environment(wanted: str | None, pins: Sequence[str] | None) -> dict[str, Any]:
    """Return the fields of the packages: a lock file goes to the manager that reads its kind."""
    if wanted is None and not pins:
        return {}
    given = {"environment.extras": list(pins)} if pins else {}
    if wanted in (None, "frozen", "none"):
        return {"environment.manager": wanted or "frozen", **given}
    managers = {".lock": "uv", ".txt": "pip", ".yml": "conda", ".yaml": "conda"}
    manager = managers.get(os.path.splitext(wanted)[1])  # noqa: PTH122
    if manager is None:
        raise InvalidValue("environment", wanted, "a lock file (uv.lock, requirements.txt), `frozen` or `none`")
    return {"environment.manager": manager, "environment.lock": wanted, **given}


def _agree() -> bool:
    return ask("start it? [y/N] ").strip().lower() in {"y", "yes"}


def _whole(after: str) -> str:
    """Return `[WHEN:]JOB` with the whole id of the job, which is part of the waiting job's id."""
    from runtime.cli.jobs import open_job
    from runtime.jobs.spec_fields import ID_LETTERS

    when, given, text = after.rpartition(":")
    if len(text) == len("j-") + ID_LETTERS:
        return after
    with open_job(text, None) as job:
        return f"{when}{given}{job.id}"


def print_dry_run(
    request: LaunchRequest, names: Sequence[str], settings: Settings, options: LaunchOptions, output: OutputFormat
) -> int:
    """Print the plan of each target that accepts, and why the others refuse. Raises the last refusal if all refuse."""
    from runtime.client.jobs.prepare import FieldsRefused, prepare

    plans: list[PreparedLaunch] = []
    refusals: dict[str, RequestRefused] = {}
    for target in request.choose_targets(names, settings):
        try:
            plans.append(prepare(request, target, settings, options))
        except (FieldsRefused, NotPossible) as problem:
            refusals[target.name] = problem
    if not plans:
        raise list(refusals.values())[-1]
    for name, refused in refusals.items():
        note(f"`{name}` would not accept it")
        note_block(refused.render())
    _print_plans(plans, output)
    return 0


def _export(
    request: LaunchRequest,
    names: Sequence[str],
    settings: Settings,
    options: LaunchOptions,
    folder: Path,
    output: OutputFormat,
) -> int:
    from dataclasses import replace

    from runtime.client.jobs.prepare import prepare
    from runtime.launchers.base import Exports
    from runtime.launchers.registry import get_launcher

    target = request.choose_targets(names, settings)[0]
    launcher = get_launcher(target.kind)
    if not isinstance(launcher, Exports):
        raise NotPossible(f"jobs for `{target.name}` ({target.kind}) cannot be written as a bundle", hint="slurm can")
    prepared = prepare(request, replace(target, records=BUNDLE_RECORDS), settings, options)
    written = launcher.export(prepared.plan, folder, prepared.snapshot.archive if prepared.snapshot else None)
    if output is OutputFormat.JSON:
        print_json({"job": prepared.plan.job.id, "target": target.name, "folder": folder, "files": written})
    else:
        say(str(folder))
    note(f"copy it to the cluster and run submit.sh there; then runtime import DIR --on {target.name}")
    return 0


def build_request(
    file: Path | None,
    command: Sequence[str],
    flags: Mapping[str, Any],
    env: Sequence[str],
    secret: Sequence[str],
    grid: Sequence[str],
    assignments: Sequence[str],
    *,
    grid_seed: int | None = None,
    artifacts: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
) -> LaunchRequest:
    """The fields of a job file with the flags over them, or of the flags alone. `artifacts` are `capture` and `reuse`, by tag."""
    from runtime.client.jobs.prepare import LaunchRequest
    from runtime.jobs.spec import parse_spec
    from runtime.jobs.spec_file import read_spec_file

    written: dict[str, Any] = read_spec_file(Path("/dev/stdin") if file == STDIN else file) if file else {}
    if command:
        if _is_job_file(command[0]):
            raise RequestRefused(
                f"`{command[0]}` is a file that no machine can run as a command",
                hint=f"runtime launch -f {command[0]} takes it as a job file",
            )
        written["command"] = list(command)
    for path, value in flags.items():
        if value is not None:
            _put(written, path, value)
    for text in env:
        variable, given, value = text.partition("=")
        _put(written, f"env.{variable}", value if given else None)
    for text in secret:
        variable, given, source = text.partition("=")
        if not given:
            raise InvalidValue("secret", text, "NAME=SOURCE, such as HF_TOKEN=env://HF_TOKEN")
        written["secrets"] = [*written.get("secrets", []), {"name": variable, "source": source}]
    for field, by_tag in artifacts.items():
        before = written.get(field)
        written[field] = {**(before if isinstance(before, Mapping) else {}), **by_tag}
    if grid or grid_seed is not None:
        from runtime.tasks.grid import read_options

        axes = read_options(grid, grid_seed).axes
        _put(written, "array.params", {axis.name: list(axis.values) for axis in axes})
    for text in assignments:
        path, given, value = text.partition("=")
        if not given:
            raise InvalidValue("set", text, "FIELD=VALUE, such as resources.shared_memory=8GiB")
        _put(written, path, _read_yaml(value))
    source = f"`{file}`" if file else "this command line"
    if "command" not in written:
        parse_spec(
            {**written, "command": ["true"], "notify": []}, source=source
        )  # faults of the other fields are reported first
        raise RequestRefused(
            "there is nothing to run: no command, and no job file that has one",
            hint="runtime launch --on local -- python train.py",
        )
    return LaunchRequest(written, source=source)


def _is_job_file(word: str) -> bool:
    return word.endswith((".yaml", ".yml", ".json")) and os.path.isfile(word) and not os.access(word, os.X_OK)  # noqa: PTH113


def _put(written: dict[str, Any], path: str, value: Any) -> None:
    *folders, last = path.split(".")
    place = written
    for folder in folders:
        inner = place.get(folder)
        place[folder] = inner = dict(inner) if isinstance(inner, Mapping) else {}
        place = inner
    place[last] = value


def read_gpus(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    kind, _, count = text.rpartition(":")
    try:
        amount = float(count)
    except ValueError:
        raise InvalidValue("gpus", text, "N or TYPE:N, such as 2, 0.25 or a100:4") from None
    return {"resources.gpus.count": amount, **({"resources.gpus.type": kind} if kind else {})}


def _read_yaml(text: str) -> Any:
    import yaml

    from runtime.jobs.spec_file import load_yaml

    try:
        return load_yaml(text)
    except yaml.YAMLError:
        return text


def _print_plans(plans: Sequence[PreparedLaunch], output: OutputFormat) -> None:
    if output is OutputFormat.JSON:
        print_json([_plan_fields(each) for each in plans])
        return
    from runtime.client.jobs.price_check import find_price
    from runtime.jobs.price import LIMIT, describe_price, exceeds

    for each in plans:
        plan, secrets = each.plan, _describe_secrets(each)
        say(f"# job {plan.job.id} `{plan.job.name}` on {plan.target.name} ({plan.target.kind})")
        say(
            f"# code {plan.job.snapshot or 'none'}, {count_noun(len(plan.indices), 'run')}, {count_noun(len(plan.parts), 'native job')}"
        )
        for name, text in plan.artefacts.items():
            say("", f"# {name}")
            write_text(f"{text.rstrip()}\n")
        say("", "# who keeps each field")
        for name, support in plan.fidelity.items():
            say(f"{name:<24} {support.fidelity:<8} {support.how}")
        if price := find_price(each):
            say("", f"# price: {describe_price(price, each.context.now.date())}")
            limit = each.context.settings.project.limits.max_hourly_cost
            if limit is not None and exceeds(price, limit):
                note(f"`{LIMIT}` would refuse it on `{plan.target.name}`")
        if secrets:
            say("", "# who reads each secret")
        for ref in secrets:
            say(f"{ref['name']:<24} {ref['read_by']:<8} {ref['source']}: {ref['how']}")
        for text in plan.notes:
            note(text)


def _describe_secrets(prepared: PreparedLaunch) -> list[dict[str, str]]:
    """How each secret of the job reaches its command; no value is read."""
    from runtime.jobs.secret_schemes import SecretReader
    from runtime.jobs.spec import secret_refs

    schemes = prepared.launcher.secret_schemes
    by_machine = prepared.plan.order.get("machine_secrets", {})
    found = []
    for ref in secret_refs(prepared.plan.spec):
        reader, how = schemes[ref.scheme].reader, schemes[ref.scheme].how
        if ref.name in by_machine:
            reader, how = (
                SecretReader.MACHINE,
                f"{by_machine[ref.name]}, with the machine's own account, at each attempt",
            )
        found.append({"name": ref.name, "source": ref.source, "read_by": reader, "how": how})
    return found


def _describe_price(prepared: PreparedLaunch) -> dict[str, Any] | None:
    from runtime.client.jobs.price_check import find_price

    price = find_price(prepared)
    if price is None:
        return None
    fields = {name: getattr(price, name) for name in ("what", "hourly", "currency", "at_most")}
    return {**fields, "listed_on": price.listed_on.isoformat() if price.listed_on else None}


def _plan_fields(prepared: PreparedLaunch) -> dict[str, Any]:
    from runtime.jobs.spec_fields import spec_fields

    plan = prepared.plan
    return {
        "job": plan.job.id,
        "name": plan.job.name,
        "target": plan.target.name,
        "kind": plan.target.kind,
        "snapshot": plan.job.snapshot,
        "records": plan.root,
        "spec": spec_fields(plan.spec),
        "order": plan.order,
        "artefacts": plan.artefacts,
        "parts": [{"name": part.name, "offset": part.offset, "count": part.count} for part in plan.parts],
        "fidelity": {name: {"kept": each.fidelity, "how": each.how} for name, each in plan.fidelity.items()},
        "secrets": _describe_secrets(prepared),
        "price": _describe_price(prepared),
        "notes": plan.notes,
    }


def report_started(job: JobHandle, *, follow: bool, output: OutputFormat) -> int:
    if not job.new:
        note(f"the same was launched before: job {job.id} on {job.target.name}; `--again` starts a new one")
    if not follow:
        if output is OutputFormat.JSON:
            entry = job.entry()
            print_json(
                {"job": job.id, "name": entry.name, "target": job.target.name, "new": job.new, "runs": entry.indices}
            )
        else:
            say(job.id)
        note(f"`runtime status {job.id[:10]}` shows it, `runtime logs -f {job.id[:10]}` what it prints")
        return 0
    from runtime.cli.jobs import detached, short, stuck_teller
    from runtime.client.jobs.handle import follow_all
    from runtime.end_reasons import EndReason
    from runtime.jobs.spec import JobState

    entry, tell = job.entry(), stuck_teller(job.id)
    try:
        if entry.indices > 1:
            write_log(b"[%d] %s\n" % (run, line) for run, line in follow_all(job, tell=tell))
        else:
            write_log(job.logs(index=entry.first_index, follow=True, tell=tell))
        status = job.wait()
    except KeyboardInterrupt:
        detached(job.id)
        return INTERRUPTED
    note(f"job {job.id} {describe_state(status.state, status.reason)}")
    if status.state is JobState.SUCCEEDED:
        return 0
    note(f"why: `runtime explain {short(job.id)}`")
    return TIMED_OUT if status.reason is EndReason.TIMEOUT else 1
