"""The record root on a claim, reached from outside the cluster through a small pod that mounts it.

All launches of an owner into a namespace share the pod. It waits for commands, and ends by itself after some minutes
without one; its Job is removed after it.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import time
from typing import Any, Final

from runtime.errors import NotPossible, StoreUnavailable
from runtime.jobs.hosts.base import Files, HostUnavailable
from runtime.jobs.hosts.bucket import BucketFiles
from runtime.jobs.hosts.remote import PROGRAM, RemoteFiles, RemoteHost, render_agent
from runtime.jobs.spec import JobState
from runtime.launchers.kubernetes.cleanup import END_S, wait_until_gone
from runtime.launchers.kubernetes.client import KubernetesCluster, KubernetesUnavailable, close_exec
from runtime.launchers.kubernetes.render import render_files_job
from runtime.launchers.kubernetes.settings import KubernetesTarget
from runtime.launchers.kubernetes.states import NAME_OF_JOB, is_unfinished, newest_pods, read_pod

START_S: Final = 180
"""How long the pod may take to run, a first pull of its image included."""
_SECRET: Final = re.compile(r"jobs/[^/]+/secrets/[^/]+")
_FRAME: Final = 1 << 18
READS: Final = frozenset({"where", "read", "read_many", "read_from", "names", "tree", "room"})
"""Requests that are made again over a new connection if theirs was closed: the pod ends when it has nothing to do, which may
be right now. Others may have been carried out."""


class JobFiles(BucketFiles):
    """A bucket without the secrets of jobs, which wait in memory until a Secret of the namespace takes them."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._secrets: dict[str, bytes] = {}

    def write(self, name: str, data: bytes, *, mode: int = 0o600) -> None:
        if _SECRET.fullmatch(name):
            self._secrets[name] = data
        else:
            super().write(name, data, mode=mode)

    def secrets_of(self, job: str) -> dict[str, bytes]:
        """Name → value of the secrets that were written for a job through this object."""
        prefix = f"jobs/{job}/secrets/"
        return {name[len(prefix) :]: data for name, data in self._secrets.items() if name.startswith(prefix)}


class KubernetesHost(RemoteHost):
    """A pod that sees the record root. Nothing is started before the first request, and none for a bucket."""

    def __init__(self, place: KubernetesTarget, cluster: KubernetesCluster, owner: str) -> None:
        super().__init__()
        self.place, self.cluster = place, cluster
        self.name = f"{place.context or 'kubernetes'}/{place.namespace}"
        self._owner = owner
        self._socket: Any = None
        self._mark = b""
        self._rest = b""
        self._errors = b""
        address = f"{self.name}/{place.records}"
        self.files: Files = JobFiles(place.bucket) if place.bucket else RemoteFiles(self, address)

    def exchange(self, request: bytes, patience_s: float) -> dict[str, Any]:
        if self.place.bucket:
            raise HostUnavailable(f"no pod in `{self.name}` runs commands: its jobs lie in a bucket", retryable=False)
        tries = 2 if json.loads(request)["do"] in READS else 1
        while True:
            if self._socket is None:
                self._connect()
            try:
                self._send(request)
                return self._hear(patience_s)
            except Exception as problem:
                tries -= 1
                lost = self._lost(problem)
                if not tries or isinstance(problem, TimeoutError):
                    raise lost from problem

    def explain(self, said: str, number: int | None) -> StoreUnavailable:
        return StoreUnavailable(
            f"the record root `{self.place.root}` of claim `{self.place.claim}` refuses: {said}",
            hint="`runtime targets check` tries every step",
        )

    def close(self) -> None:
        self._hang_up()
        self.cluster.close()

    def _hang_up(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            close_exec(socket)

    # the connection

    def _connect(self) -> None:
        pod = self._ensure_pod()
        self._mark = f"=={secrets.token_hex(12)}==".encode()
        self._rest = self._errors = b""
        words = [self.place.python, "-u", "-c", PROGRAM]
        self._socket = self.cluster.open_exec(self.place.namespace, pod, words)
        self._send(render_agent(self._mark.decode(), self.place.root))

    def _send(self, data: bytes) -> None:
        for at in range(0, len(data), _FRAME):
            self._socket.write_channel(0, data[at : at + _FRAME])

    def _hear(self, patience_s: float) -> dict[str, Any]:
        """The next answer; other output is skipped."""
        until = time.monotonic() + patience_s
        parts = [self._rest]
        while True:
            if b"\n" in parts[-1]:
                line, _, rest = b"".join(parts).partition(b"\n")
                parts = [rest]
                _, found, text = line.partition(self._mark)
                if found:
                    self._rest = rest
                    return dict(json.loads(text))
                continue
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"no answer within {patience_s:g} s")
            if not self._socket.is_open():
                raise EOFError("the connection was closed")
            self._socket.update(timeout=min(left, 5))
            parts.append(self._socket.read_channel(1) or b"")
            self._errors = (self._errors + (self._socket.read_channel(2) or b""))[-4000:]

    def _lost(self, problem: Exception) -> HostUnavailable:
        said = self._errors.decode("utf-8", "replace").strip().splitlines()
        self._hang_up()
        return HostUnavailable(
            f"the connection to the record root in `{self.name}` was lost: {said[-1] if said else problem}",
            hint="run the same command again",
        )

    # the pod

    def _ensure_pod(self) -> str:
        """Name of a pod that runs and sees the claim."""
        place = self.place
        # The same for the same owner, claim and image, so that launches share it.
        said = "\0".join((self._owner, place.claim, str(place.image), place.python, str(place.run_as_user)))
        name = f"runtime-files-{hashlib.sha256(said.encode()).hexdigest()[:16]}"
        until = time.monotonic() + START_S
        namespace, asked = self.place.namespace, False
        while True:
            job = self.cluster.get("jobs", namespace, name)
            if job is None:
                wanted = render_files_job(self.place, name, self._owner)
                asked = self.cluster.create("jobs", namespace, wanted) is not None
                continue
            pods = self.cluster.list("pods", namespace, labels=f"{NAME_OF_JOB}={name}")
            view = read_pod(newest_pods(pods)[0]) if pods else None
            going = bool(job["metadata"].get("deletionTimestamp"))
            if view is not None and view.raw == "Running" and not going:
                if "activeDeadlineSeconds" in job["spec"]:
                    # It has begun in time; from now on it ends once it has nothing to do.
                    self.cluster.patch("jobs", namespace, name, {"spec": {"activeDeadlineSeconds": None}})
                return view.name
            if not is_unfinished(job) and not going:
                self._end_files(name)
                if asked and view is not None and view.state is JobState.FAILED:
                    raise NotPossible(
                        f"the pod that reads the record root cannot run: {view.message or view.raw}",
                        facts=[f"image `{self.place.image}`, python `{self.place.python}`"],
                        hint="the target's `image` needs a Python 3; `python` of the target names it",
                    )
                asked = False
            stuck = view is not None and view.state is JobState.PENDING and view.reason is not None
            if stuck or time.monotonic() >= until:
                self._end_files(name)
                raise (NotPossible if stuck else KubernetesUnavailable)(
                    f"the pod that reads the record root does not start: {view.raw if view else 'it is not made'}",
                    facts=[view.message] if view and view.message else [],
                    hint=f"it mounts claim `{self.place.claim}` and runs `{self.place.image}`",
                )
            time.sleep(0.2)

    def _end_files(self, name: str) -> None:
        self.cluster.delete("jobs", self.place.namespace, name)
        wait_until_gone(self.cluster, self.place.namespace, {name}, END_S)
