"""An attempt that a leaving worker stops counts as cancelled."""

SCENARIO = "workers"
LAW = "a cancel or purge ends nothing that is submitted after it"
EDITS = [
    (
        "runtime.worker.worker:Drain._begin",
        """\
                held.stop_reason = EndReason.PREEMPTED
                self._services.pool.ask_to_stop(held.lease.token, EndReason.PREEMPTED)
""",
        """\
                held.stop_reason = EndReason.CANCELLED
                self._services.pool.ask_to_stop(held.lease.token, EndReason.CANCELLED)
""",
    ),
]
