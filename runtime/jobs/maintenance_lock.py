"""The hold on a record root: a mark that a cluster is being restarted, so that nobody starts jobs there meanwhile.

Its maker renews it. A mark that nobody has renewed for an hour blocks nothing, so one that was left behind by a command
that died never blocks for ever; the next restart takes it over. Clocks may differ by less than that hour.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from runtime.errors import InfrastructureFailure, InvalidValue
from runtime.jobs.hosts.base import Files
from runtime.jobs.ledger import now
from runtime.units import format_time, parse_time

FILE: Final = "restart/hold"
LASTS: Final = timedelta(hours=1)
RENEW: Final = timedelta(minutes=1)
HINT: Final = "`runtime cluster restart` finishes it, `--give-up` ends it, `--dry-run` shows where it stands"


@dataclass(frozen=True, slots=True, kw_only=True)
class MaintenanceLock:
    token: str
    by: str
    """Who made it, and on which machine."""
    since: datetime
    renewed: datetime
    why: str = "restart"
    session: str | None = None
    """The head's session before the restart; None if the head did not answer."""
    commanded: bool = False
    """Whether the head's unit was restarted."""
    asked: tuple[str, ...] = ()
    """Jobs of the head that were asked to end for the restart."""
    drops_others: bool = False
    """Whether its maker allowed it to drop jobs that are not ours."""

    def blocks(self, at: datetime) -> bool:
        """Whether it counts. One from a far future does not: its maker's clock was wrong."""
        return abs(at - self.renewed) <= LASTS

    def tell(self) -> str:
        return f"the cluster is being restarted by {self.by} since {format_time(self.since)}"


class RootHeld(InfrastructureFailure):
    """Nothing may be started in a record root now; the same command works later."""

    def __init__(self, hold: MaintenanceLock) -> None:
        self.hold = hold
        super().__init__(
            hold.tell(),
            facts=["nothing was submitted"],
            hint="run the same command again when that is done, in some minutes",
            retryable=True,
        )


def read_hold(files: Files) -> MaintenanceLock | None:
    """The root's hold; None if there is none, or one that nobody can read."""
    text = files.read(FILE)
    try:
        return _decode(json.loads(text)) if text else None
    except (ValueError, KeyError, TypeError, AttributeError, InvalidValue):
        return None


def write_hold(files: Files, hold: MaintenanceLock) -> None:
    value = {
        "token": hold.token,
        "by": hold.by,
        "since": format_time(hold.since),
        "renewed": format_time(hold.renewed),
        "why": hold.why,
        "session": hold.session,
        "commanded": hold.commanded,
        "asked": list(hold.asked),
        "drops_others": hold.drops_others,
    }
    files.write(FILE, json.dumps(value, sort_keys=True).encode(), mode=0o644)


def remove_hold(files: Files) -> None:
    files.remove(FILE)


def refuse_if_held(files: Files, *, holder: str = "") -> None:
    """Raise `RootHeld` while a hold of somebody else counts."""
    held = read_hold(files)
    if held is not None and held.token != holder and held.blocks(now()):
        raise RootHeld(held)


def _decode(value: Mapping[str, Any]) -> MaintenanceLock:
    return MaintenanceLock(
        token=str(value["token"]),
        by=str(value["by"]),
        since=parse_time(value["since"]),
        renewed=parse_time(value["renewed"]),
        why=str(value.get("why", "")),
        session=value.get("session"),
        commanded=bool(value.get("commanded")),
        asked=tuple(map(str, value.get("asked", ()))),
        drops_others=bool(value.get("drops_others")),
    )
