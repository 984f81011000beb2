"""Why Slurm refused a job, why it waits, or how it ended: a sentence with Slurm's own words and limits as evidence."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from runtime.end_reasons import EndReason, Explanation
from runtime.errors import RequestRefused
from runtime.jobs.plan import LaunchPlan, NativeState
from runtime.launchers.slurm.states import NO_OUTPUT_FILE
from runtime.units import format_duration

if TYPE_CHECKING:
    from runtime.launchers.slurm.client import SlurmClient


OF_QOS: Final[Mapping[str, str]] = {
    "MaxTRESPerJob": "a job",
    "MaxTRESPerNode": "a node of a job",
    "MaxTRESPerUser": "all jobs of a user",
    "MaxTRESPerAccount": "all jobs of an account",
    "GrpTRES": "all its jobs together",
}
"""Field of `sacctmgr` → the jobs that it limits."""
OF_ACCOUNT: Final[Mapping[str, str]] = {
    "MaxTRES": "a job",
    "MaxTRESPerNode": "a node of a job",
    "GrpTRES": "all its jobs together",
}
WALL: Final = "MaxWall"

_UNITS: Final = {"": 1.0, "K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3}


@dataclass(frozen=True, slots=True)
class Limit:
    whose: str
    """``QOS `high` ``"""
    over: str
    """The jobs that it holds for: `a job`, `all jobs of a user`."""
    amounts: Mapping[str, str] = field(default_factory=dict)
    """Resource → amount, in Slurm's own words."""
    minutes: float | None = None
    """The longest time of a job, if the limit is one of time."""


def read_limits(text: str, fields: Mapping[str, str], whose: str) -> list[Limit]:
    """The limits in lines of `sacctmgr -n -P`, whose columns are `fields` and `WALL`."""
    found = []
    for line in text.splitlines():
        *amounts, wall = line.split("|")
        if len(amounts) != len(fields):
            continue
        found += [
            Limit(whose, over, read_amounts(each))
            for over, each in zip(fields.values(), amounts, strict=True)
            if each.strip()
        ]
        if (minutes := read_minutes(wall)) is not None:
            found.append(Limit(whose, "a job", minutes=minutes))
    return found


def read_amounts(text: str) -> dict[str, str]:
    """`cpu=4,mem=800M,gres/gpu=2`"""
    pairs = (word.partition("=") for word in text.strip().split(","))
    return {name: amount for name, given, amount in pairs if given}


