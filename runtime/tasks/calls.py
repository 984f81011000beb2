"""Names by which those that submit calls and the attempts that make them know each other; loaded by every attempt."""

CALL_PACKED = "runtime.worker.attempts.calls:call_packed"
CALL_REQUEST = "runtime.worker.attempts.calls:call_request"
"""Functions of ours that call others for a task."""
CALLS_FILE = ".runtime-calls"
"""File at the root of a snapshot with packed calls, as JSON."""
PICKLE = "$runtime.pickle"
"""The only key of an object that stands for a value that JSON cannot hold."""
