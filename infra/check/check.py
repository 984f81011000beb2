"""Checks the resources that a stack's program would make, without an engine, a cloud, an account or a network.

`check_stack` runs the program for one stack file, applies the policies and returns a `Report`;
`python -m infra check` prints it.
"""

from __future__ import annotations

import json
import re
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import pulumi

from infra.check.deployer import find_missing_rights, makes_account
from infra.check.kms_setup import list_key_needs
from infra.check.offers import find_offer_notes
from infra.check.ranges import StackSubnet, find_place, find_range_notes, find_range_problems
from infra.check.recording import (
    UNKNOWN,
    UNKNOWN_MARK,
    Recording,
    Registration,
    SecretValue,
    UnknownValue,
    is_grant,
    record,
)
from infra.check.shared_vpc_setup import list_host_needs
from infra.check.workflows import find_workflow_problems
from infra.gcp.catalog import BUCKET_LOCATIONS
from infra.gcp.outputs import compute
from infra.gcp.prices import AS_OF, Cost, find_costs, find_pool_costs, minimum_month
from infra.policy.base import StackBounds
from infra.policy.rules import apply_rules, bounds_of
from infra.settings.files import (
    InvalidStackFile,
    StackConfig,
    find_project_folder,
    find_stack_file,
    load_stack_config,
)
from infra.settings.model import StackSettings, TpuCapacity, TpuPoolSettings
from infra.settings.read import SECRET_VALUE, InvalidSettings, settings_from
from runtime.errors import RuntimeFailure
from runtime.outputs import NO_DIGEST, OUTPUT_NAME, parse_outputs
from runtime.schema import leaves


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """One reason why a stack must not be deployed."""

    source: str
    """`file`, `settings`, `program`, `inputs`, `policy`, `contract`, `workflows` or `stacks`"""
    rule: str
    """Name of the policy or check."""
    where: str
    """URN of the resource, or path of the setting."""
    message: str
    hint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A member, the role it gets, and the resource."""

    member: str
    role: str
    on: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    stack: str
    findings: tuple[CheckFinding, ...]
    recording: Recording | None
    """None for wrong settings, with which the program does not run."""
    settings: StackSettings | None = None
    costs: tuple[Cost, ...] = ()
    grants: tuple[Grant, ...] = ()
    left_grants: tuple[Grant, ...] = ()
    """Grants that people need in the project and another stack makes."""
    left_to_host: tuple[str, ...] = ()
    """Commands for the owner of a network in another project."""
    left_to_key_owner: tuple[str, ...] = ()
    """Commands without which Google's services cannot use the stack's encryption key."""
    rendered: Mapping[str, str] = field(default_factory=dict)
    """`RESOURCE/KEY` → text in the metadata: autoscaler files, boot scripts, units."""
    contract: Mapping[str, Any] | None = None
    """The contract; values that are not known before `up` read `<known after up>`."""
    notes: tuple[str, ...] = ()
    """Remarks that do not stop a deployment."""
    place: StackSubnet | None = None
    """Where the stack's machines are."""

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def resources(self) -> tuple[Registration, ...]:
        return self.recording.resources if self.recording is not None else ()

    @property
    def protected(self) -> list[Registration]:
        return [each for each in self.resources if each.protect]


def check_stack(stack: str, *, folder: Path | None = None) -> Report:
    """Check the stack of `Pulumi.<stack>.yaml` in `folder`, by default the project's root.

    Raises `UnknownName` without this file; every other problem is in the report.
    """
    path = find_stack_file(stack, folder or find_project_folder())
    try:
        config = load_stack_config(path)
        settings = settings_from(stack, config.values, config.secrets)
        recording = record_stack(stack, config)
    except RuntimeFailure as problem:
        return Report(stack=stack, recording=None, findings=tuple(_explained(problem, path.name)))
    except Exception as problem:
        # Any exception of the program is a finding.
        return Report(stack=stack, recording=None, findings=(_crash(problem),))
    report = report_on(recording, settings)
    problems = find_workflow_problems(settings.ci, path.parent) if settings.ci is not None else ()
    wrong = [CheckFinding("workflows", "pipeline-signs-in", *each) for each in problems]
    return replace(report, findings=(*report.findings, *wrong))


