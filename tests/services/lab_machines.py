"""Machines on this machine: each boots by its own start-up script from its metadata, and its units run in a PID namespace.

Nothing of the start-up and start scripts is replaced but ports, paths and addresses. Stand-ins on PATH (`lab/bin`) are
`ssh`, which runs a command on another machine of the lab, `systemctl`, which asks the `Lab` here, `sudo` and `docker`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import socketserver
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

from infra.render.cluster import PORTS
from infra.render.startup import MACHINE_KEY, STARTUP_KEY
from tests.infra.machine_support import MetadataServer
from tests.ports import Ports
from tests.services.ray_cluster import ENVIRON
from tests.services_support import PATIENCE_S, require

TOOLS: Final = Path(__file__).parent / "lab/bin"
REPOSITORY: Final = Path(__file__).parents[2]

SLOTS: Final = 80
"""Machines at a time."""
_PORTS: Final = 60
"""Ports of each machine."""
_SHARED: Final = ("gcs", "dashboard", "client")
"""Ports of the head alone."""
_FOLDERS: Final = ("/etc/runtime-ray", "/opt/runtime-ray", "/run/runtime-ray", "/var/lib/runtime-ray")
_READ: Final = ("/etc/runtime-ray/config",)
_OBJECTS_BYTES: Final = 80_000_000
_RESTART_S: Final = 1.0

_LOGIN: Final = """\
#!/bin/bash
# A login on machine {name}: runs the command of its only word with the machine's own paths and environment.
words="$1"
for folder in {folders}; do
  words="${{words//"${{folder}}"/{root}${{folder}}}}"
done
cd {root}
exec env -i {environment} bash -c "${{words}}"
"""
_CONTAINER: Final = """
mount --bind "$0/var/lib/runtime-ray" /tmp/ray
for folder in $VOLUMES; do
  # A folder that this machine does not have, on which the container's can be mounted.
  mkdir -p "$0/places/${folder#/etc/}"
  mount -t overlay overlay -o "lowerdir=$0/places:/etc" /etc
  mount --bind "$0${folder}" "${folder}"
