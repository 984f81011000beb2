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
