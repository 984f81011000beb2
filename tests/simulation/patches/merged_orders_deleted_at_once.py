"""What merged orders replace is deleted as soon as they are seen."""

SCENARIO = "orders"
LAW = "an acknowledged order is in force"
EDITS = [
    (
        "runtime.records.store:BlobRecords._put_orders_together",
        """\
            if now - listed[identity].modified >= MOVED_FOR
""",
        """\
""",
    ),
]