done
exec bash "$@"
"""


class Machine:
    """A machine of the lab: its folder, metadata, address, and the unit that runs."""

    def __init__(self, lab: Lab, name: str, address: str, environ: Mapping[str, str]) -> None:
        self.name, self.address, self.environ = name, address, dict(environ)
        self._ports = Ports(_PORTS)
        if not lab.machines:
            lab.first_port = self._ports.first
        self.root = lab.folder / name
        self.metadata = MetadataServer()
        self.unit: str | None = None
        """What systemd would keep running."""
        self.process: subprocess.Popen[bytes] | None = None
        self.booted = False
        """Whether its start-up script has ended well."""
        self.off = False
        """Whether it was switched off, which is for good."""
        self._script: subprocess.Popen[bytes] | None = None
        self._lab = lab
        (self.root / "var/lib/runtime-ray").mkdir(parents=True)
        (self.root / "etc/systemd/system").mkdir(parents=True)
        (self.root / "run").mkdir()

    @property
    def ports(self) -> dict[str, int]:
        first, of_head = self._ports.first, self._lab.first_port
        own = {name: first + at for at, name in enumerate(PORTS)}
        shared = {name: of_head + list(PORTS).index(name) for name in _SHARED}
        return {**own, **shared, "worker_min": first + len(PORTS), "worker_max": first + _PORTS - 1}

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": f"{Path(sys.executable).parent}:{TOOLS}:{os.environ['PATH']}",
            "HOME": str(self.root),
            "LANG": "C.UTF-8",
            "LAB": str(self._lab.folder),
            "LAB_MACHINE": self.name,
            "LAB_PORT": str(self._lab.port),
            "RUNTIME_RAY_ROOT": str(self.root),
            "RUNTIME_RAY_WAIT_S": "0.2",
            "GCE_METADATA_HOST": self.metadata.address,
            **self._lab.environ,
            **self.environ,
        }

    def boot(self, attributes: Mapping[str, str]) -> bool:
        """Run the start-up script of `attributes` to its end, as the guest agent does. Returns whether it succeeded."""
        own = dict(attributes)
        own[MACHINE_KEY] = own[MACHINE_KEY].replace(
            f"RAYLET_PORT = {PORTS['node_manager']}\n", f"RAYLET_PORT = {self.ports['node_manager']}\n"
        )
        self.metadata.set(own)
        # A login shell reads the system's own profile, which sets PATH, before this one.
        (self.root / ".bash_profile").write_text(f"export PATH={shlex.quote(self.environment['PATH'])}\n")
        login = self._lab.login_of(self.address)
        environment = " ".join(f"{name}={shlex.quote(value)}" for name, value in self.environment.items())
        text = _LOGIN.format(name=self.name, root=self.root, folders=" ".join(_FOLDERS), environment=environment)
        with self._lab.lock, self.log.open("ab") as log:
            if self.off:
                return False
            login.write_text(text)
            login.chmod(0o755)
            script = ["bash", "-c", own[STARTUP_KEY]]
            self._script = self._lab.spawn(script, self.environment, log.fileno(), namespace=False)
        self.booted = self._script.wait() == 0
        return self.booted

    @property
    def log(self) -> Path:
        """What its start-up script and its units print."""
        return self.root / "log"

    def start(self, unit: str) -> None:
        """Start a unit, and start it again whenever it ends."""
        self.stop()
        self.unit = unit
        (words, environment) = self._read_unit(unit)
        container = ["bash", "-ec", _CONTAINER, str(self.root), *words]
        with self.log.open("ab") as log:
            self.process = self._lab.spawn(container, environment, log.fileno(), namespace=True)

    def stop(self) -> None:
        """End the unit's processes without notice; systemd does not start it again."""
        self.unit, process, self.process = None, self.process, None
        if process is not None:
            _kill(process)

    def switch_off(self) -> None:
        """End all of its processes without notice, for good."""
        self.off = True
        self.stop()
        if self._script is not None:
            _kill(self._script)
        self.metadata.stop()
        self._ports.close()

    def _read_unit(self, unit: str) -> tuple[list[str], dict[str, str]]:
        """Return the words that the unit's container runs, and their environment."""
        lines = (self.root / "etc/systemd/system" / unit).read_text().splitlines()
        fields = dict(line.split("=", 1) for line in lines if "=" in line)
        given: dict[str, str] = {}
        if "EnvironmentFile" in fields:
            text = Path(f"{self.root}{fields['EnvironmentFile']}").read_text()
            given = dict(word.split("=", 1) for word in shlex.split(text))
        words = shlex.split(fields["ExecStart"])
        at = next(at for at, word in enumerate(words) if word.startswith("--entrypoint="))
        environment = {**ENVIRON, "TMPDIR": "/tmp"}
        for word in words[:at]:
            if word.startswith("--env="):
                name, equals, value = word.removeprefix("--env=").partition("=")
                if equals or name in given:
                    environment[name] = value if equals else given[name]
        environment |= self.environment
        # What programs of ours read in the container by its path; scripts name the machine's own folders.
        environment["VOLUMES"] = " ".join(each for each in _READ if f"--volume={each}:{each}:ro" in words[:at])
        (script, *more) = words[at + 2 :]
        here = self.root / f"{Path(script).name}.here"
        here.write_text(self._localize(Path(f"{self.root}{script}").read_text()))
        return [str(here), *more], environment

    def _localize(self, script: str) -> str:
        """The start script with this machine's ports, paths and address."""
        names = {port: name for name, port in PORTS.items()}
        script = re.sub(r"-port=([0-9]+)|--port=([0-9]+)|:([0-9]{4,5})\"", self._replace_port(names), script)
        for folder in _FOLDERS:
            script = script.replace(folder, f"{self.root}{folder}")
        script = script.replace("--dashboard-host=0.0.0.0", "--dashboard-host=127.0.0.1")
        more = f"  --block\n  --node-ip-address={self.address}\n  --object-store-memory={_OBJECTS_BYTES}\n"
        assert "  --block\n" in script
        return script.replace("  --block\n", more)

    def _replace_port(self, names: Mapping[int, str]) -> Callable[[re.Match[str]], str]:
        def replace(found: re.Match[str]) -> str:
            port = next(int(each) for each in found.groups() if each)
            return found[0].replace(str(port), str(self.ports[names[port]]))

        return replace


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and its group; ended is success."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(PATIENCE_S)


