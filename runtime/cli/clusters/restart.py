"""`runtime cluster restart`."""

from __future__ import annotations

import os
import secrets
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from typer import Option

from runtime.cli.clusters.common import (
    AddressOption,
    DryRunOption,
    OneClusterOption,
    SshOption,
    UserOption,
    open_one,
)
from runtime.cli.clusters.login import run_on_head
from runtime.cli.commands import OutputOption, StackOption, YesOption
from runtime.cli.console import note
from runtime.cli.output import Columns, OutputFormat, confirm, print_list
from runtime.errors import InfrastructureFailure, RequestRefused
from runtime.stack.port_forward import need_programs
from runtime.units import count_noun, parse_duration

if TYPE_CHECKING:
    from runtime.cli.clusters.common import SelectedClusters
    from runtime.client.jobs.cluster_restart import ClusterRestart, Means
    from runtime.client.jobs.reconcile import KeptJob
    from runtime.client.jobs.targets import OpenTarget
    from runtime.clusters.restart import RestartView
    from runtime.outputs import ClusterOutput
    from runtime.stack.iap_ssh import HeadWay

STARTED: Final = "/run/runtime-ray/started-runtime-ray-head.service"
"""On the head: the files that Ray was started with. Without it the boot script restarts Ray, with the files of today."""
SESSION: Final = "/var/lib/runtime-ray/session_latest"
"""On the head: a link to the folder of Ray's newest session."""
RUNNING: Final = "/run/runtime-ray/restart.lock"
"""On the head: locked while the boot script runs for a restart."""
ANSWER_S: Final = 600.0
"""The boot script waits for images and secrets without an end; after this time the head's own words count."""
LEFT: Final = 3
NOT_BEGUN: Final = "no restart is under way; nothing was changed"


class HeadNotRestarted(InfrastructureFailure):
    """The unit on `head` could not be restarted; the cluster stays marked."""

    def __init__(self, head: str, code: int) -> None:
        self.head, self.code = head, code
        super().__init__(
            f"could not restart Ray on head `{head}`: ssh ended with {code}",
            facts=["the cluster stays marked; its jobs have been asked to end, and are taken up later"],
            hint="`runtime cluster attach` shows what ssh and gcloud say; then run the same command again, or `--give-up`",
        )


class ClusterBusy(RequestRefused):
    """Somebody else is restarting the cluster."""

    def __init__(self, cluster: str, holder: str) -> None:
        self.holder = holder
        super().__init__(
            f"cluster `{cluster}` is being restarted by {holder}",
            facts=["nothing was changed by this command"],
            hint="`runtime cluster restart --dry-run` shows where it stands",
        )


def restart_words(session: str | None) -> tuple[str, ...]:
    """The command that restarts Ray on the head, if its newest session is still `session` once it is its turn.

    An earlier such command may still run there, since only its connection was cut off, or one may come late.
    """
    ours = f"''|*/{shlex.quote(session)}" if session else "*"
    script = (
        f"mkdir -p -m 700 {Path(RUNNING).parent}; exec 9>{RUNNING}; flock 9; "
        f'case "$(readlink {SESSION})" in {ours}) rm -f {STARTED};; esac; exec google_metadata_script_runner startup'
    )
    # As a unit of its own, which goes on if the connection breaks.
    return ("sudo", "systemd-run", "--quiet", "--collect", "--wait", "sh", "-c", script)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """A line of `--dry-run`."""

    step: str
    what: str


PLAN: Columns = {"STEP": "step", "WHAT": "what"}


def restart(
    drop_foreign: Annotated[
        bool, Option("--drop-foreign", help="Restart although jobs run that the runtime did not start, and are lost.")
    ] = False,
    give_up: Annotated[
        bool,
        Option("--give-up", help="End a restart that was begun: take up its jobs, remove its mark, restart nothing."),
    ] = False,
    patience: Annotated[str, Option(metavar="15m", help="How long the head may take to come back.")] = "15m",
    address: AddressOption = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    cluster: OneClusterOption = None,
    user: UserOption = None,
    ssh_option: SshOption = None,
    stack: StackOption = None,
    output: OutputOption = OutputFormat.TEXT,
) -> int:
    """Restart Ray on a cluster's head, with its waiting files, and take up all jobs that are open.

    Jobs are asked to end within their grace, and go on as their next attempt; no budget of failures pays. Meanwhile
    launches and keepers wait. The same command, by anybody, continues one that was cut off; two at once are refused. It
    refuses, and changes nothing, while jobs run that the runtime did not start. With `--give-up` it ends a restart that
    was begun, and restarts nothing. Exit code 3 if an open job neither runs nor waits at the end, or a step failed.

    \b
    Examples:
      runtime cluster restart --dry-run
      runtime cluster restart --stack marin-us-central2 --yes
      runtime cluster restart --give-up --dry-run
    """
    import getpass

    from runtime.client.jobs.cluster_jobs import open_cluster_jobs
    from runtime.client.jobs.cluster_restart import ClusterRestart, describe_strays
    from runtime.clusters.restart import decide_step
    from runtime.clusters.restart import restart as go

    if give_up and drop_foreign:
        raise RequestRefused("`--give-up` drops no jobs", hint="leave `--drop-foreign` out")
    head_s = parse_duration(patience, field="patience").total_seconds()
    chosen, key, each = open_one(stack, cluster)
    way = chosen.find_way(each, user, ssh_option)
    by, token = f"{getpass.getuser()}@{os.uname().nodename}", secrets.token_hex(8)
    with open_cluster_jobs(chosen.outputs, key, chosen.settings, address=address, way=way) as place:
        means = _find_means(chosen, each, way)
        world = ClusterRestart(
            place,
            chosen.settings,
            means,
            token=token,
            by=by,
            progress=note,
            head_s=head_s,
            drop_foreign=drop_foreign,
            gives_up=give_up,
        )
        view = world.look()
        for line in describe_strays(view):
            note(line)
        if dry_run:
            _print_plan(world, view, place, output, give_up=give_up)
            if give_up and view.hold is None:
                note(f"{key}: {NOT_BEGUN}")
            return 0
        if give_up:
            return _give_up(world, view, place, key, token, by, output, yes=yes)
        decide_step(view, token=token, drop_foreign=drop_foreign)  # refuses before the question
        need_programs(way)
        confirm(f"restart Ray on the head of `{each.cluster_name}`", yes=yes)
        with _at_work(place, key, by, world):
            go(world, token=token, drop_foreign=drop_foreign)
    return _print_kept(world.kept, f"{key}: restarted", output)


