"""A value that cannot be read is an exception of the worker's loop."""

SCENARIO = "workers"
LAW = "no process or thread dies of an exception"
EDITS = [
    (
        "runtime.worker.completion:_read_value",
        """\
    except (ValueError, RecursionError) as problem:
""",
        """\
    except RecursionError as problem:
""",
    ),
]
