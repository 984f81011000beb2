"""A manifest part is marked as sent before its tasks are published."""

SCENARIO = "control"
LAW = "P1: an acknowledged task is recorded in the end"
EDITS = [
    (
        "runtime.client.tasks.publish:ThroughManifest._send_part",
        """\
            self._queue.put(tasks)
            self._records.mark_sent(part)
""",
        """\
            self._records.mark_sent(part)
            self._queue.put(tasks)
""",
    ),
]
TAPE = "submitter:when:0=2 submitter:harsh-call:3=7 submitter:harsh-call:5=9"