def record_stack(stack: str, config: StackConfig) -> Recording:
    """Run the program as the engine would for this stack. Its own exceptions pass through, unwrapped."""
    from infra.__main__ import run_program

    try:
        return record(run_program, stack=stack, config=config.values, secrets=config.secrets, compute=compute)
    except pulumi.RunError as wrapped:
        if isinstance(wrapped.__cause__, RuntimeFailure):
            raise wrapped.__cause__ from None
        raise


def report_on(recording: Recording, settings: StackSettings | None = None) -> Report:
    """Report on the resources that a program registered; with settings, also on their bounds."""
    contract = recording.outputs.get(OUTPUT_NAME)
    rendered = find_rendered(recording)
    findings = [
        *find_twins(recording),
        *find_violations(recording, settings),
        *find_leaks(recording),
        *find_contract_problems(contract),
    ]
    return Report(
        stack=recording.stack,
        findings=tuple(findings),
        recording=recording,
        settings=settings,
        costs=(*find_costs(recording), *_pool_costs(recording, settings)),
        place=find_place(settings) if settings is not None else None,
        grants=find_grants(recording),
        left_grants=tuple(_left_grants(settings)) if settings is not None else (),
        left_to_host=tuple(list_host_needs(settings)) if settings is not None else (),
        left_to_key_owner=tuple(list_key_needs(settings)) if settings is not None else (),
        rendered=rendered,
        contract=shown(contract) if isinstance(contract, Mapping) else None,
        notes=(
            *find_notes(recording),
            *((*find_offer_notes(settings), *find_money_notes(settings)) if settings is not None else ()),
        ),
    )


def _pool_costs(recording: Recording, settings: StackSettings | None) -> Iterator[Cost]:
    heads = {each.name.removesuffix("-head"): each.urn for each in recording.of_type("runtime:ray:RayHead")}
    return find_pool_costs(settings, heads) if settings is not None else iter(())


def _explained(problem: RuntimeFailure, file: str) -> Iterator[CheckFinding]:
    if isinstance(problem, InvalidSettings):
        for each in problem.problems:
            yield CheckFinding("settings", "settings", each.path or file, each.message, each.hint)
    elif isinstance(problem, InvalidStackFile):
        yield CheckFinding("file", "file", file, problem.problem, problem.hint)
    else:
        yield CheckFinding("program", "program", file, "; ".join((problem.message, *problem.facts)), problem.hint)


def _crash(problem: Exception) -> CheckFinding:
    frames = traceback.extract_tb(problem.__traceback__)
    ours = [each for each in frames if "/infra/" in each.filename and not each.filename.endswith(_PLUMBING)]
    where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "the program"
    return CheckFinding("program", "program-runs", where, f"{type(problem).__name__}: {problem}")


_PLUMBING: Final = ("/recording.py", "/check.py", "/__main__.py")


def find_twins(recording: Recording) -> Iterator[CheckFinding]:
    """Find resources of one stack that would be the same thing in the cloud."""
    owners: dict[tuple[str, str], str] = {}
    for each in recording.resources:
        identity = identity_of(each, recording)
        if identity is None:
            continue
        first = owners.setdefault(identity, each.urn)
        if first != each.urn:
            yield CheckFinding("inputs", "made-once", each.urn, f"is `{identity[1]}`, which `{_name(first)}` makes too")


def find_violations(recording: Recording, settings: StackSettings | None = None) -> Iterator[CheckFinding]:
    for each in apply_rules(recording.resources, bounds_of(settings) if settings is not None else StackBounds()):
        yield CheckFinding("policy", each.rule, each.urn, each.message, each.hint)


SUSPICIOUS_KEY: Final = re.compile(r"token|key|password|credential|passphrase", re.IGNORECASE)


def find_leaks(recording: Recording) -> Iterator[CheckFinding]:
    """Find secret values in the outputs; a policy finds those in inputs of resources."""
    for path, why in leaks_in(recording.outputs):
        yield CheckFinding("contract", "no-secret-output", path, why)


