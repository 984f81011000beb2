"""The pages about jobs document everything that exists, and nothing else."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from runtime.end_reasons import EndReason
from runtime.jobs.spec import parse_spec
from runtime.jobs.spec_fields import leaf_fields
from runtime.jobs.spec_file import load_yaml
from runtime.launchers.processes.base import ProcessSettings
from runtime.shim.common import AGAIN, DONE, DUPLICATE, FAILED, LOST, NEVER, REFUSED
from tests.commands_support import find_command_lines, find_problem

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ["jobs.md", "targets.md", "shim.md"]


def read(name: str) -> str:
    return (DOCS / name).read_text()


def first_cells(text: str, heading: str) -> list[str]:
    """Return the names in backticks in the first column of the table below that heading."""
    table = text.split(f"\n| {heading} |", 1)[1].split("\n\n", 1)[0]
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def test_jobs_page_has_every_field_and_no_other() -> None:
    assert sorted(first_cells(read("jobs.md"), "field")) == sorted(leaf_fields())


def test_jobs_page_has_every_end_reason_and_no_other() -> None:
    assert sorted(first_cells(read("jobs.md"), "reason")) == sorted(EndReason)


def test_field_that_is_missing_is_noticed() -> None:
    text = re.sub(r"\n\| `account` .*", "", read("jobs.md"))

    assert sorted(first_cells(text, "field")) != sorted(leaf_fields())


def test_job_file_of_the_page_is_one() -> None:
    [text] = re.findall(r"```yaml\n(.*?)```", read("jobs.md"), re.DOTALL)

    assert parse_spec(load_yaml(text)).name == "train-7b"


def test_targets_page_has_every_setting_of_a_local_target() -> None:
    local = read("targets.md").split("## local", 1)[1]

    assert sorted(first_cells(local, "key")) == sorted(each.name for each in fields(ProcessSettings))


def test_shim_page_has_every_exit_code() -> None:
    codes = re.findall(r"^\| (\d+) \|", read("shim.md").split("## Exit codes", 1)[1], re.MULTILINE)

    assert [int(code) for code in codes] == [
        DONE,
        FAILED,
        REFUSED,
        DUPLICATE,
        AGAIN,
        NEVER,
        LOST,
    ]


@pytest.mark.parametrize("page", PAGES)
def test_command_lines_of_the_pages_exist(page: str) -> None:
    problems = [find_problem(words) for words in find_command_lines(read(page))]

    assert [problem for problem in problems if problem] == []


@pytest.mark.parametrize("page", PAGES)
def test_links_of_the_pages_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", read(page))

    assert [link for link in links if not (DOCS / link).exists()] == []