def _give_up(
    world: ClusterRestart,
    view: RestartView,
    place: OpenTarget,
    key: str,
    token: str,
    by: str,
    output: OutputFormat,
    *,
    yes: bool,
) -> int:
    """End what `view` shows of a restart; returns the exit code."""
    from runtime.cli.keep import COLUMNS
    from runtime.clusters.restart import RestartStep, describe_state, give_up

    done: set[RestartStep] = set()
    if view.hold is not None:
        note(f"{key}: {describe_state(view)}")
        confirm(f"give up the restart of {view.hold.by}", yes=yes)
        with _at_work(place, key, by, world):
            done = give_up(world, token=token)
    if RestartStep.TAKE_UP in done:
        return _print_kept(world.kept, f"{key}: the restart was given up", output)
    print_list([], COLUMNS, output)
    if not done:
        note(f"{key}: {NOT_BEGUN}")
        return 0
    note(f"{key}: the restart was given up; the head does not answer, so no job was taken up")
    note(f"  next: `runtime keep --once --cluster {key}` when it answers, or the same launches")
    return LEFT


@contextmanager
def _at_work(place: OpenTarget, key: str, by: str, world: ClusterRestart) -> Iterator[None]:
    """Be the only command at work on a cluster's restart. Raises `ClusterBusy`."""
    from runtime.client.jobs.cluster_restart import LOCK_FOLDER
    from runtime.jobs import lock

    held = lock.Lock(place.files, "", by, folder=LOCK_FOLDER)
    try:
        held.take(patience_s=lock.STILL_S + 5, wait=False)
    except lock.LockHeld as busy:
        raise ClusterBusy(key, busy.holder) from None
    try:
        yield
    finally:
        if world.marked:
            note("the cluster stays marked, for an hour at most: the same command goes on")
        held.release()


def _print_kept(kept: Sequence[KeptJob], done: str, output: OutputFormat) -> int:
    """Print what became of each open job; returns the exit code."""
    from runtime.cli.keep import COLUMNS
    from runtime.client.jobs.cluster_restart import goes_on

    print_list(list(kept), COLUMNS, output)
    cut_off = [job for job in kept if not job.submitted]
    left = [job for job in kept if job.submitted and not goes_on(job)]
    for job in cut_off:
        note(f"{job.job} of {job.owner} was never submitted; the same launch does that, or `runtime gc` clears it")
    for job in left:
        note(
            f"{job.job} of {job.owner or 'an unknown owner'} does not go on: {job.seen}"
            + (f"; {job.next}" if job.next else "")
        )
    begun = len(kept) - len(cut_off)
    went = count_noun(begun - len(left), "open job")
    note(f"{done}; {went} of {begun:,}, the rest does not go on" if left else f"{done}; {went} taken up or ended")
    return LEFT if left else 0


def _find_means(chosen: SelectedClusters, cluster: ClusterOutput, way: HeadWay) -> Means:
    from runtime.client.jobs.cluster_restart import Means
    from runtime.clusters.head_config import read_head

    return Means(
        ray_name=cluster.cluster_name,
        reaper=lambda: chosen.reaper(cluster),
        restart_head=lambda session: _restart_head(way, session),
        read_boot=lambda: read_head(chosen.api, project=chosen.project, zone=cluster.zone, head=cluster.head),
    )


def _restart_head(way: HeadWay, session: str | None) -> None:
    try:
        code = run_on_head(way, restart_words(session), timeout_s=ANSWER_S)
    except subprocess.TimeoutExpired:
        note("the boot script has not ended yet; the head's own words say what it waits for")
        return
    if code:
        raise HeadNotRestarted(way.head, code)


def _print_plan(
    world: ClusterRestart, view: RestartView, place: OpenTarget, output: OutputFormat, *, give_up: bool
) -> None:
    """Print each step with what it would do now, and the jobs by name."""
    from runtime.client.jobs.cluster_jobs import list_places
    from runtime.clusters.restart import foresee, foresee_give_up
    from runtime.jobs import open_jobs

    count = sum(len(open_jobs.list_open(place.files, each.target.name)) for each in list_places(place))
    if give_up:
        lines = foresee_give_up(view, open_jobs=count)
    else:
        lines = foresee(view, boot=world.read_boot(), open_jobs=count)
    print_list([PlanRow(step=step, what=what) for step, what in lines], PLAN, output)
    if view.session is None:
        note("the head does not answer: its jobs are not known")
    for each in view.jobs:
        if each.lives:
            kind = f"of {each.owner}" if each.ours else "not ours"
            note(f"{each.name}: {each.state}, {kind}: {each.title}")
