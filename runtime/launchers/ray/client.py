"""Ray's REST API for jobs, by the standard library, and the tunnel to a head that is not reachable as it is."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any, Final

from runtime.errors import InfrastructureFailure, NotPossible
from runtime.launchers.ray.settings import RayTarget
from runtime.stack.port_forward import TunnelFailed, open_forward

ANSWER_S: Final = 60.0
LET_GO_S: Final = 30.0
"""How long the head may take to end the actor of a job that has ended."""
WATCH_S: Final = 3.0
"""After which the head no longer looks at an actor that has ended: three times the pause between its looks."""
_LOOK_S: Final = 0.1
_TAKEN: Final = "already exists"


class RayUnavailable(InfrastructureFailure):
    """The head does not answer: nothing is known about any job."""


class RayRefused(NotPossible):
    """The head refused a request; `status` is the HTTP code and `said` its own words."""

    def __init__(self, what: str, status: int, said: str) -> None:
        self.status, self.said = status, said
        super().__init__(f"ray refuses to {what}: {said}", facts=[f"HTTP {status}"])


class RayJobs:
    """Jobs of one cluster by its head's API. The first call opens the tunnel, if there has to be one."""

    def __init__(self, place: RayTarget) -> None:
        self._place = place
        self._opened = contextlib.ExitStack()
        self._address = place.address
        # The head answers from its own network: a proxy of this machine has nothing to do with it.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def close(self) -> None:
        self._address = self._place.address
        self._opened.close()

    def submit(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Submit a job under its `submission_id`, or find the one that has this id; returns the head's view of it."""
        name = body["submission_id"]
        known = self.get(name)
        if known is None:
            try:
                self._call("POST", "", f"submit `{name}`", body)
            except RayRefused as refused:
                # A taken id is answered with 500 and a traceback, not with 409.
                if refused.status != 500 or _TAKEN not in refused.said:
                    raise
            known = self.get(name)
        if known is None:
            raise RayUnavailable(f"the head took job `{name}`, and does not know it now", hint="launch it again")
        return known

    def get(self, name: str) -> dict[str, Any] | None:
        """Return the head's record of a job; None for an unknown id."""
        try:
            return dict(self._call("GET", urllib.parse.quote(name), f"tell of `{name}`"))
        except RayRefused as refused:
            if refused.status == 404:
                return None
            raise

    def list_drivers(self) -> list[dict[str, Any]]:
        """List programs that connected to the cluster by themselves, without having been submitted."""
        found = self._call("GET", "", "list its jobs")
        return [dict(job) for job in found if not job.get("submission_id")]

    def list(self) -> dict[str, dict[str, Any]]:
        """All jobs that were submitted with an id."""
        found = self._call("GET", "", "list its jobs")
        return {job["submission_id"]: dict(job) for job in found if job.get("submission_id")}

    def read_session(self) -> str | None:
        """The name of the head's session, another one after each start of the head; None if it tells none."""
        session = self._call("GET", "version", "tell its session", api="").get("session_name")
        return str(session) if session else None

    def read_log(self, name: str) -> str:
        """Return the output of the job's driver; empty for an unknown job."""
        try:
            return str(self._call("GET", f"{urllib.parse.quote(name)}/logs", f"show the log of `{name}`")["logs"])
        except RayRefused as refused:
            if refused.status == 404:
                return ""
            raise

    def stop(self, name: str) -> None:
        """Ask a job to end; ended or gone is success."""
        self._act("POST", f"{urllib.parse.quote(name)}/stop", f"stop `{name}`")

    def delete(self, name: str) -> None:
        """Make the head forget a job that has ended; gone is success."""
        self._act("DELETE", urllib.parse.quote(name), f"delete `{name}`")

    def replace(self, name: str) -> None:
        """Make the head forget a job that has ended, so that its id can be submitted again.

        The head ends the job's own actor later, and looks at it once a second until then. It would take the end of that
        actor for the end of a new job of this id.
        """
        actor = f"_ray_internal_job_actor_{name}"
        query = urllib.parse.urlencode({"filter_keys": "name", "filter_predicates": "=", "filter_values": actor})
        until = time.monotonic() + LET_GO_S
        with contextlib.suppress(RayRefused):
            while time.monotonic() < until:
                said = self._call("GET", f"actors?{query}", f"tell of the actor of `{name}`", api="v0/")
                if all(each.get("state") == "DEAD" for each in said["data"]["result"]["result"]):
                    break
                time.sleep(_LOOK_S)
        time.sleep(WATCH_S)
        self.delete(name)

    def _act(self, method: str, path: str, what: str) -> None:
        try:
            self._call(method, path, what)
        except RayRefused as refused:
            if refused.status != 404:
                raise

    def _call(
        self, method: str, path: str, what: str, body: Mapping[str, Any] | None = None, *, api: str = "jobs/"
    ) -> Any:
        url = f"{self.read_address()}/api/{api}{path}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
        try:
            with self._opener.open(request, timeout=ANSWER_S) as answer:
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as refused:
            with refused:
                said = refused.read().decode("utf-8", "replace")
            if refused.code in (502, 503, 504):
                raise RayUnavailable(
                    f"the head of target `{self._place.target}` is not ready: {refused.code}"
                ) from None
            raise RayRefused(what, refused.code, _shorten(said)) from None
        except (OSError, http.client.HTTPException, ValueError) as problem:
            self.close()
            reason = getattr(problem, "reason", None) or problem
            raise RayUnavailable(
                f"the Ray head of target `{self._place.target}` does not answer: {reason}",
                facts=[f"asked at {url}"],
                hint="`runtime targets check` tries every step",
            ) from problem

    def read_address(self) -> str:
        """The URL under which the head can be reached from here; opens the tunnel."""
        if self._address is None:
            assert self._place.tunnel is not None
            try:
                self._address = self._opened.enter_context(open_forward(self._place.tunnel))
            except TunnelFailed as problem:
                raise RayUnavailable(problem.message, facts=problem.facts, hint=problem.hint) from problem
        return self._address


def _shorten(said: str) -> str:
    """The last line of a traceback, or the text."""
    lines = [line for line in said.strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no reason given"
