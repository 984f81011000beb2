"""The promises of every launcher, tested on ours and on one from another package."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.client.jobs.handle import JobHandle
from runtime.client.jobs.prepare import read_fidelity
from runtime.errors import UnknownName
from runtime.jobs.ledger import job_folder
from runtime.jobs.plan import Fidelity, FieldSupport
from runtime.jobs.secret_schemes import COMMON_SCHEMES, SecretReader, SecretScheme
from runtime.jobs.spec import (
    Array,
    BuildOn,
    Checkpoint,
    CheckpointSignal,
    Code,
    CodeMode,
    Gpus,
    JobEnvironment,
    JobResources,
    JobSpec,
    OnExit,
    OnTaskFailure,
    Outputs,
    Placement,
    Priority,
    Range,
    Retry,
)
from runtime.jobs.spec_fields import leaf_fields, set_fields
from runtime.launchers import registry
from runtime.launchers.registry import get_launcher, list_kinds
from runtime.testing.launcher_bench import LauncherCase
from runtime.testing.launchers import LauncherSuite, check_keeps, check_plan, check_schemes
from runtime.testing.metadata import MetadataServer
from tests.services_support import PATIENCE_S
from tests.shim_support import processes_with, signal_all
from tests.ssh_support import SshServer

TOY = Path(__file__).parents[1] / "toy_launcher"


def kill_job(job: JobHandle) -> None:
    """Kill the shim and all its processes on this machine at once, as a machine failure would."""
    # Another run of these tests on this machine has jobs of the same ids.
    pids = processes_with(f"{job.files.root}/{job_folder(job.id)}")
    # Stop all first, so that none sees another die.
    signal_all(pids, signal.SIGSTOP)
    signal_all(pids)


@pytest.fixture(autouse=True)
def _nothing_left_behind(tmp_path: Path) -> Iterator[None]:
    yield
    signal_all(processes_with(str(tmp_path)))


@pytest.mark.slow
class TestLocal(LauncherSuite):
    @pytest.fixture
    def case(self, tmp_path: Path) -> LauncherCase:
        return LauncherCase(kind="local", records=str(tmp_path / "records"), break_job=kill_job, patience_s=PATIENCE_S)


@pytest.mark.slow
class TestToy(LauncherSuite):
    @pytest.fixture
    def case(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LauncherCase]:
        monkeypatch.syspath_prepend(str(TOY))
        with MetadataServer() as metadata:
            yield LauncherCase(
                kind="toy",
                settings={"python": sys.executable, "notices": True},
                records=str(tmp_path / "records"),
                environ={"PYTHONPATH": str(TOY), **metadata.environment},
                patience_s=PATIENCE_S,
                metadata=metadata,
            )


@pytest.mark.slow
class TestSsh(LauncherSuite):
    @pytest.fixture
    def case(self, tmp_path: Path, ssh_server: SshServer) -> LauncherCase:
        return LauncherCase(
            kind="ssh",
            settings={"host": ssh_server.host, "options": ssh_server.options, "python": sys.executable},
            records=str(tmp_path / "records"),
            break_job=kill_job,
            patience_s=PATIENCE_S,
        )


@pytest.mark.parametrize("kind", list_kinds())
def test_every_field_of_a_spec_is_in_exactly_one_class_of_every_launcher(kind: str) -> None:
    assert check_keeps(get_launcher(kind).keeps) == []


class OldLauncher:
    """A launcher from another package, written before the Protocol had `resumes` and `secret_schemes`."""


def test_launcher_that_does_not_say_whether_it_takes_up_takes_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._OWN, "old", f"{__name__}:OldLauncher")  # type: ignore[misc]

    assert get_launcher("old").resumes is False
    assert get_launcher("old").secret_schemes is COMMON_SCHEMES


def test_check_of_a_table_finds_what_is_missing_unknown_or_unexplained() -> None:
    fine = dict.fromkeys(leaf_fields(), FieldSupport(fidelity=Fidelity.SHIM, how="the shim"))
    broken = {name: support for name, support in fine.items() if name != "nodes"} | {
        "node": fine["name"],
        "name": FieldSupport(fidelity=Fidelity.NATIVE, how=" "),
        "env": FieldSupport(fidelity="sometimes", how="x"),  # type: ignore[arg-type]
    }

    assert check_keeps(fine) == []
    assert check_keeps(broken) == [
        "`nodes` is not in the table",
        "`node` is no field of a spec",
        "`name` does not say how it is kept, or why not",
        "`env` has the class 'sometimes'",
    ]


@pytest.mark.parametrize("kind", list_kinds())
def test_every_scheme_of_every_launcher_says_how_a_value_travels(kind: str) -> None:
    assert check_schemes(get_launcher(kind).secret_schemes) == []


def test_check_of_secret_schemes_finds_what_no_source_can_have_and_nobody_reads() -> None:
    fine = {"vault": SecretScheme(reader=SecretReader.MACHINE, how="the machine's role"), **COMMON_SCHEMES}
    broken = {
        "env": SecretScheme(reader=SecretReader.LAUNCH, how=" "),
        "My Vault": fine["vault"],
        "vault": SecretScheme(reader=SecretReader.LAUNCH, how="by whom?"),
        "odd": SecretScheme(reader="nobody", how="x"),  # type: ignore[arg-type]
    }

    assert check_schemes(fine) == []
    assert check_schemes(broken) == [
        "`env` does not say how a value travels",
        "`My Vault` can be in no source",
        "`odd` has the reader 'nobody'",
        "`vault` is read at launch, which knows no such source",
    ]


def test_check_of_a_plan_finds_what_is_wrong(tmp_path: Path) -> None:
    from runtime.testing.launcher_bench import Bench

    plan = Bench(LauncherCase(kind="local", records=str(tmp_path / "r")), tmp_path / "b").plan("true", name="one")
    part = plan.parts[0]
    broken = replace(
        plan,
        order={**{name: value for name, value in plan.order.items() if name != "retries"}, "odd": {1}},
        parts=(part, replace(part, artefact="none", offset=1)),
        fidelity={"shell": FieldSupport(fidelity=Fidelity.REFUSED, how="no")},
    )

    assert check_plan(plan) == []
    assert check_plan(broken) == [
        f"part `{part.name}` submits no artefact of the plan",
        "two parts have one name, and would be taken for one job",
        "the parts serve the indices [0, 1]",
        "the plan does not say how `command` is kept",
        "the plan does not say how `name` is kept",
        "the plan keeps `shell`, which is refused",
        "the order has no `retries`",
        "the order is no JSON: Object of type set is not JSON serializable",
    ]


def test_launcher_of_another_package_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "toy" not in list_kinds()
    with pytest.raises(UnknownName):
        get_launcher("toy")

    monkeypatch.syspath_prepend(str(TOY))

    assert "toy" in list_kinds()
    assert get_launcher("toy").kind == "toy"


@st.composite
def specs(draw: st.DrawFn) -> JobSpec:
    """Job specs with any fields, nested ones included, set to non-default values."""

    def some(kind: type, **values: st.SearchStrategy[Any]) -> Any:
        return kind(**{name: draw(value) for name, value in values.items() if draw(st.booleans())})

    text = st.sampled_from(("a", "b-1"))
    span = st.integers(300, 900).map(lambda seconds: timedelta(seconds=seconds))
    names = st.lists(text, max_size=2).map(tuple)
    gpus = st.builds(Gpus, count=st.sampled_from((0.25, 1, 4)), type=st.none() | text)
    array = st.builds(
        Array,
        seeds=st.integers(1, 3),
        offset=st.integers(0, 5),
        max_parallel=st.none() | st.integers(1, 3),
        on_task_failure=st.sampled_from(OnTaskFailure),
    )
    return JobSpec(
        command=("true",),
        **{
            name: draw(value)
            for name, value in {
                "name": text,
                "image": text,
                "account": text,
                "env": st.dictionaries(st.sampled_from(("A", "B")), text, max_size=2),
                "code": st.just(some(Code, exclude=names, writable=st.booleans(), mode=st.sampled_from(CodeMode))),
                "environment": st.just(
                    some(JobEnvironment, name=text, extras=names, build_on=st.sampled_from(BuildOn))
                ),
                "resources": st.just(
                    some(JobResources, gpus=gpus, cpus=st.integers(1, 9), memory=st.just(Range(2**30)))
                ),
                "placement": st.just(some(Placement, on=names, nodes=names, selector=st.just({"a": "b"}))),
                "retry": st.just(some(Retry, failure=st.integers(0, 3), on_exit=st.just({"3": OnExit.FAIL}))),
                "outputs": st.just(some(Outputs, dir=text)),
                "checkpoint": st.just(some(Checkpoint, dir=text, signal=st.sampled_from(CheckpointSignal))),
                "array": array,
                "nodes": st.integers(1, 3),
                "time_limit": span,
                "idle_timeout": span,
                "priority": st.sampled_from(Priority),
                "after": names.map(lambda each: tuple(f"j-{name}" for name in each)),
            }.items()
            if draw(st.booleans())
        },
    )


@given(spec=specs())
def test_every_field_that_a_spec_sets_has_its_answer_from_every_launcher(spec: JobSpec) -> None:
    for kind in list_kinds():
        assert set(read_fidelity(spec, get_launcher(kind))) == set(set_fields(spec)) - {
            "placement.on",
            "checkpoint",
            "array",
            "retry",
        }
