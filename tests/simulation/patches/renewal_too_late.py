"""Leases are renewed too late."""

SCENARIO = "calm"
LAW = "without faults nothing starts before its time or after its end, twice at once, or too often"
EDITS = [
    (
        "runtime.worker.maintenance:Maintenance.do_what_is_due",
        """\
            self._renew_at = now + max(0.2, min(services.holdings.length_s / 3, RENEW_AT_LEAST_EVERY_S))
""",
        """\
            self._renew_at = now + max(0.2, services.holdings.length_s * 2)
""",
    ),
]
TAPE = "w0.0:work:0=2 w1.0:work:0=3"
