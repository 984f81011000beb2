"""A project with one target, for suites of launchers: launches from it, here and in a process that a test can kill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from runtime.client.jobs.handle import JobHandle, find_job
from runtime.client.jobs.launch import launch
from runtime.client.jobs.prepare import LaunchOptions, prepare
from runtime.client.jobs.price_check import find_price
from runtime.client.jobs.targets import OpenTarget, find_target, make_context
from runtime.config import Limits, Project, Settings
from runtime.errors import NotPossible
from runtime.jobs import ledger, lock
from runtime.jobs.hosts.base import Host
from runtime.jobs.plan import Fidelity, LaunchPlan, Target
from runtime.jobs.price import Price
from runtime.jobs.spec import JobSpec, SecretRef
from runtime.launchers.base import Launcher, ListsOwned
from runtime.launchers.registry import get_launcher

if TYPE_CHECKING:
    from runtime.testing.metadata import MetadataServer

NAME: Final = "here"
"""The target of the suite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherCase:
    """One launcher with a target that works, for the suite."""

    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The target's settings, as in a project's file."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Fields that every job of the suite needs there, such as `{"image": "debian:12"}`."""
    records: str | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    """Variables of processes that launch: a PYTHONPATH that finds the launcher, a KUBECONFIG."""
    patience_s: float = 60
    """How long a job of one second may take until it has ended."""
    break_job: Callable[[JobHandle], None] | None = None
    """Takes a running job's machine away without notice, for launchers with `resumes`."""
    metadata: MetadataServer | None = None
    """The stand-in for a cloud's metadata server whose variables the shims have, for launchers that heed notices."""
    tell: Callable[[], str] = str
    """The backend's own report, for the message of a test that waits in vain."""

    def target(self) -> dict[str, Any]:
        found: dict[str, Any] = {"kind": self.kind, "defaults": dict(self.defaults), **self.settings}
        return found if self.records is None else {**found, "records": self.records}


Opened = TypeVar("Opened", JobHandle, Host)


