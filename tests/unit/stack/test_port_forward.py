"""The forward to a head: what is said if it does not open, and that nothing of it is left. `ssh` is a script."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.errors import NotPossible
from runtime.launchers.ray.client import RayJobs, RayUnavailable
from runtime.launchers.ray.settings import RayTarget
from runtime.stack import port_forward
from runtime.stack.iap_ssh import HeadWay
from runtime.stack.port_forward import TunnelFailed, open_forward
from tests.services_support import wait_until
from tests.shim_support import is_running

WAY = HeadWay(head="h", project="p", zone="z")
# Listens at the port of `-L 127.0.0.1:PORT:…`, and does not end when it is asked to.
STUBBORN = """
import os, pathlib, re, signal, socket, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path({pid!r}).write_text(str(os.getpid()))
port = int(re.search(r"-L 127.0.0.1:([0-9]+):127.0.0.1:8265", " ".join(sys.argv))[1])
with socket.create_server(("127.0.0.1", port)) as listening:
    while True:
        listening.accept()[0].close()
"""


# Ends with its input, as ssh does once the command on the other side has ended.
OBEDIENT = """
import os, pathlib, re, socket, sys, threading
pathlib.Path({pid!r}).write_text(str(os.getpid()))
assert sys.argv[-1] == "cat" and "-N" not in sys.argv
port = int(re.search(r"-L 127.0.0.1:([0-9]+):127.0.0.1:8265", " ".join(sys.argv))[1])
listening = socket.create_server(("127.0.0.1", port))
threading.Thread(target=lambda: [listening.accept()[0].close() for _ in iter(int, 1)], daemon=True).start()
sys.stdin.read()
"""
KILLED = """
import os, signal
from runtime.stack.port_forward import open_forward
from runtime.stack.iap_ssh import HeadWay
with open_forward(HeadWay(head="h", project="p", zone="z")):
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "programs"
    folder.mkdir()
    add_program(folder / "gcloud", "#!/bin/sh\n")
    monkeypatch.setenv("PATH", str(folder))
    return folder


def add_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o700)


def test_forward_that_ssh_refuses_says_its_last_line(programs: Path) -> None:
    add_program(programs / "ssh", "#!/bin/sh\necho first >&2; echo 'Permission denied (publickey).' >&2; exit 255\n")

    with pytest.raises(TunnelFailed) as failed, open_forward(WAY):
        pass

    assert failed.value.said == "Permission denied (publickey)."
    assert failed.value.facts == ("through IAP, to project `p` in z",)
    jobs = RayJobs(RayTarget(target="t", root="gs://b", python="python3", address=None, tunnel=WAY))
    with pytest.raises(RayUnavailable, match=r"no way to head `h`: Permission denied \(publickey\)\."):
        jobs.list()


def test_forward_without_ssh_or_gcloud_names_what_is_missing(programs: Path) -> None:
    with pytest.raises(NotPossible, match="`ssh` is not on this machine"), open_forward(WAY):
        pass


@pytest.mark.parametrize("words", [("-o", "ProxyCommand=none"), ("-oProxyJump=bastion",), ("-J", "bastion")])
def test_forward_by_a_proxy_of_the_users_own_needs_no_gcloud_and_their_words_come_first(
    programs: Path, words: tuple[str, ...]
) -> None:
    (programs / "gcloud").unlink()
    add_program(programs / "ssh", '#!/bin/sh\necho "$@" >&2; exit 1\n')

    with pytest.raises(TunnelFailed) as failed, open_forward(replace(WAY, options=words)):
        pass

    assert failed.value.said.startswith(f"{' '.join(words)} -o BatchMode=yes -o ProxyCommand=gcloud")


def test_forward_whose_ssh_does_not_end_is_killed(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = tmp_path / "pid"
    add_program(programs / "ssh", f"#!{sys.executable}\n{STUBBORN.format(pid=str(pid))}")
    monkeypatch.setattr(port_forward, "_ENDS_WITHIN_S", 0.1)

    with open_forward(WAY) as url:
        assert url.startswith("http://127.0.0.1:")
        ssh = int(pid.read_text())

    assert wait_until(lambda: not is_running(ssh))


def test_forward_ends_with_a_process_that_is_killed(programs: Path, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    add_program(programs / "ssh", f"#!{sys.executable}\n{OBEDIENT.format(pid=str(pid))}")

    done = subprocess.run([sys.executable, "-c", KILLED], check=False)

    assert done.returncode == -signal.SIGKILL
    assert wait_until(lambda: not is_running(int(pid.read_text())))
