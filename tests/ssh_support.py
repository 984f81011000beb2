"""A real sshd on 127.0.0.1 in its own folder, with its own keys and a private home."""

from __future__ import annotations

import getpass
import os
import shlex
import shutil
import socket
import subprocess
from pathlib import Path

from tests.services_support import Service

INSTALL = "make services"


def find_sshd() -> str | None:
    return shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")


def missing_for_ssh() -> list[str]:
    """List the names of missing programs."""
    there = {"sshd": find_sshd(), "ssh": shutil.which("ssh"), "ssh-keygen": shutil.which("ssh-keygen")}
    return [name for name, path in there.items() if path is None]


class SshServer(Service):
    """sshd, and the client's side: an ssh_config that names it `box`, with its key known.

    `commands` is the first folder of PATH for sessions: a test's commands there are found before the machine's own.
    """

    name = "sshd"
    host = "box"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.home, self.commands = folder / "home", folder / "commands"
        for each in (folder, self.home, self.commands):
            each.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._make_key(folder / "host_key")
        self._make_key(folder / "user_key")
        (folder / "authorized_keys").write_text((folder / "user_key.pub").read_text())
        (folder / "authorized_keys").chmod(0o600)
        # Every session starts here, with a banner as from login scripts and with the test's own home.
        self.start_file = folder / "session"
        self.set_session('exec sh -c "$SSH_ORIGINAL_COMMAND"')
        key = (folder / "host_key.pub").read_text().split()
        self.known_hosts = folder / "known_hosts"
        self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {key[0]} {key[1]}\n")
        self._write_server_config()
        self.config = folder / "ssh_config"
        self.write_client_config()

    def set_session(self, line: str, *, banner: str = "") -> None:
        """Set the command of a session; `banner` is printed first."""
        text = f"#!/bin/sh\nexport HOME={shlex.quote(str(self.home))} TMPDIR={shlex.quote(str(self.folder))}\n"
        text += f'export PATH={shlex.quote(str(self.commands))}:{shlex.quote(os.environ["PATH"])}\ncd "$HOME"\n'
        text += f"printf %s {shlex.quote(banner)}\n{line}\n"
        self.start_file.write_text(text)
        self.start_file.chmod(0o700)

    def write_client_config(self, *more: str) -> None:
        lines = [
            f"Host {self.host}",
            "HostName 127.0.0.1",
            f"Port {self.port}",
            f"User {getpass.getuser()}",
            f"IdentityFile {self.folder}/user_key",
            "IdentitiesOnly yes",
            "IdentityAgent none",
            f"UserKnownHostsFile {self.known_hosts}",
            "GlobalKnownHostsFile /dev/null",
            *more,
        ]
        self.config.write_text("\n".join(lines) + "\n")

    @property
    def options(self) -> list[str]:
        return ["-F", str(self.config)]

    def add_command(self, name: str, script: str) -> None:
        """Add a command that sessions find before the machine's own of that name."""
        path = self.commands / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o700)

    def connections(self) -> int:
        """Return the number of connections accepted so far."""
        return (self.folder / "sshd.log").read_text().count("Accepted publickey")

    def drop_connections(self) -> None:
        """Cut every open connection, as a network failure would; the server goes on."""
        for line in subprocess.run(
            ["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
        ).stdout.splitlines():
            pid, parent = (int(word) for word in line.split())
            if parent == self.pid:
                try:
                    os.kill(pid, 9)
                except ProcessLookupError:
                    continue

    def _make_key(self, path: Path) -> None:
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)

    def _write_server_config(self) -> None:
        lines = [
            f"Port {self.port}",
            "ListenAddress 127.0.0.1",
            f"HostKey {self.folder}/host_key",
            f"AuthorizedKeysFile {self.folder}/authorized_keys",
            f"PidFile {self.folder}/sshd.pid",
            f"ForceCommand {self.start_file}",
            # A shell that sshd starts reads `.bashrc`, and the developer's may do anything, for as long as it likes.
            f"SetEnv HOME={self.home}",
            # The folder is below the system's temporary folder, which other users may write to.
            "StrictModes no",
            "UsePAM no",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "MaxStartups 100",
            "MaxSessions 100",
        ]
        (self.folder / "sshd_config").write_text("\n".join(lines) + "\n")

    def _command(self) -> list[str]:
        # sshd requires its full path, and this folder for privilege separation.
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        log = str(self.folder / "sshd.log")
        return [str(find_sshd()), "-D", "-f", str(self.folder / "sshd_config"), "-E", log]

    def _is_ready(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                return connection.recv(16).startswith(b"SSH-")
        except OSError:
            return False
