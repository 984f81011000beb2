"""A record is written over the one that was first."""

SCENARIO = "workers"
LAW = "P2: a record never changes"
EDITS = [
    (
        "runtime.records.results:BlobResults.commit",
        """\
        existing = self._create_or_read(key, codec.encode_record(record))
        if existing is not None:
            is_unwritten(record, self._decode_record(key, existing))
""",
        """\
        self.blobs.put(key, codec.encode_record(record))
""",
    ),
]
TAPE = "w0.0:sigterm:0=1 w0.0:work:0=2 w1.0:outcome:2=1 w1.0:call:56=11"
