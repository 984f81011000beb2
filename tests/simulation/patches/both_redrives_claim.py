"""Two redrives at once both say that they queued a task."""

SCENARIO = "failures"
LAW = "one call queues a generation"
EDITS = [
    (
        "runtime.records.results:BlobResults.unmark",
        """\
        return first is None or first == ours
""",
        """\
        return True
""",
    ),
]
