"""A shim takes a folder that is away for an empty one."""

SCENARIO = "jobs"
LAW = "a record root that is missing is not made again"
EDITS = [
    (
        "runtime.shim.files:check_folder",
        """\
    if not os.path.isdir(job):
        raise OSError(errno.ESTALE, "the folder of the job is not there")
""",
        """\
    pass
""",
    ),
]
TAPE = "carol:steady-call:3=7 carol:steady-call:56=6 carol:steady-call:63=6 carol:steady-call:71=2 carol:steady-call:72=2 carol:steady-call:87=6 carol:steady-call:92=2 carol:steady-call:112=6 carol:steady-call:113=2 carol:steady-call:119=4 carol:steady-call:124=5 carol:steady-call:127=9 mount:away:2=1"
