"""A renewal does not tell which leases are lost."""

SCENARIO = "sqlite"
LAW = "an attempt stops once its task has ended"
EDITS = [
    (
        "runtime.queues.sqlite.queue:SqliteQueue.renew",
        """\
        return [lease for lease in leases if lease.token not in held]
""",
        """\
        return []
""",
    ),
]