class Bench:
    """A project with one target and a work tree, and launches from it."""

    def __init__(self, case: LauncherCase, folder: Path) -> None:
        self.case, self.folder = case, folder
        self.tree = folder / "tree"
        self.tree.mkdir(parents=True)
        (self.tree / "main.sh").write_text("echo from the tree\n")
        self.settings = make_settings(case, folder)
        self._opened: list[JobHandle | Host] = []

    @property
    def target(self) -> Target:
        return find_target(NAME, self.settings)

    @property
    def launcher(self) -> Launcher:
        return get_launcher(self.case.kind)

    def keeps(self, name: str) -> bool:
        """Whether a field has a meaning there."""
        return self.launcher.keeps[name].fidelity is not Fidelity.REFUSED

    def require(self, *fields: str) -> None:
        """Skip the test where one of the fields is refused."""
        for name in fields:
            support = self.launcher.keeps[name]
            if support.fidelity is Fidelity.REFUSED:
                _skip(f"`{name}` is refused: {support.how}")

    def require_secret(self) -> SecretRef:
        """A secret that the launching machine reads, of the variable `CANARY`. Skip the test where the target takes none."""
        self.require("secrets")
        ref = SecretRef(name="TOKEN", source="env://CANARY")
        try:
            self.plan("true", secrets=(ref,))
        except NotPossible as refused:
            _skip(refused.message)
        return ref

    def require_resume(self) -> Callable[[JobHandle], None]:
        """Return the case's `break_job`. Skip the test if the backend restarts lost jobs by itself."""
        if not self.launcher.resumes:
            _skip("its backend starts what is gone again by itself")
        assert self.case.break_job is not None, "the case of a launcher with `resumes` needs `break_job`"
        return self.case.break_job

    def require_owned(self) -> None:
        """Skip the test if the launcher does not list what its backend holds of ours."""
        if not isinstance(self.launcher, ListsOwned):
            _skip("its backend has no labels")

    def require_price(self) -> Price:
        """The price of a small job by the launcher. Skip the test if its jobs cost nothing."""
        price = find_price(prepare(JobSpec(command=("true",)), self.target, self.settings, self.options))
        return price or _skip("its jobs cost nothing")

    def require_notices(self) -> MetadataServer:
        """Return the case's `metadata`. Skip the test if the shims heed no cloud's notices there."""
        if not self.plan("true").order.get("notices", {}).get("clouds"):
            _skip("its shims heed no notices of a cloud")
        assert self.case.metadata is not None, "the case of a launcher that heeds notices needs `metadata`"
        return self.case.metadata

    def limit_price(self, most: float) -> None:
        """Bound what a launch of the project may cost, in dollars an hour."""
        project = replace(self.settings.project, limits=Limits(max_hourly_cost=most))
        self.settings = replace(self.settings, project=project)

    @property
    def options(self) -> LaunchOptions:
        return LaunchOptions(base=self.tree, assume_yes=True)

    def start(self, *command: str, ignore: tuple[str, ...] = (), **changes: Any) -> JobHandle:
        spec = JobSpec(command=command, **changes)
        options = replace(self.options, ignore=ignore)
        return self.keep(launch(spec, NAME, settings=self.settings, options=options))

    def plan(self, *command: str, **changes: Any) -> LaunchPlan:
        spec = JobSpec(command=command, **changes)
        return prepare(spec, self.target, self.settings, self.options).plan

    def end(self, job: JobHandle) -> ledger.JobStatus:
        try:
            return job.wait(timeout=self.case.patience_s)
        except TimeoutError as late:
            raise TimeoutError(f"{late}\n{self.tell()}") from None

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds; fail with what all parties say after the case's patience."""
        until = time.monotonic() + self.case.patience_s
        while not condition():
            if time.monotonic() >= until:
                raise TimeoutError(f"nothing came within {self.case.patience_s:g} s\n{self.tell()}")
            time.sleep(0.05)

    def tell(self) -> str:
        """Return the reports of the record and the backend on the jobs, for messages."""
        jobs = [(job.id, job.look(tell=lambda problem: None)) for job in self._opened if isinstance(job, JobHandle)]
        return "\n".join([*map(str, jobs), self.case.tell()])

    def launch_elsewhere(
        self, spec: Mapping[str, Any], *, follow: bool = False, holder_is_dead: bool = False, **environ: str
    ) -> subprocess.Popen[str]:
        """Launch in a process in a session of its own, which may be killed; it prints the id and whether it was new.

        With `follow` it stays until the job has ended. With `holder_is_dead` it takes a held lock over after a second.
        """
        case = {name: getattr(self.case, name) for name in ("kind", "settings", "defaults", "records")}
        about = {"folder": str(self.folder), "spec": spec, "case": case, "follow": follow, "dead": holder_is_dead}
        # The folder that this file was imported from, since the process may start in another one.
        here = str(Path(__file__).parents[2])
        paths = filter(None, (self.case.environ.get("PYTHONPATH"), here, os.environ.get("PYTHONPATH")))
        program = "from runtime.testing.launcher_bench import run_launch; run_launch()"
        return subprocess.Popen(
            [sys.executable, "-c", program, json.dumps(about, default=dict)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, **self.case.environ, "PYTHONPATH": os.pathsep.join(paths), **environ},
        )

    def find(self, job: str) -> JobHandle:
        return self.keep(find_job(job, settings=self.settings, target=NAME))

    def open_host(self) -> Host:
        """Open the host without a check of its record root."""
        context = make_context(self.settings, self.tree)
        return self.keep(self.launcher.open_host(self.target, context))

    def open_place(self) -> OpenTarget:
        return OpenTarget(self.target, self.launcher, self.open_host())

    def keep(self, opened: Opened) -> Opened:
        """Close `opened` after the test."""
        self._opened.append(opened)
        return opened

    def close(self) -> None:
        for each in self._opened:
            each.close()


def _skip(why: str) -> NoReturn:
    # Processes that launch import this module too, and take half as long without pytest.
    import pytest

    __tracebackhide__ = True
    pytest.skip(why)


def make_settings(case: LauncherCase, folder: Path) -> Settings:
    return Settings(
        project=Project(root=folder, targets={NAME: case.target()}),
        data_dir=folder / "data",
        cache_dir=folder / "cache",
        config_dir=folder / "config",
    )


def run_launch() -> None:
    from runtime.jobs.spec import parse_spec

    about = json.loads(sys.argv[1])
    if about["dead"]:
        vars(lock)["STILL_S"] = 1.0
    folder = Path(about["folder"])
    settings = make_settings(LauncherCase(**about["case"]), folder)
    options = LaunchOptions(base=folder / "tree", assume_yes=True)
    job = launch(parse_spec(about["spec"]), NAME, settings=settings, options=options)
    sys.stdout.write(f"{job.id} {job.new}\n")
    if about["follow"]:
        sys.stdout.flush()
        job.wait()


def read_log(job: JobHandle, index: int = 0, **which: Any) -> str:
    return b"".join(job.logs(index=index, **which)).decode()
