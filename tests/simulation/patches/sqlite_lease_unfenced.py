"""A lease that passed on ends another worker's."""

SCENARIO = "sqlite"
LAW = "the lease of a worker that lives and renews is given to no other"
EDITS = [
    (
        "runtime.queues.sqlite.queue",
        """\
_END = "DELETE FROM leases WHERE seq=? AND token=?"
""",
        """\
_END = "DELETE FROM leases WHERE seq=? AND token>=substr(?, 1, 0)"
""",
    ),
]
TAPE = "submitter:when:0=1 other:when:0=2 planner:when:0=1 w0.0:switch:9=1 w1.0:halt:1=2 w0.0:halt:2=1 w1.0:halt:4=1 w0.0:halt:3=1 w0.0:halt:4=1 w0.0:halt:8=2"
