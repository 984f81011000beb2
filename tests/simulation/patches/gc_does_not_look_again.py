"""gc removes what it found some time ago, whatever has become of it."""

SCENARIO = "garbage"
LAW = "what runs is in the ledger"
EDITS = [
    (
        "runtime.client.jobs.gc:_remove_job",
        """\
        changed = _find_change(garbage, place)
""",
        """\
        changed = ""
""",
    ),
]
