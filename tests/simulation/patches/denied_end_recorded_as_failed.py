"""The end of an attempt is recorded as a failure because a permission was missing for a moment."""

SCENARIO = "failures"
LAW = "P4: each failure that was spent has an attempt that failed"
EDITS = [
    (
        "runtime.worker.settling:Settler._hand_each",
        """\
            elif isinstance(problem, InfrastructureFailure) and (problem.denied or one.lease.token not in blamed):
""",
        """\
            elif isinstance(problem, InfrastructureFailure) and one.lease.token not in blamed:
""",
    ),
]
TAPE = "ender:ends:0=1 w1.0:harsh-call:8=6 w0.0:harsh-call:8=9 w1.0:harsh-call:19=18 purger:harsh-call:21=11 w1.0:harsh-call:42=17 w1.0:flap:6=1 w1.0:flap:8=1 w1.0:flap:9=1 w1.0:flap:10=1 w1.0:flap:11=1"
