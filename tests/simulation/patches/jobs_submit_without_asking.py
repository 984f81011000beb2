"""A launch does not ask the backend for the job's name before it submits."""

SCENARIO = "jobs"
LAW = "what has ended stays as it ended"
EDITS = [
    (
        "runtime.client.jobs.launch:_submit_part",
        """\
    native_id = job.launcher.find(plan.target, [part.name], job.host).get(part.name)
""",
        """\
    native_id = None
""",
    ),
]
TAPE = "site:how:0=1 carol:when:0=1 ann:steady-call:14=6 dave:steady-call:4=2 n1.1:steady-call:9=9 n1.2:result:0=1 n1.3:steady-call:7=11 n2:forgets:0=1"
