"""What merged orders replace is deleted as soon as they are seen."""

SCENARIO = "orders"
LAW = "an acknowledged order is in force"
EDITS = [
    (
        "runtime.records.store:BlobRecords._put_orders_together",
        """\
            if now - listed[identity].modified >= MOVED_FOR
""",
        """\
""",
    ),
]
TAPE = "pauser:when:0=2 other-reader:when:0=1 canceller1:slow-call:2=5 canceller1:slow-call:3=1 canceller0:slow-call:8=2 canceller0:slow-call:11=21 canceller1:slow-call:9=21 purger:slow-call:1=2 pauser:slow-call:5=1 pauser:slow-call:8=2 purger:slow-call:9=2 pauser:slow-call:28=5 pauser:slow-call:31=2 other-reader:slow-call:31=2 pauser:slow-call:37=2 canceller0:slow-call:19=2 canceller1:slow-call:13=2 pauser:slow-call:41=10 other-reader:slow-call:40=2 other-reader:slow-call:41=2 canceller0:slow-call:26=1 canceller1:slow-call:27=21 other-reader:slow-call:42=21 canceller0:slow-call:34=1 canceller0:slow-call:36=1 canceller0:slow-call:50=21 pauser:slow-call:61=11 canceller1:slow-call:33=2 other-reader:slow-call:62=10 canceller0:slow-call:95=3 pauser:slow-call:89=1"
