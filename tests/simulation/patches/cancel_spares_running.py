"""A cancel leaves running attempts alone."""

SCENARIO = "calm"
LAW = "without faults an attempt ends with its task and at its timeout"
EDITS = [
    (
        "runtime.worker.admission:Admission._apply_cancels",
        """\
                if held.stop_reason is not EndReason.CANCELLED:
                    held.stop_reason = EndReason.CANCELLED
                    self._services.pool.ask_to_stop(lease.token, EndReason.CANCELLED)
""",
        """\
                continue
""",
    ),
]
