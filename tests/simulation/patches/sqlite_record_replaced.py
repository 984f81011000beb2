"""A record that another attempt wrote first is overwritten."""

SCENARIO = "sqlite"
LAW = "P2: a record never changes"
EDITS = [
    (
        "runtime.records.sqlite",
        """\
_INSERT: Final = f"INSERT INTO records({_COLUMNS}) VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
""",
        """\
_INSERT: Final = f"INSERT OR REPLACE INTO records({_COLUMNS}) VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
""",
    ),
    (
        "runtime.records.sqlite:SqliteResults.commit",
        """\
            if not is_unwritten(record, find_record(connection, seq, record.generation)):
                return
""",
        """\
""",
    ),
]
TAPE = "submitter:when:0=1 canceller-of-one:when:0=2 purger:purges:0=1"
