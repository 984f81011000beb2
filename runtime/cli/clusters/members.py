"""`runtime cluster add` and `runtime cluster remove`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from runtime.cli.clusters.common import (
    NOT_ASKED,
    AddressOption,
    DryRunOption,
    OneClusterOption,
    SshOption,
    TunnelOption,
    UserOption,
    ask_ray,
    open_one,
    reach_dashboard,
    refuse_two_ways,
)
from runtime.cli.commands import OutputOption, StackOption, YesOption
from runtime.cli.console import note
from runtime.cli.output import Columns, OutputFormat, confirm, print_list
from runtime.clusters.members import MemberCapacity, MemberStep
from runtime.errors import InfrastructureFailure, RequestRefused
from runtime.units import count_noun, parse_duration

if TYPE_CHECKING:
    from runtime.clusters.members import MemberSpec
    from runtime.clusters.nodes import TpuNode
    from runtime.clusters.provisioning import MemberOutcome
    from runtime.clusters.ray_view import RayView

PLANNED = {MemberStep.CREATE: "would be added", MemberStep.REPLACE: "would be made again", MemberStep.KEEP: "is there"}


class StillBusy(RequestRefused):
    """Something runs on the members `names`; nothing was removed."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        super().__init__(
            f"something runs on {count_noun(len(names), 'member')}: {', '.join(names)}",
            facts=["nothing was removed"],
            hint="wait for it, or pass `--force`",
        )


