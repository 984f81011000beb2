"""A cancel passes over the tasks that run."""

SCENARIO = "sqlite"
LAW = "an acknowledged cancel has ended every task of an embedded file"
EDITS = [
    (
        "runtime.queues.sqlite.tables:cancel_rows",
        """\
        "(SELECT seq, 0 AS leased FROM claimable UNION ALL SELECT seq, 0 FROM deferred UNION ALL SELECT seq, 1 FROM leases) "
""",
        """\
        "(SELECT seq, 0 AS leased FROM claimable UNION ALL SELECT seq, 0 FROM deferred) "
""",
    ),
]
TAPE = ""
