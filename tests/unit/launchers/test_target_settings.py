"""Settings of targets: the sentence for each kind of wrong value, and jobs that stay within reach of a wrong one."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from runtime.config import Project, Settings
from runtime.errors import InvalidValue, RequestRefused, UnknownName
from runtime.jobs.plan import PlanContext, Target
from runtime.launchers.kubernetes.settings import read_place
from runtime.launchers.registry import get_launcher

HOST = "a host as `ssh` knows it, such as me@gpu1"


@pytest.fixture
def context(tmp_path: Path) -> PlanContext:
    settings = Settings(project=Project(root=tmp_path), data_dir=tmp_path, cache_dir=tmp_path, config_dir=tmp_path)
    return PlanContext(
        settings=settings, now=datetime(2026, 1, 2, tzinfo=UTC), base=tmp_path, environ={}, records="/records"
    )


@pytest.mark.parametrize(
    ("kind", "settings", "sentence"),
    [
        ("ssh", {}, f"`None` is no valid targets.t.host; allowed: {HOST}"),
        ("ssh", {"host": 3}, f"`3` is no valid targets.t.host; allowed: {HOST}"),
        ("ssh", {"host": ""}, f"`` is no valid targets.t.host; allowed: {HOST}"),
        ("ssh", {"host": "-oX"}, f"`-oX` is no valid targets.t.host; allowed: {HOST}"),
        (
            "ssh",
            {"host": "a", "options": "-v"},
            '`-v` is no valid targets.t.options; allowed: words for ssh, such as ["-p", "2222"]',
        ),
        (
            "local",
            {"gpus": ""},
            '`` is no valid targets.t.gpus; allowed: how many there are, or their names, such as ["0", "2"]',
        ),
        ("local", {"python": None}, "`None` is no valid targets.t.python; allowed: text"),
        ("kubernetes", {"gpus": 4}, "`4` is no valid targets.t.gpus; allowed: a table"),
        ("kubernetes", {"gpus": {"n": 0}}, "`0` is no valid targets.t.gpus.n; allowed: how many GPUs the node has"),
        ("kubernetes", {"run_as_user": ""}, "`` is no valid targets.t.run_as_user; allowed: the number of a user"),
    ],
)
def test_wrong_setting_is_refused_with_the_values_that_are_allowed(
    kind: str, settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidValue) as refused:
        get_launcher(kind).check_settings(Target(name="t", kind=kind, settings=settings))

    assert f"{refused.value.message}; {'; '.join(refused.value.facts)}" == sentence


def test_misspelt_setting_is_named_before_the_one_that_it_leaves_open() -> None:
    with pytest.raises(UnknownName) as unknown:
        get_launcher("ssh").check_settings(Target(name="t", kind="ssh", settings={"hots": "gpu1"}))

    assert "did you mean `host`" in (unknown.value.hint or "")


def test_wrong_setting_hides_no_job_of_a_target(context: PlanContext) -> None:
    ssh = Target(name="t", kind="ssh", settings={"host": "gpu1", "newer_setting": 1})
    pods = Target(
        name="p", kind="kubernetes", records="claim://a/b", settings={"namespace": "lab", "newer": 1, "python": 5}
    )

    for target in (ssh, pods):
        with pytest.raises(RequestRefused):
            get_launcher(target.kind).check_settings(target)
    host = get_launcher("ssh").open_host(ssh, context)
    host.close()
    assert host.name == "gpu1"
    assert read_place(pods, context).namespace == "lab"
