"""Words for the tables that state how a launcher supports each field of a spec, and the rows that all tables share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from runtime.jobs.plan import Fidelity, FieldSupport
from runtime.jobs.spec_fields import leaf_fields


def native(how: str) -> FieldSupport:
    return FieldSupport(fidelity=Fidelity.NATIVE, how=how)


def by_shim(how: str = "the shim") -> FieldSupport:
    return FieldSupport(fidelity=Fidelity.SHIM, how=how)


def by_client(how: str) -> FieldSupport:
    return FieldSupport(fidelity=Fidelity.CLIENT, how=how)


def refused(why: str) -> FieldSupport:
    return FieldSupport(fidelity=Fidelity.REFUSED, how=why)


def fields_of(prefix: str) -> list[str]:
    """The dotted fields of a spec below `prefix`."""
    return [name for name in leaf_fields() if name.startswith(f"{prefix}.")]


COMMON: Final[Mapping[str, FieldSupport]] = {
    **dict.fromkeys(leaf_fields(), by_shim()),
    "placement.on": native("the choice of the target"),
    "ttl_after_finished": by_client("runtime gc"),
    "idempotency_key": native("part of the job's id"),
}
"""Rows of every launcher, unless its own table has another: the shim emulates a field."""
NO_TPU: Final = refused("only a target of kind `ray` has TPUs: those of its cluster's pools")
ALARM: Final = by_shim("ALRM to the shim: its deadline is now, or a checkpoint's lead away")
"""How a time limit is provoked on every backend."""
