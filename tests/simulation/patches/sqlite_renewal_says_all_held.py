"""A renewal does not tell which leases are lost."""

SCENARIO = "sqlite"
LAW = "an attempt stops once its task has ended"
EDITS = [
    (
        "runtime.queues.sqlite.queue:SqliteQueue.renew",
        """\
        return [lease for lease in leases if lease.token not in held]
""",
        """\
        return []
""",
    ),
]
TAPE = "planner:when:0=2 retrier-too:when:0=1 purger:purges:0=1 purger:when:0=3 submitter:switch:0=2 w0.0:die:2=2 w1.0:work:1=1 w1.0:die:8=2 w0.1:switch:49=1 retrier:switch:2=2 w1.1:work:1=3"
