"""Limits of the product that a world makes small, so that a few tasks and minutes meet what takes thousands and months."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from runtime.client.tasks import publish, redrive, submit
from runtime.queues.pubsub import delivery_buffer, message, queue, subscription
from runtime.records import results, sqlite, store
from runtime.worker import dispatch
from tests.simulation.choices import Choice
from tests.simulation.world import World

KNOBS: Final[dict[str, list[tuple[Any, str, object]]]] = {
    "orders": [(store, "ORDERS_APART", 1)],
    "moved": [(store, "MOVED_FOR", timedelta(seconds=40)), (store, "LISTED_WITHIN_S", 15.0)],
    "looked-at": [(store, "TASKS_LOOKED_AT", 1)],
    "parts": [(publish.ThroughManifest, "part_tasks", 2)],
    "puts": [(publish.Direct, "part_tasks", 1)],
    "named": [(publish, "NAMED_TASKS", 1), (publish, "PARTS_LOOKED_AT", 1), (submit, "PART_TASKS", 1)],
    "marks": [(results, "MARKS_COUNTED", 1), (sqlite, "MARKS_AT_ONCE", 1)],
    "bodies": [(message, "INLINE_BYTES", 20)],
    "publications": [(message, "MAX_PUBLISH_MESSAGES", 1), (queue, "PUBLISHES_AT_ONCE", 2)],
    "acknowledgements": [(subscription, "MAX_ACK_IDS", 1), (queue, "MAX_ACK_IDS", 1)],
    "later": [(delivery_buffer, "MAX_LATER", 1)],
    "ahead": [(dispatch, "LONGEST_LOOK_AHEAD", 1)],
    "redriven": [(redrive, "BATCH", 1)],
}
"""By name: what is replaced, where, and by what."""


def turn_knobs(world: World) -> None:
    """Make about half of the limits small; each is drawn by itself."""
    for name, places in KNOBS.items():
        if world.draw(Choice(f"small-{name}", 1, 1, fault=False)):
            for place, attribute, small in places:
                world.replace(place, attribute, small)
