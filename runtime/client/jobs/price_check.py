"""The step of a launch that shows what the job costs, and asks or refuses; nothing is begun before it."""

from __future__ import annotations

from collections.abc import Callable

from runtime.client.jobs.prepare import LaunchOptions, PreparedLaunch
from runtime.jobs.price import (
    Price,
    PriceDecision,
    PriceRefused,
    PriceUnconfirmed,
    decide_price,
    describe_price,
    exceeds,
)
from runtime.launchers.base import Prices


def find_price(prepared: PreparedLaunch) -> Price | None:
    """The price of a prepared launch; None on a target whose jobs cost nothing."""
    return prepared.launcher.price(prepared.plan) if isinstance(prepared.launcher, Prices) else None


def agree_to_price(prepared: PreparedLaunch, options: LaunchOptions, tell: Callable[[str], None]) -> None:
    """Return if the job may start. Raises `PriceRefused` above the project's limit, and `PriceUnconfirmed` if nobody agreed."""
    price = find_price(prepared)
    if price is None:
        return
    limit = prepared.context.settings.project.limits.max_hourly_cost
    tell(describe_price(price, prepared.context.now.date()))
    decision = decide_price(price, limit, assume_yes=options.assume_yes, terminal=options.agree is not None)
    if decision is PriceDecision.REFUSE:
        if limit is not None and exceeds(price, limit):
            raise PriceRefused(price, limit, prepared.target.name)
        raise PriceUnconfirmed(price, asked=False)
    if decision is PriceDecision.ASK and options.agree is not None and not options.agree():
        raise PriceUnconfirmed(price, asked=True)
