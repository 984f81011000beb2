"""Compares the autoscaler file that a head says it uses with the one that the stack's contract names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from runtime.outputs import ClusterOutput
    from runtime.stack.google_api import GoogleApi

NAMESPACE: Final = "runtime/"
STATE: Final = "state"
STOPPED: Final = "stopped"
"""The head's state after `runtime cluster stop`; the boot script replaces it."""
START_AGAIN: Final = "`runtime cluster exec -- sudo google_metadata_script_runner startup`"


class ConfigVerdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFinding:
    verdict: ConfigVerdict
    check: str
    text: str
    fix: str | None = None


def read_head(api: GoogleApi, *, project: str, zone: str, head: str) -> dict[str, str] | None:
    """Return the guest attributes in which the head describes itself; None if there is no such machine, or it has written
    none yet. Raises `GoogleRefused` or `GoogleUnreachable`."""
    path = f"compute/v1/projects/{project}/zones/{zone}/instances/{head}/getGuestAttributes"
    answer = api.find("compute", path, queryPath=NAMESPACE)
    return None if answer is None else parse_attributes(answer)


def is_stopped(attributes: Mapping[str, str] | None) -> bool:
    """Whether an operator stopped Ray on the head that says this."""
    return (attributes or {}).get(STATE) == STOPPED


def parse_attributes(answer: Mapping[str, Any]) -> dict[str, str]:
    items = answer.get("queryValue", {}).get("items", ())
    return {str(item.get("key", "")): str(item.get("value", "")) for item in items}


def check_head(
    key: str, cluster: ClusterOutput, attributes: Mapping[str, str] | None, *, stack: str
) -> Iterator[ConfigFinding]:
    """Yield what the head's own words say against the contract. `key` is the cluster's name for commands."""
    if attributes is None:
        yield ConfigFinding(
            verdict=ConfigVerdict.FAIL,
            check="head",
            text=f"`{cluster.head}` is not there, or has said nothing of itself yet",
            fix=f"`pulumi up --refresh --stack {stack}` makes a head that is lost; a new one needs some minutes",
        )
        return
    state, waits = attributes.get(STATE, "unknown"), attributes.get("waiting-for", "nothing")
    if is_stopped(attributes):
        fix = f"{START_AGAIN} starts it again"
        yield ConfigFinding(
            verdict=ConfigVerdict.WARN, check="head", text="Ray was stopped by `runtime cluster stop`", fix=fix
        )
    elif state == "ready":
        yield ConfigFinding(verdict=ConfigVerdict.OK, check="head", text="ready")
    else:
        yield ConfigFinding(
            verdict=ConfigVerdict.WARN,
            check="head",
            text=f"{state}: for {waits}",
            fix="`runtime image push` and `runtime secrets put` bring what it waits for; it goes on by itself",
        )
    used = attributes.get("config-sha256")
    if used == cluster.config_sha256:
        yield ConfigFinding(
            verdict=ConfigVerdict.OK, check="file", text=f"the autoscaler's file is the contract's, {used[:12]}"
        )
    else:
        yield ConfigFinding(
            verdict=ConfigVerdict.FAIL,
            check="file",
            text=f"the head uses {used[:12] if used else 'no file'}, the contract has {cluster.config_sha256[:12]}",
            fix=f"`pulumi up --stack {stack}` if the settings are newer, `runtime stack publish --stack {stack}` if the "
            f"contract is older; else `runtime cluster exec --cluster {key} -- sudo journalctl -u runtime-ray-watch -n 50`",
        )
    restart = attributes.get("restart-needed", "no")
    if restart == "no":
        yield ConfigFinding(verdict=ConfigVerdict.OK, check="restart", text="Ray runs with the files of the machine")
    else:
        yield ConfigFinding(
            verdict=ConfigVerdict.WARN,
            check="restart",
            text=f"Ray runs with older files than the machine has: {restart}",
            fix=f"`runtime cluster restart --cluster {key}` applies them, and takes up the jobs",
        )
