"""A record of its own that is there already, after an answer was lost, counts as another's."""

SCENARIO = "workers"
LAW = "a worker counts what it has recorded"
EDITS = [
    (
        "runtime.records.base:is_unwritten",
        """\
    if existing is not None and existing.token != record.token:
""",
        """\
    if existing is not None:
""",
    ),
]
