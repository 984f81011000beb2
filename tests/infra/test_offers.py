"""What `check` notes about names that the facts lack, and about heads that are small for their nodes."""

from __future__ import annotations

from typing import Any

import pytest

from infra.check.check import check_stack
from tests.infra.conftest import Project


def notes_of(
    project: Project, *, region: str | None = None, head: Any = None, pool: Any = None, records: Any = None
) -> list[str]:
    def change(config: dict[str, Any]) -> None:
        if region is not None:
            config["registries"]["images"]["regions"] = ["us-west4", region]
        config.update({"records": records} if records else {})
        main = config["heads"]["main"]
        main["image"] = main["image"].replace("0" * 64, "a" * 64)
        main.update(head or {})
        main["pools"]["v5e"].update({"min": 0, **(pool or {})})

    project.copy("marin-us-west4", change, to="a")
    report = check_stack("a", folder=project.folder)
    assert report.findings == ()
    return list(report.notes)


def test_stack_of_known_names_has_no_note(project: Project) -> None:
    assert notes_of(project, region="us-east1") == []


@pytest.mark.parametrize(
    ("asked", "note"),
    [
        (
            {"region": "us-west9"},
            "`registries.images.regions[1]` is us-west9, which is not known here as of 2026-11-21, did you mean `us-west4`?",
        ),
        ({"records": {"location": "US-WEST9"}}, "`records.location` is us-west9, which is not known here"),
        (
            {"head": {"machine_type": "q9-standard-8"}},
            "head `main` is q9-standard-8: its series q9 is not known here as of 2026-11-21",
        ),
        (
            {"pool": {"accelerator": "v9x-8", "cpus": 8}},
            "pool `main.v5e` is of v9x-8, whose family is not known here as of 2026-11-29",
        ),
        (
            {"pool": {"accelerator": "v5litepod-2", "cpus": 8}},
            "pool `main.v5e` is of v5litepod-2, whose size is not known here as of 2026-11-29",
        ),
        (
            {"pool": {"accelerator": "v4-8", "runtime_version": "tpu-ubuntu2204-base"}},
            "pool `main.v5e`: us-west4-a is not among the zones of v4 that are known here as of 2026-11-29, us-central2-b",
        ),
        (
            {"head": {"machine_type": "e2-standard-2"}},
            "head `main` has 8 GiB of memory for up to 1,024 hosts: it may run out of it",
        ),
    ],
)  # fmt: skip
def test_what_google_alone_can_say_is_noted_and_stops_nothing(
    project: Project, asked: dict[str, Any], note: str
) -> None:
    assert any(each.startswith(note) for each in notes_of(project, **asked))


def test_small_head_of_few_nodes_has_no_note(project: Project) -> None:
    assert notes_of(project, head={"machine_type": "e2-standard-2"}, pool={"max": 64}) == []


def test_pool_of_tpu7x_is_accepted_with_the_reason_why_it_gets_no_nodes(project: Project) -> None:
    notes = notes_of(project, pool={"accelerator": "tpu7x-8", "runtime_version": "v2-alpha-tpu7x"})

    assert any(note.startswith("pool `main.v5e` gets no nodes: Google says") for note in notes)
