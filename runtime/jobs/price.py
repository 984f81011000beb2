"""The hourly price of a launch, and whether it may begin."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import date, timedelta
from enum import StrEnum
from typing import Final

from runtime.errors import NotPossible, RequestRefused
from runtime.units import count_noun, format_duration

LIMIT: Final = "limits.max_hourly_cost"
"""The setting that bounds what one launch may cost by the hour."""
CURRENCY: Final = "USD"
"""The currency of the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The price of a job by its launcher's price list, all its machines together."""

    what: str
    """The machines: `1 × g2-standard-8 spot us-central1-a`."""
    hourly: float | None
    """None if the list does not have it: an unknown price, never 0."""
    currency: str = CURRENCY
    time_limit: timedelta | None = None
    """How long the machines live at most; None without a limit."""
    listed_on: date | None = None
    """The date of the price list."""

    @property
    def at_most(self) -> float | None:
        """The most that the job can cost, if price and time are bounded."""
        if self.hourly is None or self.time_limit is None:
            return None
        return self.hourly * self.time_limit.total_seconds() / 3600


class PriceDecision(StrEnum):
    """How a launch continues, given its price."""

    PROCEED = "proceed"
    ASK = "ask"
    REFUSE = "refuse"


class PriceRefused(NotPossible):
    """The project's limit rules the price out."""

    def __init__(self, price: Price, limit: float, target: str) -> None:
        known = f"about {_amount(price.hourly, price.currency)}/h" if price.hourly is not None else "unknown"
        super().__init__(
            f"target `{target}` is not used: the price of the job is {known}, and `{LIMIT}` is {_amount(limit, CURRENCY)}/h",
            facts=[price.what],
            hint=f"ask for less, or name another target; the limit stands in the project's settings: `{LIMIT}`",
        )


class PriceUnconfirmed(RequestRefused):
    """Nobody agreed to the price. No other target is tried, since the launch was not refused there."""

    def __init__(self, price: Price, *, asked: bool) -> None:
        super().__init__(
            "not confirmed, nothing was started" if asked else "the job costs money, and nobody is there to agree",
            facts=[describe_price(price)],
            hint="answer `y`, or pass `--yes`" if asked else "pass `--yes` to start it",
        )


def decide_price(price: Price | None, limit: float | None, *, assume_yes: bool, terminal: bool) -> PriceDecision:
    """Decide by the price, the hourly limit, whether the user agreed beforehand, and whether one is there to ask.

    Under a limit an unknown price is refused, as is one in a currency that is not the limit's.
    """
    if price is None:
        return PriceDecision.PROCEED
    if limit is not None and exceeds(price, limit):
        return PriceDecision.REFUSE
    if assume_yes:
        return PriceDecision.PROCEED
    return PriceDecision.ASK if terminal else PriceDecision.REFUSE


def exceeds(price: Price, limit: float) -> bool:
    """Whether the price is not known to be within the limit."""
    return price.hourly is None or price.currency != CURRENCY or price.hourly > limit


def describe_price(price: Price, today: date | None = None) -> str:
    """The line for people; with `today` it has the age of the price list."""
    parts = [price.what]
    if price.hourly is None:
        parts.append("price unknown")
    else:
        bound = f"about {_amount(price.hourly, price.currency)}/h"
        if price.at_most is not None and price.time_limit is not None:
            bound += f", at most {_amount(price.at_most, price.currency)} for {format_duration(price.time_limit)}"
        else:
            bound += ", without a time limit"
        parts.append(bound)
    if price.listed_on is not None:
        age = f", {count_noun((today - price.listed_on).days, 'day')} old" if today else ""
        parts.append(f"(prices of {price.listed_on}{age})")
    return "   ".join(parts)


def _amount(value: float | None, currency: str) -> str:
    assert value is not None
    # Rounded up and never to 0: a bound that is too low would be none.
    digits = 2 if value >= 0.01 or value == 0 else 4
    scale = 10**digits
    text = f"{math.ceil(round(value * scale, 6)) / scale:,.{digits}f}"
    return f"${text}" if currency == "USD" else f"{text} {currency}"
