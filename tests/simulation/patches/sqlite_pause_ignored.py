"""A claim does not look at the pause."""

SCENARIO = "sqlite"
LAW = "an acknowledged pause is in force: no task is leased"
EDITS = [
    (
        "runtime.queues.sqlite.queue",
        """\
    "WHERE q.id=? AND NOT q.paused ORDER BY r.rank, r.seq LIMIT ?"
""",
        """\
    "WHERE q.id=? ORDER BY r.rank, r.seq LIMIT ?"
""",
    ),
    (
        "runtime.queues.sqlite.tables:is_any_ready",
        """\
    if row is None or row[1]:
""",
        """\
    if row is None:
""",
    ),
]
TAPE = "pauser:pauses:0=1 submitter:commit:0=2 w1.0:hold:4=1"
