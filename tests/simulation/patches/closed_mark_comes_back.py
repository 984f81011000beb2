"""A late holder puts back the mark that a redrive has closed."""

SCENARIO = "failures"
LAW = "P1: a failed task is a dead letter until it is tried again"
EDITS = [
    (
        "runtime.records.results:BlobResults.mark",
        """\
        if self.blobs.get(layout.closed_key(key)) is not None:
            self.blobs.delete(key)
""",
        """\
""",
    ),
]
TAPE = "world:small-bodies:0=1 redriver:eager:0=1 ender:ends:0=1 w1.0:sigterm:0=2 submitter:harsh-call:2=3 submitter:harsh-call:4=9 submitter.1:harsh-call:0=11 w1.1:sigterm:0=1 w1.2:harsh-call:5=12 purger:harsh-call:6=11 w0.0:harsh-call:26=9 w0.1:harsh-call:10=12 purger:harsh-call:40=9 purger.1:harsh-call:0=11 purger.1:harsh-call:13=11 w1.2:harsh-call:9=9 w1.3:harsh-call:20=11 purger.1:harsh-call:46=11"
