"""Names and commands of a job's parts on the head, and their names in the record root."""

from __future__ import annotations

import hashlib
import shlex
from typing import Final

NONCE: Final = "+"


def submission_name(job: str, root: str, epoch: int, part: int) -> str:
    """`j-…-e1-p0-4f0c2a`, the id under which the head knows one start of a part: it blocks the id even when it has ended.

    The last letters stand for the record root, since jobs of two roots may have one id.
    """
    return f"{job}-e{epoch}-p{part}-{hashlib.sha256(root.encode()).hexdigest()[:6]}"


def render_entrypoint(python: str, root: str, job: str, epoch: int, part: int) -> str:
    """The command of a submission: one start of a part's driver."""
    words = [python, "-m", "runtime.launchers.ray.driver", root, job]
    # Without `exec` a shell would get the TERM that is meant for the driver.
    return "exec " + shlex.join([*words, "--epoch", str(epoch), "--part", str(part)])


def split_name(name: str) -> tuple[str, int, int]:
    """Job, epoch and part of a submission's name, or of a native id."""
    job, epoch, part, _ = strip_nonce(name).rsplit("-", 3)
    return job, int(epoch[1:]), int(part[1:])


def strip_nonce(native_id: str) -> str:
    """The submission of a native id; a driver adds letters of its own for the shims that it starts."""
    return native_id.partition(NONCE)[0]


def note_name(epoch: int, part: int) -> str:
    """The driver's notes, in the job's folder."""
    return f"ray/{epoch}.{part}"
