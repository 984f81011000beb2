"""Limits of a QOS or an account of Slurm, compared with the request of a job that may exceed one by itself. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from runtime.units import format_duration
from runtime.values import dataclass, field

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
