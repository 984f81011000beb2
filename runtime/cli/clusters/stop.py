"""`runtime cluster stop`."""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

from typer import Option

from runtime.cli.clusters.common import (
    DryRunOption,
    OneClusterOption,
    SshOption,
    UserOption,
    find_restart,
    open_one,
)
from runtime.cli.clusters.login import run_on_head
from runtime.cli.commands import OutputOption, StackOption, YesOption
from runtime.cli.console import note
from runtime.cli.output import Columns, OutputFormat, confirm, print_list
from runtime.clusters.head_config import NAMESPACE, STATE, STOPPED
from runtime.errors import InfrastructureFailure
from runtime.units import count_noun

if TYPE_CHECKING:
    from runtime.clusters.nodes import ZoneView
    from runtime.clusters.reap_policy import DeadResource
    from runtime.clusters.reaper import Removal
    from runtime.stack.iap_ssh import HeadWay

_SCRIPT: Final = (
    # The watcher first: it starts Ray again when settings change.
    "systemctl stop runtime-ray-watch.service runtime-ray-head.service || exit; "
    # Before the lists are read, so that an `add` of this moment either is in them, or finds this and removes what it made.
    f"curl --fail --silent --show-error --max-time 10 --request PUT --data {STOPPED} --header 'Metadata-Flavor: Google' "
    '"http://${GCE_METADATA_HOST:-metadata.google.internal}/computeMetadata/v1/instance/guest-attributes/'
    f'{NAMESPACE}{STATE}" '
    "|| echo 'runtime: this machine cannot say that Ray was stopped, so that nobody is kept from adding members' >&2"
)
STOP_RAY: Final = ("sudo", "sh", "-c", _SCRIPT)
"""On the head: stop Ray and say so."""
ROUNDS: Final = 4
PAUSE_S: Final = 5.0
"""A node that somebody asked for just before shows only in a later list, so that two in a row have to be empty."""


class HeadStillRuns(InfrastructureFailure):
    """Ray on `head` could not be stopped; nothing was removed."""

    def __init__(self, head: str, code: int, command: str) -> None:
        self.head, self.code = head, code
        super().__init__(
            f"could not stop Ray on head `{head}`: ssh ended with {code}",
            facts=["nothing was removed: Ray would make new nodes"],
            hint=f"stop it by hand and pass `--leave-head`: {command}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRow:
    cluster: str
    name: str
    kind: str
    """`node` or `queued resource`."""
    pool: str | None
    state: str
    removed: bool
    gone: bool = False
    error: str | None = None


def stop(
    leave_head: Annotated[
        bool,
        Option("--leave-head", help="Do not stop Ray on the head, which then makes new nodes unless it is stopped."),
    ] = False,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    cluster: OneClusterOption = None,
    user: UserOption = None,
    ssh_option: SshOption = None,
    stack: StackOption = None,
    output: OutputOption = OutputFormat.TEXT,
) -> int:
    """Remove what a cluster would leave billing.

    That is every TPU node and queued resource, before `pulumi destroy`: no reaper runs after that. Ray on the head is
    stopped first, over ssh, because it would make new nodes, and `add` is refused from then on. Jobs that run in the
    cluster end. Exit code 3 if something is left.

    \b
    Examples:
      runtime cluster stop --dry-run
      runtime cluster stop --stack marin-us-west4 --yes
    """
    from runtime.clusters.reap_policy import find_billed
    from runtime.jobs.ledger import now

    chosen, key, each = open_one(stack, cluster)
    reaper = chosen.reaper(each)
    view = reaper.look()
    billed = find_billed(view, each.cluster_name)
    stops = not leave_head and _has_head(view, each.cluster_name)
    if dry_run:
        _print([_row(key, dead) for dead in billed], output)
        if stops:
            note(f"{key}: Ray on `{each.head}` would be stopped")
        note(f"{key}: {count_noun(len(billed), 'resource')} would be left billing without the head")
        return 0
    if (held := find_restart(chosen, key)) is not None and held.blocks(now()):
        note(f"{key}: {held.tell()}, which starts Ray again")
        note("  next: say no, and wait until that is done, or give it up: `runtime cluster restart --give-up`")
    ending = "stop Ray on the head and " if stops else ""
    confirm(f"{ending}remove {count_noun(len(billed), 'node or queued resource')} of `{each.cluster_name}`", yes=yes)
    if stops:
        _stop_ray(chosen.find_way(each, user, ssh_option))
        view = reaper.look()
    done: dict[str, Removal] = {}
    was_empty = False
    for _ in range(ROUNDS):
        # A node that Google is deleting already needs no second request.
        left = [dead for dead in find_billed(view, each.cluster_name) if dead.state != "DELETING"]
        if not left and was_empty:
            break
        if left:
            done |= {removal.dead.resource: removal for removal in reaper.remove(left)}
        else:
            time.sleep(PAUSE_S)
        was_empty = not left
        view = reaper.look()
    rows = [
        _row(key, removal.dead, removed=removal.error is None, gone=removal.gone, error=removal.error)
        for removal in done.values()
    ]
    _print(rows, output)
    left = find_billed(view, each.cluster_name)
    stays = [dead for dead in left if dead.state != "DELETING"]
    note(
        f"{key}: {count_noun(len(left) - len(stays), 'resource')} being deleted, {len(stays)} left"
        if left
        else f"{key}: nothing is left"
    )
    if stays:
        note("  next: run the same command again; it removes what is left")
    return 3 if stays else 0


def _has_head(view: ZoneView, cluster: str) -> bool:
    """Whether the cluster has a head, as far as is known."""
    return view.heads is None or cluster in view.heads


def _stop_ray(way: HeadWay) -> None:
    from runtime.stack.iap_ssh import render_ssh

    if code := run_on_head(way, STOP_RAY):
        raise HeadStillRuns(way.head, code, shlex.join(render_ssh(way, STOP_RAY)))


def _row(
    cluster: str, dead: DeadResource, *, removed: bool = False, gone: bool = False, error: str | None = None
) -> StopRow:
    return StopRow(
        cluster=cluster,
        name=dead.name,
        kind="queued resource" if dead.is_queued else "node",
        pool=dead.pool,
        state=dead.state,
        removed=removed,
        gone=gone,
        error=error,
    )


def _print(rows: list[StopRow], output: OutputFormat) -> None:
    columns: Columns = {
        "CLUSTER": "cluster",
        "KIND": "kind",
        "NAME": "name",
        "POOL": "pool",
        "STATE": "state",
        "RESULT": lambda row: (
            row.error or ("would be removed" if not row.removed else "removed" if row.gone else "being deleted")
        ),
    }
    print_list(rows, columns, output)
