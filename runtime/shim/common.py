"""Exit codes, errors, pauses and the line on stderr that all modules of the shim share."""

import os
import sys
import time

SCHEMA = 1
DONE, FAILED, REFUSED, DUPLICATE, AGAIN, NEVER, LOST = 0, 1, 2, 3, 10, 11, 12
"""Exit codes: the runs succeeded, one failed for good, the order cannot be followed, this is a twin of another job, the backend
should start it again, the backend should never start it again, and like `AGAIN`, but the attempt counts as lost unless the
backend knows why it ended."""

BEAT_S = 10.0
"""How often the counter of a running attempt moves."""
LOOK_S = 0.2
SOON_S = 0.005
"""Pause of the first looks at a command, so that a short one does not wait."""
HOST = os.environ.get("RUNTIME_HOST") or os.uname().nodename
"""The host's name; inside a container the name of its machine, if the backend provides it."""
BEGAN = float(os.environ.get("RUNTIME_SHIM_BEGAN") or time.time())
"""When the first shim of this native job began; it passes the time on to the shims that it starts."""


NOTIFY = "RUNTIME_NOTIFY_"
"""Prefix of the names of secrets that are webhooks, which no command sees."""
CLAIMS = "notify"
"""Folder of the record root with a file for each message that is not known to be sent, `JOB.EVENT.SINK`; and of a job's folder
with an empty `EVENT.SINK.sent` for each that is."""


class OrderRefused(Exception):
    """The order cannot be followed, for the reason in the text."""


class SetupFailed(Exception):
    """The attempt could not be prepared."""

    reason = "setup_failed"


class ImageFailed(SetupFailed):
    """No container can be made of the image, however often it is tried."""

    reason = "image_failed"


class NoCapacity(Exception):
    """The GPUs that a backend gave to this attempt are in use."""


class TransferStopped(Exception):
    """The transfer was given up."""


class AlreadyClaimed(Exception):
    """A file that only one process may make exists already."""


def worst(codes):
    """One exit code for many runs."""
    for code in (AGAIN, REFUSED, DUPLICATE):
        if code in codes:
            return code
    return FAILED if any(codes) else DONE


def shell_code(code: int) -> int:
    """The exit code as shells report it: 128 plus the number of a signal."""
    return code if code >= 0 else 128 - code


def own_path() -> str:
    """The file that this shim runs from."""
    return os.path.abspath(sys.argv[0])


def say(text: str) -> None:
    try:
        sys.stderr.write("shim: %s\n" % text)
        sys.stderr.flush()
    except (IOError, OSError):
        pass  # its file may lie on the very disk that is full