def read_minutes(text: str) -> float | None:
    """Minutes of `5`, `00:05:00` or `1-12:00:00`; None for other text, such as UNLIMITED."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if match is None:
        return None
    days, first, second, third = (int(each or 0) for each in match.groups())
    if match[1] or match[4]:
        return days * 1440 + first * 60 + second + third / 60
    return first + second / 60


def find_exceeded(
    limits: Sequence[Limit], asked: Mapping[str, str], nodes: int, minutes: float | None
) -> Iterator[str]:
    """Yield in words each limit that one job with these resources on `nodes` nodes exceeds by itself."""
    for limit in limits:
        if limit.minutes is not None and minutes is not None and minutes > limit.minutes:
            allowed, wanted = (format_duration(each * 60) for each in (limit.minutes, minutes))
            yield f"{limit.whose} allows {limit.over} {allowed}, and its time limit is {wanted}"
        share = nodes if limit.over == OF_QOS["MaxTRESPerNode"] else 1
        for name, amount in limit.amounts.items():
            most, wanted_amount = _number(amount), _number(asked.get(name, "0"))
            if most is not None and wanted_amount is not None and wanted_amount / share > most:
                of = f" on {nodes} nodes" if share > 1 else ""
                yield f"{limit.whose} allows {name}={amount} for {limit.over}, and it asks for {name}={asked[name]}{of}"


def describe_limits(limits: Sequence[Limit], asked: Mapping[str, str]) -> list[str]:
    """A line for each limit of a resource that the job asks for."""
    lines = []
    for limit in limits:
        amounts = ", ".join(f"{name}={amount}" for name, amount in limit.amounts.items() if name in asked)
        if amounts:
            lines.append(f"{limit.whose} allows {amounts} for {limit.over}")
    return lines


def _number(text: str) -> float | None:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGTP]?)[nc]?", text)
    return float(match[1]) * _UNITS[match[2]] if match else None


NO_OUTPUT_CODE: Final = 128 + NO_OUTPUT_FILE

# Slurm's reason, or how it begins → sentence, next step.
PENDING: Final[Mapping[str, tuple[str, str | None]]] = {
    "Resources": ("it waits until nodes that fit are free", None),
    "Priority": ("other jobs come before it", None),
    "Dependency": ("it waits for the jobs it depends on", None),
    "DependencyNeverSatisfied": (
        "a job it depends on has failed, so it will never start",
        "cancel it, and launch again",
    ),
    "JobArrayTaskLimit": ("as many of its indices run as `array.max_parallel` allows", None),
    "BeginTime": ("it was requeued, and Slurm lets it start again in a while", None),
    "JobHeldUser": ("it is held", "scontrol release ID"),
    "JobHeldAdmin": ("an administrator holds it", "ask the administrators of the cluster"),
    "job requeued in held state": ("it was requeued and is held", "scontrol release ID"),
    "launch failed requeued held": (
        "a node could not start it, so Slurm put it back and holds it",
        "scontrol release ID, and leave the node out: placement.exclude",
    ),
    "ReqNodeNotAvail": ("nodes that it asks for are down, drained or reserved", "ask for others, or wait"),
    "Nodes required for job are DOWN": (
        "nodes that it asks for are down, drained or reserved",
        "ask for others, or wait",
    ),
    "PartitionTimeLimit": (
        "its time limit is longer than the partition allows, so it will never start",
        "shorten time_limit, or set `max_time` of the target",
    ),
    "PartitionConfig": ("it asks for more than the partition has, so it will never start", "ask for less"),
    "PartitionNodeLimit": ("it asks for more nodes than the partition allows", "ask for fewer nodes"),
    "PartitionDown": ("the partition starts no jobs now", "name another `partition`, or wait"),
    "PartitionInactive": ("the partition starts no jobs now", "name another `partition`, or wait"),
    "BadConstraints": ("no node can ever fit it", "ask for less, or for other features"),
    "InvalidAccount": ("its account is not known any more", "set `account`"),
    "InvalidQOS": ("its QOS is not known any more", "set `qos` of the target"),
    "Reservation": ("its reservation has not begun", None),
    "ReservationDeleted": ("its reservation was deleted", "name another"),
    "Licenses": ("it waits for a licence", None),
    "QOSMax": ("a limit of its QOS is reached", "wait until others of your jobs have ended"),
    "QOSGrp": ("all jobs of its QOS together have reached its limit", "wait, or use another QOS"),
    "QOSMin": ("it asks for less than its QOS demands", "ask for more, or use another QOS"),
    "QOS": ("a limit of its QOS stops it", "wait, or use another QOS"),
    "AssocMax": ("a limit of your account is reached", "wait until others of your jobs have ended"),
    "AssocGrp": ("all jobs of your account together have reached its limit", "wait, or use another account"),
    "Assoc": ("a limit of your account stops it", "wait, or use another account"),
    "MaxJobsPer": ("as many of your jobs run as the account allows", None),
    "Prolog": ("the node's prolog runs", None),
    "Cleaning": ("its last try is still being cleared away", None),
    "NodeDown": ("a node that it needs is down", None),
    "FrontEndDown": ("no front end of the cluster is up", None),
    "BurstBuffer": ("it waits for the burst buffer", None),
    "None": ("Slurm has not looked at it yet", None),
}


def explain_pending(native: NativeState, shown: str, client: SlurmClient | None = None) -> Explanation:
    fields = _fields(shown)
    reason = fields.get("Reason") or native.raw.partition("/")[2] or "None"
    if "unfulfilled" in fields.get("Dependency", "") and reason in ("None", "Resources", "Priority"):
        reason = "Dependency"  # Slurm gives the reason of its last look, which may be at something else
    sentence, hint = find_sentence(reason)
    evidence = [f"slurm: {native.native_id} is {native.raw.partition('/')[0]}, reason {reason}"]
    if (start := fields.get("StartTime", "Unknown")) not in ("Unknown", "N/A"):
        evidence.append(f"slurm expects it to start at {start}")
    if fields.get("Dependency", "(null)") != "(null)":
        evidence.append(f"it depends on {fields['Dependency']}")
    if wanted := fields.get("ReqTRES") or fields.get("TRES"):
        evidence.append(f"it asks for {wanted}, of partition {fields.get('Partition', '?')}")
    if client is not None and reason in ("Resources", "Priority", "PartitionConfig", "BadConstraints"):
        evidence += describe_nodes(client.nodes(), fields.get("Partition"))
    if client is not None and reason.startswith(("QOS", "Assoc", "Max")):
        asked = read_amounts(fields.get("ReqTRES") or fields.get("TRES", ""))
        known = find_limits(client, reason, fields)
        nodes = fields.get("NumNodes", "1").partition("-")[0]
        minutes = read_minutes(fields.get("TimeLimit", ""))
        exceeded = list(find_exceeded(known, asked, int(nodes) if nodes.isdecimal() else 1, minutes))
        if exceeded:
            whose = "QOS: `qos` of the target" if reason.startswith("QOS") else "`account`"
            sentence = f"it will never start: {exceeded[0]}"
            hint = f"cancel it and ask for less, or use another {whose}"
        evidence += exceeded[1:] or describe_limits(known, asked)
    hint = hint.replace("ID", native.native_id) if hint else None
    return Explanation(sentence=sentence, evidence=tuple(evidence), hint=hint)


def find_limits(client: SlurmClient, reason: str, fields: Mapping[str, str]) -> list[Limit]:
    """The limits that a reason may mean: those of the job's QOS and its partition's, or of its account."""
    if not reason.startswith("QOS"):
        user = fields.get("UserId", "").partition("(")[0]
        return client.limits_of_account(fields.get("Account", ""), user)
    names = [fields.get("QOS", ""), client.qos_of_partition(fields.get("Partition", "")) or ""]
    return [limit for name in dict.fromkeys(filter(None, names)) for limit in client.limits_of_qos(name)]


def describe_nodes(listed: str, partition: str | None = None) -> list[str]:
    """A line for each sort of node and partition: the number of nodes, and how many of them are in which state."""
    sorts: dict[tuple[str, ...], Counter[str]] = {}
    for line in listed.splitlines():
        name, state, cpus, memory, gres, features, count = [*line.split("|"), *[""] * 7][:7]
        if partition in (None, name.rstrip("*")) and count.isdecimal():
            sort = (name.rstrip("*"), cpus, memory, *(each for each in (gres, features) if each != "(null)"))
            sorts.setdefault(sort, Counter())[state.rstrip("*~#!%$@^-")] += int(count)
    lines = []
    for (name, cpus, memory, *rest), states in sorts.items():
        whole = ", ".join([f"{cpus} {'CPU' if cpus == '1' else 'CPUs'}", f"{memory} MB", *rest])
        nodes = f"{states.total()} node{'s' if states.total() != 1 else ''}"
        lines.append(f"{name}: {nodes} of {whole} ({', '.join(f'{n} {state}' for state, n in sorted(states.items()))})")
    return sorted(lines)[:8]


def find_sentence(reason: str) -> tuple[str, str | None]:
    """Find the sentence and the next step by the whole reason, else by its longest known beginning."""
    for begin in sorted(PENDING, key=len, reverse=True):
        if reason == begin or reason.replace("_", " ").startswith(begin):
            return PENDING[begin]
    return f"slurm says why it waits: {reason}", None


_ENDS: Final[Mapping[EndReason, tuple[str, str | None]]] = {
    EndReason.OOM: ("it used more memory than it had asked for", "raise resources.memory"),
    EndReason.TIMEOUT: ("its time limit came", "raise time_limit, or write checkpoints"),
    EndReason.PREEMPTED: ("jobs of more importance took its nodes", None),
    EndReason.NODE_FAILED: ("its node went down", None),
    EndReason.NO_CAPACITY: ("it had not started by its deadline", "raise start_deadline"),
    EndReason.CONFIG_INVALID: ("no node can ever fit what it asks for", "ask for less"),
    EndReason.SETUP_FAILED: (
        "the node could not start it: the folder of its output was missing or full, or its prolog failed",
        "see whether the nodes can write to the record root",
    ),
    EndReason.CANCELLED: ("it was cancelled on Slurm", None),
    EndReason.DUPLICATE: ("another cluster of the federation started it", None),
}


def explain_failed(native: NativeState, shown: str) -> Explanation | None:
    if native.reason is None or native.reason not in _ENDS:
        return None
    sentence, hint = _ENDS[native.reason]
    if native.reason is EndReason.SETUP_FAILED and native.raw == "FAILED" and native.exit_code != NO_OUTPUT_CODE:
        sentence, hint = "its batch script ended before the shim began an attempt", None
    fields = _fields(shown)
    evidence = [f"slurm: {native.native_id} is {native.raw}"]
    if native.exit_code is not None:
        evidence.append(f"exit code {native.exit_code}")
    if native.where:
        evidence.append(f"node {native.where}")
    if (limit := fields.get("TimeLimit")) and native.reason is EndReason.TIMEOUT:
        evidence.append(f"time limit {limit}, ran {fields.get('RunTime', '?')}")
    return Explanation(sentence=sentence, evidence=tuple(evidence), hint=hint)


def _fields(shown: str) -> dict[str, str]:
    """The fields in the first line of `scontrol -o show job`: NAME=VALUE words; a value may hold blanks."""
    line = next((line for line in shown.splitlines() if line.startswith("JobId=")), "")
    return {match[1]: match[2].strip() for match in re.finditer(r"(\S+?)=(.*?)(?=\s\S+?=|$)", line)}


class SubmitRefused(RequestRefused):
    """Slurm refused the job; `said` is its own sentence."""

    def __init__(self, target: str, job: str, said: str, *, facts: Sequence[str], hint: str) -> None:
        self.target, self.job, self.said = target, job, said
        super().__init__(f"slurm refused job `{job}`: {said}", facts=facts, hint=hint)


def explain_refusal(plan: LaunchPlan, client: SlurmClient, said: str) -> SubmitRefused:
    """The refusal that sbatch printed, with the names that the cluster has."""
    text = re.sub(r"^(sbatch: )?(error: )?(Batch job submission failed: )?", "", said).strip()
    lower = text.lower()
    target = plan.target.name
    facts: list[str] = []
    hint = f"see the words that were used: {plan.folder}/artefacts/sbatch.txt in the record root"
    if "policy" in lower or "submit limit" in lower:
        hint = "ask for less, wait until others of your jobs have ended, or set `max_submit` of the target"
    elif "partition" in lower and "account" not in lower:
        facts = [f"partitions on `{target}`: {', '.join(client.partitions()) or 'unknown'}"]
        hint = f"set `partition` of target `{target}`"
    elif "account" in lower:
        facts = [f"your accounts on `{target}`: {', '.join(client.names_of('account')) or 'unknown'}"]
        hint = f"set `account` of the job or of target `{target}`"
    elif "qos" in lower:
        facts = [f"your QOS on `{target}`: {', '.join(client.names_of('qos')) or 'unknown'}"]
        hint = f"set `qos` of target `{target}`"
    elif "array" in lower:
        facts = [f"MaxArraySize on `{target}`: {client.configuration('MaxArraySize') or 'unknown'}"]
        hint = f"set `max_array_size` of target `{target}` to it"
    elif "time limit" in lower:
        hint = f"shorten time_limit, or set `max_time` of target `{target}` to the partition's longest"
    elif "node configuration" in lower or "memory specification" in lower or "feature" in lower:
        facts = describe_nodes(client.nodes())
        hint = "ask for less, or for another `partition`"
    return SubmitRefused(target, plan.job.id, text, facts=facts, hint=hint)
