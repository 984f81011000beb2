"""Ratios of the benchmarks, and the difference between a goal not measured and a goal missed."""

from __future__ import annotations

import pytest

from benchmarks.ratios import Check, Figure, judge, median, render

OURS, THEIRS = Figure("ours", "rate"), Figure("peer", "rate")
ROUNDS = {
    "ours": [{"rate": 300.0}, {"rate": 100.0}, {"rate": 200.0}],
    "peer": [{"rate": 100.0}, {"rate": 50.0}],
}


def test_ratio_is_of_the_medians_of_all_rounds() -> None:
    verdict = judge(Check(goal=1, what="drain", ours=OURS, theirs=THEIRS, at_least=2.5), ROUNDS)

    assert (verdict.ours, verdict.theirs) == (200.0, 75.0)
    assert verdict.ratio == pytest.approx(2.667, abs=0.001)
    assert verdict.holds == "yes"


@pytest.mark.parametrize(
    ("at_least", "at_most", "holds", "near"),
    [
        (2.0, None, "yes", False),
        (2.7, None, "no", True),
        (3.0, None, "no", False),
        (None, 3.0, "yes", False),
        (None, 2.6, "no", True),
        (None, 1.0, "no", False),
    ],
)
def test_a_bound_holds_or_not_and_a_near_miss_is_said(
    at_least: float | None, at_most: float | None, holds: str, near: bool
) -> None:
    check = Check(goal=1, what="drain", ours=OURS, theirs=THEIRS, at_least=at_least, at_most=at_most)

    verdict = judge(check, ROUNDS)

    assert (verdict.holds, verdict.near) == (holds, near)


def test_an_absent_comparator_is_not_a_goal_that_holds() -> None:
    check = Check(goal=1, what="drain", ours=OURS, theirs=Figure("absent", "rate"), at_least=1)

    assert judge(check, ROUNDS).holds == "comparator absent"


def test_a_figure_of_ours_that_is_missing_is_not_measured() -> None:
    check = Check(goal=1, what="drain", ours=Figure("ours", "p50"), theirs=THEIRS, at_least=1)

    assert judge(check, ROUNDS).holds == "not measured"
    assert median(ROUNDS, None) is None


def test_a_bound_without_comparator_is_held_against_the_figure_itself() -> None:
    share = Check(goal=7, what="share", ours=Figure("ours", "rate"), at_least=150, unit="")

    assert judge(share, ROUNDS).holds == "yes"
    assert judge(share, ROUNDS).ratio == 200.0


def test_a_limit_that_misses_the_bound_itself_is_told() -> None:
    check = Check(goal=1, what="drain", ours=OURS, theirs=THEIRS, at_least=9, limit=Figure("limit", "rate"))

    verdict = judge(check, {**ROUNDS, "limit": [{"rate": 400.0}]})

    assert (verdict.holds, verdict.reachable) == ("no", False)
    assert "the limit misses it too" in render([verdict])


def test_table_has_a_line_for_each_check_with_both_figures_and_the_ratio() -> None:
    text = render([judge(Check(goal=1, what="drain", ours=OURS, theirs=THEIRS, against="peer", at_least=2.5), ROUNDS)])

    assert " ".join(text.splitlines()[-1].split()) == "1 drain 200/s peer 75/s 2.67x 2–3x ≥ 2.5x yes"


@pytest.mark.parametrize(("plus", "holds"), [(0.0, "no"), (40.0, "no"), (60.0, "yes")])
def test_what_a_bound_allows_on_top_is_taken_off_ours(plus: float, holds: str) -> None:
    check = Check(goal=1, what="status", ours=OURS, theirs=THEIRS, at_most=2, plus=plus, unit="ms")

    assert judge(check, ROUNDS).holds == holds
