"""The files with which a machine starts a job by itself: objects of the record root, and a start-up script that fetches them.

A machine's start-up script is limited to a few KB (16 on EC2), and the shim is larger. So the shim lies under its SHA-256 in
the record root, once for each release, and the script is the stub of `runtime/shim/bootstrap.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from pprint import pformat
from typing import TYPE_CHECKING, Final

from runtime.errors import NotPossible
from runtime.shim import bootstrap
from runtime.shim.bundle import build_shim

if TYPE_CHECKING:
    from runtime.jobs.hosts.base import Files

BOOT: Final = "boot"
"""Folder of the record root. Its objects are never replaced, and belong to no job."""
FOLDER: Final = "/var/lib/research-runtime"
"""The machine's own folder for the programs and the job."""
_USER_DATA: Final = """\
Content-Type: multipart/mixed; boundary="==runtime=="
MIME-Version: 1.0

--==runtime==
Content-Type: text/cloud-config; charset="utf-8"

#cloud-config
cloud_final_modules: [[scripts-user, always]]

--==runtime==
Content-Type: text/x-shellscript; charset="utf-8"

{stub}
--==runtime==--
"""


def build_boot(more: Mapping[str, bytes] | None = None) -> dict[str, bytes]:
    """File name → content of all that a machine brings: `shim.py`, and `more`."""
    return {"shim.py": build_shim(), **(more or {})}


def write_boot(contents: Mapping[str, bytes], files: Files) -> list[str]:
    """Write the contents to the record root and return their names there; safe to call again, and at the same time.

    A launcher calls it before it asks the backend for a machine. Raises `NotPossible` if an object has other bytes.
    """
    named = {f"{BOOT}/{_digest(data)}": data for data in contents.values()}
    for name, data in named.items():
        if not files.create(name, data, mode=0o644) and files.read(name) != data:
            raise NotPossible(
                f"`{name}` in `{files.root}` has other bytes than its name says",
                hint="remove that object, then launch again",
            )
    return sorted(named)


def render_stub(
    records: str,
    job: str,
    contents: Mapping[str, bytes],
    args: Sequence[str] = (),
    *,
    region: str | None = None,
    folder: str = FOLDER,
) -> str:
    """The start-up script of a machine for `job`, which runs at every boot; it holds no secret.

    `args` are the shim's, such as `--native ID`; `region` is that of an `s3://` record root. Pure.
    """
    boot = {
        "records": records.rstrip("/"),
        "job": job,
        "files": {name: _digest(data) for name, data in contents.items()},
        "args": list(args),
        "region": region,
        "folder": folder,
    }
    program = Path(bootstrap.__file__).read_text(encoding="utf-8")
    return f"#!/usr/bin/env python3\n{program}\n\nsys.exit(main({pformat(boot, sort_dicts=False)}))\n"


def render_user_data(script: str) -> str:
    """The user data that has cloud-init run a script at every boot; of a bare script it runs the first boot's only.

    https://cloudinit.readthedocs.io/en/latest/reference/modules.html#scripts-user
    """
    return _USER_DATA.format(stub=script)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
