"""A record that came second counts as written."""

SCENARIO = "workers"
LAW = "a worker counts what it has recorded"
EDITS = [
    (
        "runtime.records.results:BlobResults.commit",
        """\
        existing = self._create_or_read(key, codec.encode_record(record))
        if existing is not None:
            is_unwritten(record, self._decode_record(key, existing))
""",
        """\
        self._create_or_read(key, codec.encode_record(record))
""",
    ),
]
TAPE = "w1.0:work:0=2 w1.0:call:10=12"
