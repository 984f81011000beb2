"""Launches that cost money: the decision, and its place in `runtime launch`, with a launcher of another package."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest

import runtime
from runtime.client.jobs.prepare import LaunchOptions
from runtime.config import Limits, load_project, load_settings
from runtime.errors import InvalidValue, UnknownName
from runtime.jobs.price import (
    Price,
    PriceDecision,
    PriceRefused,
    PriceUnconfirmed,
    decide_price,
    describe_price,
)
from tests.jobs_support import Terminal, open_terminal

TOY = Path(__file__).parents[2] / "toy_launcher"
LAUNCHER = """
from datetime import date
from runtime.jobs.price import Price
from toy_launcher import ToyLauncher

class PaidLauncher(ToyLauncher):
    kind = "paid"

    def check_settings(self, target):
        pass

    def price(self, plan):
        hourly = plan.target.settings.get("hourly")
        if hourly == 0:
            return None
        return Price(what="1 × large", hourly=hourly, time_limit=plan.spec.time_limit, listed_on=date(2026, 1, 2))
"""
PRICE = Price(what="1 × large", hourly=0.28, time_limit=timedelta(hours=12), listed_on=date(2026, 10, 1))
UNKNOWN = Price(what="1 × odd", hourly=None)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Terminal]:
    package = tmp_path / "package"
    about = package / "paid_launcher-1.0.dist-info"
    about.mkdir(parents=True)
    (package / "paid_launcher.py").write_text(LAUNCHER)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: paid-launcher\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[research_runtime.launchers]\npaid = paid_launcher:PaidLauncher\n")
    monkeypatch.syspath_prepend(str(TOY))
    monkeypatch.syspath_prepend(str(package))
    monkeypatch.delitem(sys.modules, "paid_launcher", raising=False)
    with open_terminal(tmp_path, monkeypatch, capsys) as terminal:
        write_project(terminal)
        yield terminal


def write_project(run: Terminal, limits: str = "") -> None:
    targets = {"cloud": "hourly = 2.5", "odd": "", "free": "hourly = 0"}
    tables = [
        f'[targets.{name}]\nkind = "paid"\nrecords = "{run.data}/{name}"\npython = "{sys.executable}"\n{line}\n'
        for name, line in targets.items()
    ]
    (run.tree / "runtime.toml").write_text(limits + "".join(tables))


def jobs_of(run: Terminal, target: str) -> list[str]:
    folder = run.data / target / "jobs"
    return [path.name for path in folder.iterdir()] if folder.exists() else []


# the decision


@pytest.mark.parametrize(
    ("price", "limit", "assume_yes", "terminal", "decision"),
    [
        (None, 0.0, False, False, PriceDecision.PROCEED),
        (PRICE, None, True, False, PriceDecision.PROCEED),
        (PRICE, None, False, True, PriceDecision.ASK),
        (PRICE, None, False, False, PriceDecision.REFUSE),
        (PRICE, 0.28, True, False, PriceDecision.PROCEED),
        (PRICE, 0.27, True, True, PriceDecision.REFUSE),
        (PRICE, 0.0, True, True, PriceDecision.REFUSE),
        (UNKNOWN, None, True, False, PriceDecision.PROCEED),
        (UNKNOWN, None, False, True, PriceDecision.ASK),
        (UNKNOWN, 1000.0, True, True, PriceDecision.REFUSE),
        (Price(what="x", hourly=1.0, currency="EUR"), 1000.0, True, True, PriceDecision.REFUSE),
    ],
)
def test_price_is_accepted_asked_for_or_refused(
    price: Price | None, limit: float | None, assume_yes: bool, terminal: bool, decision: PriceDecision
) -> None:
    assert decide_price(price, limit, assume_yes=assume_yes, terminal=terminal) is decision


@pytest.mark.parametrize(
    ("price", "line"),
    [
        (PRICE, "1 × large   about $0.28/h, at most $3.36 for 12h   (prices of 2026-10-01, 51 days old)"),
        (UNKNOWN, "1 × odd   price unknown"),
        (Price(what="8 × v4", hourly=1234.5, currency="EUR"), "8 × v4   about 1,234.50 EUR/h, without a time limit"),
        (Price(what="f", hourly=0.0012, time_limit=timedelta(hours=1)), "f   about $0.0012/h, at most $0.0012 for 1h"),
        (Price(what="f", hourly=1.001, time_limit=timedelta(minutes=1)), "f   about $1.01/h, at most $0.02 for 1m"),
    ],
)
def test_price_is_described_as_a_bound_that_is_never_too_low(price: Price, line: str) -> None:
    assert describe_price(price, date(2026, 11, 21)) == line


# launches


def test_launch_without_anybody_to_ask_needs_yes_and_begins_nothing(run: Terminal) -> None:
    refused = run("launch", "--on", "cloud", "--time-limit", "2h", "--", "true")
    nothing = jobs_of(run, "cloud")
    started = run("launch", "--on", "cloud", "--time-limit", "2h", "--yes", "--", "true")

    line = "1 × large   about $2.50/h, at most $5.00 for 2h   (prices of 2026-01-02"
    assert (refused.code, refused.out, nothing) == (2, "", [])
    assert refused.err.startswith(line)
    assert refused.err.splitlines()[-1] == "hint: pass `--yes` to start it"
    assert (started.code, jobs_of(run, "cloud")) == (0, [started.out.strip()])
    assert line in started.err


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("n", 2), ("", 2)])
def test_launch_on_a_terminal_asks_once_and_a_no_tries_no_other_target(
    run: Terminal, monkeypatch: pytest.MonkeyPatch, answer: str, code: int
) -> None:
    asked: list[str] = []

    def ask(question: str) -> str:
        asked.append(question)
        return answer

    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("runtime.cli.launch.ask", ask)

    said = run("launch", "--on", "cloud,free", "--", "true")
    again = run("launch", "--on", "cloud", "--", "true") if answer == "y" else said

    assert (said.code, again.code, asked) == (code, code, ["start it? [y/N] "])
    assert jobs_of(run, "free") == []
    if code:
        assert "error: not confirmed, nothing was started" in said.err


def test_limit_refuses_a_price_above_it_and_an_unknown_one_whoever_agrees(run: Terminal) -> None:
    write_project(run, "limits = { max_hourly_cost = 2 }\n")

    dear, unknown = (run("launch", "--on", name, "--yes", "--", "true") for name in ("cloud", "odd"))

    assert (dear.code, unknown.code, jobs_of(run, "cloud"), jobs_of(run, "odd")) == (2, 2, [], [])
    assert (
        "error: target `cloud` is not used: the price of the job is about $2.50/h, and `limits.max_hourly_cost` is $2.00/h"
    ) in dear.err
    assert "the price of the job is unknown, and `limits.max_hourly_cost` is $2.00/h" in unknown.err


def test_target_above_the_limit_is_passed_over_for_one_that_costs_nothing(run: Terminal) -> None:
    write_project(run, "[limits]\nmax_hourly_cost = 2.0\n")

    said = run("launch", "--on", "cloud,free", "--", "true")

    assert (said.code, jobs_of(run, "free")) == (0, [said.out.strip()])


def test_dry_run_shows_the_price_and_that_it_would_be_refused(run: Terminal) -> None:
    write_project(run, "limits = { max_hourly_cost = 2.49 }\n")
    words = ("launch", "--on", "cloud", "--time-limit", "1h", "--dry-run")

    said = run(*words, "--", "true")
    (cloud,) = run(*words, "-o", "json", "--", "true").json
    (free,) = run("launch", "--on", "free", "--dry-run", "-o", "json", "--", "true").json

    assert "# price: 1 × large   about $2.50/h, at most $2.50 for 1h   (prices of 2026-01-02" in said.out
    assert "`limits.max_hourly_cost` would refuse it on `cloud`" in said.err
    expected = {"what": "1 × large", "hourly": 2.5, "currency": "USD", "at_most": 2.5, "listed_on": "2026-01-02"}
    assert (cloud["price"], free["price"]) == (expected, None)
    assert jobs_of(run, "cloud") == []


def test_python_agrees_to_a_price_by_an_option(run: Terminal) -> None:
    command: dict[str, Any] = {"command": ["true"]}

    with pytest.raises(PriceUnconfirmed):
        runtime.launch(command, on="cloud")
    with runtime.launch(command, on="cloud", options=LaunchOptions(assume_yes=True)) as job:
        assert job.new
    write_project(run, "limits = { max_hourly_cost = 0 }\n")
    with pytest.raises(PriceRefused):
        runtime.launch(["false"], on="cloud", options=LaunchOptions(assume_yes=True), settings=load_settings())


# the setting


@pytest.mark.parametrize("value", ["-1", '"5"', "true", "nan", "inf"])
def test_limit_that_is_no_amount_is_refused(tmp_path: Path, value: str) -> None:
    (tmp_path / "runtime.toml").write_text(f"limits = {{ max_hourly_cost = {value} }}\n")

    with pytest.raises(InvalidValue) as refused:
        load_project(tmp_path)

    assert refused.value.field == f"limits.max_hourly_cost in `{tmp_path}/runtime.toml`"


def test_limits_are_read_and_an_unknown_one_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.runtime.limits]\nmax_hourly_cost = 5\n")
    found = load_project(tmp_path).limits
    (tmp_path / "pyproject.toml").write_text("[tool.runtime.limits]\nmax_hourly_costs = 5\n")

    with pytest.raises(UnknownName) as refused:
        load_project(tmp_path)

    assert found == Limits(max_hourly_cost=5)
    assert refused.value.hint == "did you mean `limits.max_hourly_cost`?"
