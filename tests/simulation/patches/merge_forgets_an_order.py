"""Merged orders lack one."""

SCENARIO = "control"
LAW = "an acknowledged order is in force"
EDITS = [
    (
        "runtime.records.store:BlobRecords._put_orders_together",
        """\
            said = self._without_ended(merge(order.control for order in readable.values()), now)
""",
        """\
            said = self._without_ended(merge(list(order.control for order in readable.values())[1:]), now)
""",
    ),
]
TAPE = "world:small-orders:0=1 world:small-moved:0=1 purger:harsh-call:3=11"
