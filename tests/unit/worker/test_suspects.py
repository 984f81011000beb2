"""Suspects: which may start, and how many at a time."""

from __future__ import annotations

from datetime import timedelta

import pytest

from runtime.end_reasons import EndReason
from runtime.tasks.history import Lease
from runtime.tasks.retry_policy import ALONE_FOR
from runtime.testing import FakeClock, sample_task
from runtime.worker.dispatch import Suspects
from runtime.worker.worker_context import HeldLease, HeldLeases


@pytest.fixture
def holdings() -> HeldLeases:
    return HeldLeases(timedelta(seconds=30), FakeClock())


def hold(holdings: HeldLeases, key: str) -> HeldLease:
    held = HeldLease(Lease(sample_task(key), f"token-{key}", alone=True))
    holdings.by_token[held.lease.token] = held
    return held


def test_one_suspect_runs_at_a_time_until_it_has_proved_itself(holdings: HeldLeases) -> None:
    suspects = Suspects(holdings, 3)
    first, second = hold(holdings, "1"), hold(holdings, "2")
    assert suspects.add(first)
    assert suspects.add(second)

    assert suspects.may_try(0.0)
    assert suspects.start_next(0.0) is first
    assert first.apart
    assert not suspects.may_try(1.0)

    assert suspects.may_try(ALONE_FOR.total_seconds())
    assert suspects.start_next(ALONE_FOR.total_seconds()) is second
    assert (first.apart, second.apart) == (False, True)


def test_success_lets_one_more_run_and_a_loss_only_one_again(holdings: HeldLeases) -> None:
    suspects = Suspects(holdings, 4)
    for key in "1234":
        suspects.add(hold(holdings, key))
    first = suspects.start_next(0.0)
    assert not suspects.may_try(0.0)

    suspects.ended(first.lease.token, EndReason.SUCCEEDED)
    suspects.start_next(0.0)
    assert suspects.may_try(0.0)
    suspects.start_next(0.0)
    assert not suspects.may_try(0.0)

    for held in list(holdings.by_token.values())[1:3]:
        holdings.drop(held.lease.token)
    suspects.ended("another", EndReason.LOST)
    suspects.start_next(0.0)
    assert not suspects.may_try(0.0)


def test_suspect_that_finds_no_place_in_the_line_is_refused(holdings: HeldLeases) -> None:
    suspects = Suspects(holdings, 1)

    assert suspects.add(hold(holdings, "1"))
    assert not suspects.add(hold(holdings, "2"))
