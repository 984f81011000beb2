"""What every launcher promises, run on ours and on one of another package."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.errors import MissingExtra, UnknownName
from runtime.jobs import leaf_fields
from runtime.launchers.base import Fidelity, Keeping
from runtime.launchers.conformance import LauncherCase, LauncherSuite, check_keeps, check_plan
from runtime.launchers.registry import get_launcher, list_kinds
from runtime.launching import JobHandle
from tests.shim_support import processes_with
from tests.ssh_support import SshServer

TOY = Path(__file__).parents[1] / "toy_launcher"


def kill_job(job: JobHandle) -> None:
    """The shim and all that it started die at once, as when a machine goes; the processes of one machine."""
    for pid in processes_with(job.id):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


@pytest.fixture(autouse=True)
def _nothing_left_behind(tmp_path: Path) -> Iterator[None]:
    yield
    for pid in processes_with(str(tmp_path)):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
class TestLocal(LauncherSuite):
    @pytest.fixture
    def case(self, tmp_path: Path) -> LauncherCase:
        return LauncherCase(kind="local", records=str(tmp_path / "records"), break_job=kill_job)


@pytest.mark.slow
class TestToy(LauncherSuite):
    @pytest.fixture
    def case(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LauncherCase:
        monkeypatch.syspath_prepend(str(TOY))
        return LauncherCase(
            kind="toy",
            settings={"python": sys.executable},
            records=str(tmp_path / "records"),
            environ={"PYTHONPATH": str(TOY)},
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
        )


@pytest.mark.parametrize("kind", list_kinds())
def test_every_field_of_a_spec_is_in_exactly_one_class_of_every_launcher(kind: str) -> None:
    try:
        launcher = get_launcher(kind)
    except MissingExtra as missing:
        pytest.skip(missing.message)

    assert check_keeps(launcher.keeps) == []


def test_check_of_a_table_finds_what_is_missing_unknown_or_unexplained() -> None:
    fine = dict.fromkeys(leaf_fields(), Keeping(fidelity=Fidelity.SHIM, how="the shim"))
    broken = {name: keeping for name, keeping in fine.items() if name != "nodes"} | {
        "node": fine["name"],
        "name": Keeping(fidelity=Fidelity.NATIVE, how=" "),
        "env": Keeping(fidelity="sometimes", how="x"),  # type: ignore[arg-type]
    }

    assert check_keeps(fine) == []
    assert check_keeps(broken) == [
        "`nodes` is not in the table",
        "`node` is no field of a spec",
        "`name` does not say how it is kept, or why not",
        "`env` has the class 'sometimes'",
    ]


def test_check_of_a_plan_finds_what_is_wrong(tmp_path: Path) -> None:
    from runtime.launchers.conformance import Bench

    plan = Bench(LauncherCase(kind="local", records=str(tmp_path / "r")), tmp_path / "b").plan("true", name="one")
    part = plan.parts[0]
    broken = replace(
        plan,
        order={**{name: value for name, value in plan.order.items() if name != "retries"}, "odd": {1}},
        parts=(part, replace(part, artefact="none", offset=1)),
        fidelity={"shell": Keeping(fidelity=Fidelity.REFUSED, how="no")},
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
