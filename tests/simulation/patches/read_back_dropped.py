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
TAPE = "other:call:0=2 w0.0:work:0=1 w0.0:call:23=18 w0.0:work:1=2 w0.0:call:36=6 w0.0:call:40=7"
