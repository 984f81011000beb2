"""A shim does not look for a result before it begins."""

SCENARIO = "jobs"
LAW = "a second start of a command has its reason"
EDITS = [
    (
        "runtime.shim.run_loop:_serve",
        """\
        result = run.result()
""",
        """\
        result = None
""",
    ),
    (
        "runtime.shim.run_loop:_serve",
        """\
        if run.result():
""",
        """\
        if False:
""",
    ),
]
TAPE = "site:how:0=1 n1.1:result:0=1 n1.2:run:0=2 n1.2:steady-call:21=9"
