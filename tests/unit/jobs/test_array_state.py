"""The state of an array, from the states of its runs."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from runtime.end_reasons import EndReason
from runtime.jobs.ledger import LedgerEntry, NativeJob, RunOutcome, judge
from runtime.jobs.plan import NativeState
from runtime.jobs.spec import JobState

AT = datetime(2026, 1, 1, tzinfo=UTC)
JOB = "j-0123456789abcdef01234567"

ENDS = {"s": EndReason.SUCCEEDED, "f": EndReason.APP_FAILED, "c": EndReason.CANCELLED}
"""Letters of runs that have ended, with the reason of their committed result."""
LIVING = {"p": JobState.PENDING, "r": JobState.RUNNING, "u": JobState.UNKNOWN}
"""Letters of runs that the backend reports."""

WHOLE = {
    # Every set of states that runs can have, by the letters of the states.
    **dict.fromkeys(("p", "pp"), "pending"),
    # Some runs have ended and others have yet to start, so the array is under way.
    **dict.fromkeys(("ps", "pf", "pc", "psf", "psc", "pfc", "psfc"), "running"),
    **dict.fromkeys(("s", "ss"), "succeeded"),
    **dict.fromkeys(("f", "sf", "fc", "sfc"), "failed"),
    **dict.fromkeys(("c", "sc"), "cancelled"),
    **dict.fromkeys(("u", "us", "uf", "uc", "up", "ups", "upf", "upc"), "unknown"),
    **dict.fromkeys(("usf", "usc", "ufc", "usfc", "upsf", "upsc", "upfc", "upsfc"), "unknown"),
    **dict.fromkeys(("r", "rs", "rf", "rc", "rp", "ru", "rps", "rpf", "rpc"), "running"),
    **dict.fromkeys(("rsf", "rsc", "rfc", "rsfc", "rpsf", "rpsc", "rpfc", "rpsfc"), "running"),
    **dict.fromkeys(("rup", "rus", "ruf", "ruc", "rups", "rupf", "rupc"), "running"),
    **dict.fromkeys(("rusf", "rusc", "rufc", "rusfc", "rupsf", "rupsc", "rupfc", "rupsfc"), "running"),
}


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(("runs", "whole"), list(WHOLE.items()))
def test_array_state_is_that_of_all_its_runs_in_any_order(runs: str, whole: str, backwards: bool) -> None:
    letters = list(enumerate(runs[::-1] if backwards else runs))
    entry = LedgerEntry(
        id=JOB,
        name="train",
        owner="ada",
        target="hpc",
        kind="slurm",
        launched_at=AT,
        snapshot=None,
        indices=len(runs),
        natives=(NativeJob(name="n", native_id="7", part=0, epoch=1, at=AT),),
        outcomes={
            index: RunOutcome(job=JOB, index=index, reason=ENDS[letter], code=0, attempt=1)
            for index, letter in letters
            if letter in ENDS
        },
    )
    said = [
        NativeState(native_id=f"7_{index}", index=index, state=LIVING[letter])
        for index, letter in letters
        if letter in LIVING
    ]

    status = judge(entry, said)

    assert status.state == whole
    assert sum(status.counts.values()) == len(runs)


def test_table_of_array_states_has_every_set_of_states() -> None:
    assert len({frozenset(runs) for runs in WHOLE}) == 2**6 - 1