def leaks_in(outputs: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield path and reason for every output that is a secret, or is named like one."""
    for path, value in leaves(outputs):
        if isinstance(value, SecretValue):
            yield path, "is a secret value"
        elif isinstance(value, str) and SECRET_VALUE.search(value):
            yield path, "looks like a secret value"
        elif SUSPICIOUS_KEY.search(path.rpartition(".")[2]) and not _is_resource_name(value):
            yield path, "is named like a secret"


def _is_resource_name(value: Any) -> bool:
    return isinstance(value, UnknownValue) or (isinstance(value, str) and value.startswith("projects/"))


def find_contract_problems(contract: Any) -> Iterator[CheckFinding]:
    if not isinstance(contract, Mapping):
        yield CheckFinding("contract", "contract", OUTPUT_NAME, f"the stack exports no `{OUTPUT_NAME}`")
        return
    try:
        parse_outputs(shown(contract))
    except RuntimeFailure as problem:
        yield CheckFinding("contract", "contract", OUTPUT_NAME, problem.message)


def find_grants(recording: Recording) -> tuple[Grant, ...]:
    found: list[Grant] = []
    for each in recording.resources:
        if is_grant(each.type):
            found.append(Grant(member=_member(each), role=_text(each.inputs.get("role")), on=_on(each)))
        elif each.type.endswith((":RoleBinding", ":ClusterRoleBinding")):
            found += _kubernetes_grants(each)
    return tuple(found)


def _left_grants(settings: StackSettings) -> Iterator[Grant]:
    from infra.components.identity import find_people_grants

    if settings.makes_project_grants or not settings.uses_google:
        return
    for each in find_people_grants(settings.access, has_heads=bool(settings.heads)):
        yield Grant(member=_text(each.member), role=_text(each.role), on=f"project {settings.project}")


def _member(each: Registration) -> str:
    member = each.inputs.get("member")
    if not isinstance(member, UnknownValue):
        return _text(member)
    makers = sorted(_name(urn) for urn in each.property_dependencies.get("member", ()))
    return f"{UNKNOWN_MARK}, from {', '.join(makers)}" if makers else UNKNOWN_MARK


_NOT_THE_TARGET: Final = frozenset({"role", "member", "project", "location", "region", "zone", "condition"})


def _on(each: Registration) -> str:
    """Describe the resource of a grant: `topic dev-default`, `project my-lab`."""
    targets = sorted(set(each.inputs) - _NOT_THE_TARGET)
    key = targets[0] if targets else "project"
    value = _text(each.inputs.get(key))
    # All resources are in one project, so the last part is enough.
    short = value.rpartition("/")[2] if key != "project" else value
    place = f" in {_text(each.inputs['location'])}" if "location" in each.inputs else ""
    return f"{_words(key)} {short}{place}"


def _words(key: str) -> str:
    key = re.sub(r"(Id|Name)$", "", key)
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", key).lower()


def _kubernetes_grants(each: Registration) -> Iterator[Grant]:
    role, subjects = each.inputs.get("roleRef"), each.inputs.get("subjects")
    metadata = each.inputs.get("metadata")
    space = _text(metadata.get("namespace")) if isinstance(metadata, Mapping) else ""
    for subject in subjects if isinstance(subjects, list) else ():
        if isinstance(subject, Mapping) and isinstance(role, Mapping):
            own = f"{_text(subject['namespace'])}/" if subject.get("namespace") else ""
            yield Grant(
                member=f"{_text(subject.get('kind'))}:{own}{_text(subject.get('name'))}",
                role=_text(role.get("name")),
                on=f"namespace {space}" if space else "cluster",
            )


def find_rendered(recording: Recording) -> dict[str, str]:
    """Find every text of several lines in a machine's metadata."""
    found: dict[str, str] = {}
    for each in recording.of_type("gcp:compute/instance:Instance"):
        metadata = each.inputs.get("metadata")
        for key, value in metadata.items() if isinstance(metadata, Mapping) else ():
            if isinstance(value, str) and "\n" in value:
                found[f"{each.name}/{key}"] = value
    return found


def find_notes(recording: Recording) -> Iterator[str]:
    contract = recording.outputs.get(OUTPUT_NAME)
    clusters = contract.get("clusters") if isinstance(contract, Mapping) else None
    for name, cluster in clusters.items() if isinstance(clusters, Mapping) else ():
        image = cluster.get("image") if isinstance(cluster, Mapping) else None
        if isinstance(image, str) and image.endswith(NO_DIGEST):
            yield f"no image pinned yet: head `{name}` will wait for one"
    if isinstance(contract, Mapping) and contract.get("queues") and not contract.get("records"):
        yield "queues and no `records`: commands refuse a queue without a place for what became of its tasks"
    if not any(each.custom for each in recording.resources):
        yield "nothing is asked for, and nothing would be made"
    adopted = sum(1 for each in recording.resources if each.import_id)
    if adopted:
        yield f"{adopted} resources are taken over, not made: they have to exist"


MUCH_USD: Final = 10_000
"""Price a month from which nodes that run at all times are worth a remark: more than most mistakes cost before a bill comes."""


def find_money_notes(settings: StackSettings) -> Iterator[str]:
    """Yield what will cost money whether anybody works or not, and what a better place would save."""
    region = settings.region
    if region is None or not settings.heads:
        return
    for what, location in settings.bucket_locations.items():
        place = location or region
        if region not in (place.lower(), *BUCKET_LOCATIONS.get(place.lower(), ())):
            yield (
                f"`{what}` is in {place} and the heads with their nodes in {region}: traffic between them costs money,"
                " https://cloud.google.com/storage/pricing#network-buckets"
            )
    yield from _unreadable_buckets(settings)
    minima = [(name, each, minimum_month(each, region)) for name, each in settings.pools.items() if each.always > 0]
    total = sum(amount or 0.0 for _, _, amount in minima)
    for where, each, amount in minima:
        if amount is None or amount >= MUCH_USD or total >= MUCH_USD:
            idle = f", and {each.buffer:,} idle beside those that work" if each.buffer else ""
            nodes = f"{each.always:,} nodes {each.accelerator} at all times{idle}"
            yield f"pool `{where}` keeps {nodes}: {_month(each, amount)}"
    if total >= MUCH_USD and len(minima) > 1:
        yield f"the pools' minima together: {total:,.2f} USD a month at prices on demand"


def _unreadable_buckets(settings: StackSettings) -> Iterator[str]:
    """Find buckets that a variable of a cluster names and the stack's accounts may not read."""
    paths = {bucket: path for path, bucket in settings.bucket_names.items()}
    readable = {each for each, path in paths.items() if path == "records" or _is_for_clusters(settings, path)}
    machines = [each for name, head in settings.heads.items() for each in head.machines(f"heads.{name}").items()]
    for where, machine in machines:
        for variable, value in machine.variables.items():
            for bucket in sorted(set(re.findall(r"gs://([a-z0-9._-]+)", value)) - readable):
                step = f"`buckets: {{NAME: {{existing: {bucket}, readers: [clusters]}}}}` does"
                if bucket in paths:
                    step = f"`clusters` is not among the `readers` and `writers` of `{paths[bucket]}`"
                told = f"`{where}.variables.{variable}` names gs://{bucket}"
                yield f"{told}, which this stack lets none of its machines read: {step}"


def _is_for_clusters(settings: StackSettings, path: str) -> bool:
    bucket = settings.buckets[path.partition(".")[2]]
    return "clusters" in (*bucket.readers, *bucket.writers)


def _month(pool: TpuPoolSettings, amount: float | None) -> str:
    if amount is None:
        return "their price is not known here"
    if pool.capacity is TpuCapacity.ON_DEMAND:
        return f"{amount:,.2f} USD a month, prices of {AS_OF}"
    return f"a part of the {amount:,.2f} USD a month on demand, prices of {AS_OF}"


PHYSICAL_NAMES: Final = (
    "name",
    "accountId",
    "secretId",
    "repositoryId",
    "roleId",
    "workloadIdentityPoolProviderId",
    "workloadIdentityPoolId",
    "service",
    "displayName",
)


def physical_name(each: Registration) -> str | None:
    """Return the resource's name in the cloud; None if the program gives none, or the name is unknown."""
    if is_grant(each.type):
        return None
    metadata = each.inputs.get("metadata")
    if each.type.startswith("kubernetes:") and isinstance(metadata, Mapping):
        name = metadata.get("name")
        return name if isinstance(name, str) else None
    for key in PHYSICAL_NAMES:
        value = each.inputs.get(key)
        if isinstance(value, str):
            return value
    return None


def identity_of(each: Registration, recording: Recording) -> tuple[str, str] | None:
    """Return type and id of the resource's counterpart in the cloud; None if unknown."""
    if not each.custom or each.type.startswith("pulumi:providers:"):
        return None
    identity = each.outputs.get("id", UNKNOWN)
    if not isinstance(identity, str) or not identity:
        return None
    if each.type.startswith("kubernetes:"):
        return each.type, f"{_cluster_of(each, recording)}/{identity}"
    return each.type, identity


def _cluster_of(each: Registration, recording: Recording) -> str:
    urn = (each.provider or "").rpartition("::")[0]
    provider = next((found for found in recording.resources if found.urn == urn), None)
    return _text(provider.inputs.get("clusterIdentifier", provider.inputs.get("context"))) if provider else "?"


SHARED_TYPES: Final = frozenset({"gcp:projects/service:Service", "gcp:projects/serviceIdentity:ServiceIdentity"})
"""Types that several stacks of a project share and none owns."""


def find_collisions(reports: Sequence[Report]) -> list[CheckFinding]:
    """Find resources that two stacks would both make or give one unique name, and ranges that exclude each other."""
    owners: dict[tuple[str, str], list[str]] = defaultdict(list)
    for report in reports:
        for identity in sorted(_owned_by(report)):
            owners[identity].append(report.stack)
    twins = [
        CheckFinding(
            "stacks",
            "one-owner",
            " and ".join(stacks),
            f"both make {_words(kind.rpartition(':')[2])} `{name}`",
            "let one stack own it and the others refer to it with `existing`, or give them names of their own",
        )
        for (kind, name), stacks in owners.items()
        if len(stacks) > 1
    ]
    ranges = find_range_problems(_places(reports))
    apart = (CheckFinding("stacks", "ranges-apart", each.path, each.message, each.hint) for each in ranges)
    return [*twins, *apart, *_trusted_buckets(reports), *_missing_rights(reports)]


def _trusted_buckets(reports: Sequence[Report]) -> Iterator[CheckFinding]:
    """Find buckets for data that hold what commands and pipelines trust: task records, and Pulumi's state."""
    whole = [(each.stack, each.settings) for each in reports if each.settings]
    records = {each.bucket_names["records"]: stack for stack, each in whole if each.records is not None}
    states = {each.ci.state_bucket: stack for stack, each in whole if each.ci is not None}
    hint = "choose a bucket of its own"
    for stack, settings in whole:
        for path, bucket in settings.bucket_names.items():
            where = f"{stack}: {path}"
            if bucket in states:
                message = f"is `{bucket}`, which holds Pulumi's state, by `ci.state_bucket` of {states[bucket]}"
                yield CheckFinding("stacks", "trusted-bucket", where, message, hint)
            elif path != "records" and bucket in records and settings.buckets[path.partition(".")[2]].writers:
                message = f"is `{bucket}` with `writers`, which holds the task records of {records[bucket]}"
                yield CheckFinding("stacks", "trusted-bucket", where, message, hint)


def _missing_rights(reports: Sequence[Report]) -> Iterator[CheckFinding]:
    """Find what the pipeline of a stack may not make there."""
    whole = [(each.stack, each.settings, each.recording) for each in reports if each.settings and each.recording]
    for stack, settings, recording in whole:
        for _, other, pipeline in whole:
            if other.ci is not None and settings.deployer and makes_account(pipeline, settings.deployer):
                for where, message, hint in find_missing_rights(recording, settings, pipeline, other.ci):
                    yield CheckFinding("stacks", "deployer", f"{stack}: {where}", message, hint)


def _places(reports: Sequence[Report]) -> list[StackSubnet]:
    return [each.place for each in reports if each.place is not None]


def _owned_by(report: Report) -> set[tuple[str, str]]:
    if report.recording is None:
        return set()
    made = {
        identity
        for each in report.recording.resources
        if (identity := identity_of(each, report.recording))
        and each.type not in SHARED_TYPES
        and not is_grant(each.type)
    }
    contract = report.contract or {}
    for cluster in contract.get("clusters", {}).values():
        # Ray finds its nodes by this label in a zone of a project.
        place = f"{contract.get('project')}/{cluster.get('zone')}/{cluster.get('cluster_name')}"
        made.add(("ray:cluster:RayCluster", place))
    return made


def find_shared_notes(reports: Sequence[Report]) -> list[str]:
    """Find references to what no stack makes, grants that two stacks make, and networks that cannot be peered."""
    made = {identity for report in reports for _, identity in _owned_by(report)}
    notes = []
    for report in reports:
        notes += [
            f"{report.stack} refers to `{name}`, which none of these stacks makes: it has to exist"
            for name in sorted(_referred_to(report) - made)
        ]
    return [*notes, *_shared_grants(reports), *_missing_grants(reports), *find_range_notes(_places(reports))]


def _shared_grants(reports: Sequence[Report]) -> list[str]:
    owners: dict[tuple[str, Grant], list[str]] = defaultdict(list)
    for report in reports:
        project = (report.contract or {}).get("project")
        for grant in dict.fromkeys(report.grants):
            if project and UNKNOWN_MARK not in f"{grant.member} {grant.on}":
                owners[project, grant].append(report.stack)
    shared: dict[tuple[str, ...], int] = defaultdict(int)
    for stacks in owners.values():
        if len(stacks) > 1:
            shared[tuple(stacks)] += 1
    return [
        f"{', '.join(stacks)} make the same {count} grants: whichever is destroyed takes them from the others; "
        "set `access.project_grants: false` in all but one"
        for stacks, count in shared.items()
    ]


def _missing_grants(reports: Sequence[Report]) -> list[str]:
    from infra.components.identity import ADMIN_LOGIN, LOGIN

    made = {grant for report in reports for grant in report.grants}
    # The right to log in as administrator includes the right to log in.
    made |= {replace(grant, role=LOGIN) for grant in made if grant.role == ADMIN_LOGIN}
    missing: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for report in reports:
        for grant in report.left_grants:
            if grant not in made:
                missing[report.stack, grant.member, grant.on].append(grant.role)
    return [
        f"{stack} leaves what {member} needs on {on} to another stack, and none of these grants {', '.join(roles)}"
        for (stack, member, on), roles in missing.items()
    ]


_FULL_NAME: Final = re.compile(r"projects/[^/]+/(?:secrets/[^/]+|regions/[^/]+/subnetworks/[^/]+)$")


def _referred_to(report: Report) -> set[str]:
    """Return the full names of the contract's secrets, repositories and subnet."""
    found: set[str] = set()
    if report.recording is None:
        return found
    if report.settings is not None and report.settings.deployer is not None:
        found.add(f"projects/{report.settings.project}/serviceAccounts/{report.settings.deployer}")
    contract = report.contract or {}
    named = [secret.get("resource") for secret in contract.get("secrets", {}).values()]
    named.append(contract.get("network", {}).get("subnet"))
    found |= {name for each in named for name in _FULL_NAME.findall(str(each))}
    for regions in contract.get("registries", {}).values():
        for region, registry in regions.items():
            parts = str(registry.get("url")).split("/")
            if len(parts) >= 3:
                found.add(f"projects/{':'.join(parts[1:-1])}/locations/{region}/repositories/{parts[-1]}")
    return found


def shown(value: Any) -> Any:
    """Return `value` with readable marks for unknown and secret values."""
    if isinstance(value, UnknownValue):
        return UNKNOWN_MARK
    if isinstance(value, SecretValue):
        return "<secret>"
    if isinstance(value, Mapping):
        return {key: shown(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [shown(item) for item in value]
    return value


def _text(value: Any) -> str:
    value = shown(value)
    return value if isinstance(value, str) else json.dumps(value)


def _name(urn: str) -> str:
    return urn.rpartition("::")[2]