class RayIsSilent(InfrastructureFailure):
    """Ray was to be asked whether something runs on members, and did not answer `why`; nothing was removed."""

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(
            f"nobody knows whether something runs there: {why}",
            facts=["nothing was removed"],
            hint="run it again when Ray answers, or pass `--force`",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRow:
    """A member, and what was or would be done."""

    name: str
    accelerator: str
    capacity: str
    state: str
    result: str
    error: str | None = None


def add(
    accelerator: Annotated[str, Argument(metavar="TYPE", help="Type and size of the TPU, such as v4-16.")],
    count: Annotated[int, Option(metavar="N", min=1, max=100, help="How many: NAME-0, NAME-1 and so on.")] = 1,
    capacity: Annotated[MemberCapacity, Option(help="How Google provides it.")] = MemberCapacity.RESERVED,
    name: Annotated[
        str | None, Option(metavar="NAME", help="By default the cluster's name and TYPE.", show_default=False)
    ] = None,
    reservation: Annotated[
        str | None,
        Option(
            metavar="NAME", help="A certain reservation: projects/P/locations/Z/reservations/R.", show_default=False
        ),
    ] = None,
    runtime_version: Annotated[
        str | None,
        Option(metavar="V", help="TPU software; by default that of a pool of the same family.", show_default=False),
    ] = None,
    within: Annotated[str, Option(metavar="TIME", help="How long a member may take until it is whole.")] = "30m",
    wait: Annotated[bool, Option("--wait/--no-wait", help="Wait until all hosts are there.")] = True,
    keep: Annotated[bool, Option("--keep", help="Keep a member that is not whole in time.")] = False,
    dry_run: DryRunOption = False,
    address: AddressOption = None,
    tunnel: TunnelOption = False,
    cluster: OneClusterOption = None,
    user: UserOption = None,
    ssh_option: SshOption = None,
    stack: StackOption = None,
    output: OutputOption = OutputFormat.TEXT,
) -> int:
    """Add TPUs to a cluster: reserved, on-demand, spot or preemptible, of any slice size.

    A member joins Ray by itself, again after each restart of the head, and Ray's autoscaler neither counts nor ends it.
    It costs money until it is removed. A slice that does not have all its hosts in time is removed again. With
    `--address` or `--tunnel` the command also waits until Ray counts all hosts. Run it again after an interruption: it
    goes on from what is there. Exit code 3 if a member is not in the cluster.

    \b
    Examples:
      runtime cluster add v4-128
      runtime cluster add v4-8 --count 2 --capacity spot --name eval --tunnel
      runtime cluster add v5litepod-16 --capacity on_demand --dry-run
    """
    from runtime.clusters.members import make_specs, plan_members, render_member
    from runtime.clusters.provisioning import ClusterStopped, Provisioner

    refuse_two_ways(address, tunnel=tunnel)
    bound = parse_duration(within, field="--within")
    chosen, key, each = open_one(stack, cluster)
    specs = make_specs(
        accelerator,
        name=f"{key}-{accelerator}" if name is None else name,
        count=count,
        capacity=capacity,
        reservation=reservation,
        runtime_version=runtime_version,
    )
    reaper = chosen.reaper(each)
    joining = Provisioner(chosen.api, reaper, project=chosen.project, zone=each.zone, cluster=each.cluster_name)
    nodes = {node.name: node for node in reaper.list_nodes()}
    steps = plan_members(specs, nodes.values(), each.cluster_name)
    facts = joining.read_head(each.head)
    if facts.stopped:
        raise ClusterStopped(each.head)
    bodies = {spec.name: render_member(spec, facts, each.cluster_name) for spec in specs}
    if dry_run:
        _print([_planned(spec, steps[spec.name], nodes.get(spec.name)) for spec in specs], output)
        return 0
    if facts.ssh_key is None:
        note(f"{key}: the head does not tell its key, so `--node` of `attach` and `exec` will not reach these members")
    with reach_dashboard(chosen, each, address, user, ssh_option, tunnel=tunnel) as url:
        outcomes = joining.join(
            bodies,
            specs,
            within=bound,
            wait=wait,
            keep=keep,
            look_ray=None if url is None or not wait else _looker(url),
            has_stopped=lambda: joining.is_stopped(each.head),
            say=note,
        )
    _print([_done(outcome) for outcome in outcomes], output)
    for outcome in outcomes:
        if outcome.error is not None:
            note(f"{outcome.name}: {outcome.error}")
            note(f"  next: {outcome.next}")
    return 3 if any(outcome.error is not None for outcome in outcomes) else 0


def remove(
    names: Annotated[list[str], Argument(metavar="NAME...", help="Members, by name.")],
    force: Annotated[bool, Option("--force", help="Remove a member on which something runs.")] = False,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    address: AddressOption = None,
    tunnel: TunnelOption = False,
    cluster: OneClusterOption = None,
    user: UserOption = None,
    ssh_option: SshOption = None,
    stack: StackOption = None,
    output: OutputOption = OutputFormat.TEXT,
) -> int:
    """Remove members from a cluster, and their TPUs with them.

    Nodes of pools are Ray's and stay. With `--address` or `--tunnel`, a member on which something runs is removed only
    with `--force`, and so is any member if Ray does not answer. A name that is gone already is only said, unless all are.
    Exit code 3 if a member could not be removed.

    \b
    Examples:
      runtime cluster remove eval-0 eval-1 --tunnel
      runtime cluster remove main-v4-128 --yes
    """
    from runtime.clusters.members import find_busy, find_members
    from runtime.clusters.reap_policy import find_removable

    refuse_two_ways(address, tunnel=tunnel)
    chosen, key, each = open_one(stack, cluster)
    reaper = chosen.reaper(each)
    members = find_members(names, reaper.list_nodes(), each.cluster_name)
    ray, why = (None, None) if force else ask_ray(chosen, each, address, user, ssh_option, tunnel=tunnel)
    if ray is not None and (busy := find_busy(members, ray)):
        raise StillBusy(busy)
    if why is NOT_ASKED:
        note(f"{key}: Ray was {why}")
    elif why is not None:
        raise RayIsSilent(why)
    for name in sorted(set(names) - {member.member for member in members}):
        note(f"{name}: no such member; it is gone already, or has another name")
    if dry_run:
        _print([_row(member, "would be removed") for member in members], output)
        return 0
    listed = ", ".join(member.name for member in members)
    confirm(f"remove {listed} from `{each.cluster_name}`, and what runs there", yes=yes)
    known = {member.resource: member for member in members}
    removals = reaper.remove(find_removable(member for member in members if member.state != "DELETING"))
    rows = [
        *(_row(member, "being deleted") for member in members if member.state == "DELETING"),
        *(
            _row(known[each.dead.resource], "removed" if each.gone else "being deleted", each.error)
            for each in removals
        ),
    ]
    _print(rows, output)
    failed = [row for row in rows if row.error is not None]
    for row in failed:
        note(f"{row.name}: {row.error}")
    if failed:
        note("  next: run the same command again; it goes on from what is there")
    return 3 if failed else 0


def _looker(url: str) -> Callable[[], RayView]:
    from runtime.clusters.ray_view import read_ray

    return lambda: read_ray(url)


def _planned(spec: MemberSpec, step: MemberStep, node: TpuNode | None) -> MemberRow:
    return MemberRow(
        name=spec.name,
        accelerator=spec.accelerator,
        capacity=str(spec.capacity),
        state=node.state if node else "",
        result=PLANNED[step],
    )


def _done(outcome: MemberOutcome) -> MemberRow:
    if outcome.error is not None:
        result = "removed again" if outcome.removed else "failed"
    elif not outcome.joined:
        result = "asked for"
    else:
        result = "added" if outcome.created else "was there"
    return MemberRow(
        name=outcome.name,
        accelerator=outcome.accelerator,
        capacity=outcome.capacity,
        state=outcome.state,
        result=result,
        error=outcome.error,
    )


def _row(member: TpuNode, result: str, error: str | None = None) -> MemberRow:
    return MemberRow(
        name=str(member.member),
        accelerator=member.accelerator,
        capacity=member.capacity,
        state=member.state,
        result="failed" if error else result,
        error=error,
    )


def _print(rows: list[MemberRow], output: OutputFormat) -> None:
    columns: Columns = {
        "MEMBER": "name",
        "TYPE": "accelerator",
        "CAPACITY": "capacity",
        "STATE": lambda row: row.state or "-",
        "RESULT": "result",
    }
    print_list(rows, columns, output)