class Lab:
    """All machines. Every process of theirs ends with this one, even if it is killed."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        require("unshare", shutil.which("unshare"), "apt-get install util-linux")
        require("ray", Path(sys.executable).with_name("ray").exists(), "make test")
        self.environ = dict(environ)
        self.folder = Path(tempfile.mkdtemp(prefix="lab-"))
        self.machines: dict[str, Machine] = {}
        (self.folder / "logins").mkdir()
        # The mount point that stands for a container's own folder.
        Path("/tmp/ray").mkdir(exist_ok=True)
        self.first_port = 0
        """Of the head, which is added first."""
        self._addresses = 0
        # A child is killed when the thread that started it ends, so this one lives as long as the lab.
        self._spawner = ThreadPoolExecutor(1)
        self._booting = ThreadPoolExecutor(SLOTS)
        self.lock = threading.RLock()
        self._closed = threading.Event()
        self._server = _Server(("127.0.0.1", 0), _Answer)
        self._server.lab = self
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        threading.Thread(target=self._keep_units, daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def login_of(self, address: str) -> Path:
        return self.folder / "logins" / address

    def new_address(self) -> str:
        """An address of the loopback network that no machine of this lab has had."""
        self._addresses += 1
        return f"127.0.{self._addresses // 250}.{self._addresses % 250 + 1}"

    def add(self, name: str, address: str, **environ: str) -> Machine:
        with self.lock:
            machine = Machine(self, name, address, environ)
            self.machines[name] = machine
            return machine

    def boot(self, machine: Machine, attributes: Mapping[str, str]) -> Future[bool]:
        return self._booting.submit(machine.boot, attributes)

    def remove(self, name: str) -> None:
        """Switch a machine off without notice, and forget it."""
        with self.lock:
            machine = self.machines.pop(name, None)
            if machine is None:
                return
            self.login_of(machine.address).unlink(missing_ok=True)
            machine.switch_off()

    def systemctl(self, name: str, verb: str, *units: str) -> tuple[int, str]:
        """Carry out what a machine's `systemctl` was asked; returns exit code and output."""
        with self.lock:
            machine = self.machines.get(name)
            if machine is None:
                return 1, "the machine is off"
            units = tuple(unit if "." in unit else f"{unit}.service" for unit in units if not unit.startswith("-"))
            for unit in units:
                text = machine.root / "etc/systemd/system" / unit
                if not text.exists() or "--entrypoint=/bin/bash" not in text.read_text():
                    continue
                runs = machine.process is not None and machine.process.poll() is None
                if verb == "is-active":
                    return (0, "active") if runs else (3, "inactive")
                if verb == "restart" or (verb == "start" and not runs):
                    machine.start(unit)
                elif verb == "stop":
                    machine.stop()
        return 0, ""

    def spawn(
        self, words: list[str], environment: Mapping[str, str], output: int, *, namespace: bool
    ) -> subprocess.Popen[bytes]:
        """Start a process, in a PID namespace all of whose processes end with it."""
        apart = [
            "unshare",
            *([] if os.geteuid() == 0 else ["-U", "-r"]),
            "-p",
            "-m",
            "-f",
            "--kill-child",
            "--mount-proc",
        ]
        tied = ["nice", "setpriv", "--pdeathsig", "KILL", *(apart if namespace else [])]

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                [*tied, *words],
                env=dict(environment),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

        return self._spawner.submit(start).result()

    def close(self) -> None:
        self._closed.set()
        for name in list(self.machines):
            self.remove(name)
        self._booting.shutdown(cancel_futures=True)
        self._server.shutdown()
        self._server.server_close()
        self._spawner.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _keep_units(self) -> None:
        """Start units again that have ended, as systemd does."""
        while not self._closed.wait(_RESTART_S):
            with self.lock:
                for machine in list(self.machines.values()):
                    if machine.unit and machine.process is not None and machine.process.poll() is not None:
                        machine.start(machine.unit)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    lab: Lab


class _Answer(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, _Server)
        name, verb, *units = self.rfile.readline().decode().split()
        code, text = self.server.lab.systemctl(name, verb, *units)
        self.wfile.write(f"{code} {text}\n".encode())
