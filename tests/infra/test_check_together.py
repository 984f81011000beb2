"""What `check` says about money, and about the address ranges of several stacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from infra.check.check import check_stack, find_collisions, find_shared_notes
from infra.cli import main
from tests.infra.conftest import Project

API = "https://www.googleapis.com/compute/v1/"
SUBNET = "projects/lab-host/regions/us-west4/subnetworks"
NETWORK = "projects/lab-host/global/networks/lab"
EAST = "hai-gcp-models-east-records"
OTHER_LAB: dict[str, Any] = {
    "buckets": {},
    "project": "another-lab-1",
    "network": {"cidr": "10.64.0.0/20"},
    "registries": {},
    "secrets": {},
    "heads": {},
}


def write(project: Project, stack: str, *, network: Mapping[str, Any], max_nodes: int = 8, **more: Any) -> None:
    def change(config: dict[str, Any]) -> None:
        config.update(network=dict(network), **more)
        config["heads"]["main"]["pools"]["v5e"].update(min=0, max=max_nodes)

    project.copy("marin-us-west4", change, to=stack)


def together(project: Project, *stacks: str) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the findings about stacks together, and the notes on their ranges."""
    reports = [check_stack(each, folder=project.folder) for each in stacks]
    assert [each.findings for each in reports] == [()] * len(stacks)
    notes = [note for note in find_shared_notes(reports) if "range" in note or "room" in note]
    return [(each.where, each.message) for each in find_collisions(reports) if each.rule == "ranges-apart"], notes


def test_ranges_of_two_networks_in_a_project_that_overlap_are_noted(project: Project) -> None:
    write(project, "a", network={"cidr": "10.64.0.0/20"})
    write(project, "b", network={"cidr": "10.64.8.0/21"})
    assert together(project, "a", "b") == (
        [],
        [
            (
                "a and b have the overlapping ranges 10.64.0.0/20 and 10.64.8.0/21: each works in its own network, and the two"
                " networks can never be peered; a range cannot change once machines run in it"
            )
        ],
    )


def test_ranges_of_two_projects_that_overlap_are_silent(project: Project) -> None:
    write(project, "a", network={"cidr": "10.64.0.0/20"})
    project.copy("marin-us-west4", lambda config: config.update(OTHER_LAB), to="b")
    assert together(project, "a", "b") == ([], [])


def test_ranges_apart_are_silent(project: Project) -> None:
    write(project, "a", network={"cidr": "10.64.0.0/20"})
    write(project, "b", network={"cidr": "10.64.16.0/20"})
    assert together(project, "a", "b") == ([], [])


@pytest.mark.parametrize("api", ["", API])
def test_ranges_of_two_subnets_in_one_network_that_overlap_are_wrong(project: Project, api: str) -> None:
    write(project, "a", network={"cidr": "10.64.0.0/20", "subnet": f"{SUBNET}/a", "network": API + NETWORK})
    write(project, "b", network={"cidr": "10.64.0.0/21", "subnet": f"{api}{SUBNET}/b", "network": API + NETWORK})
    found, notes = together(project, "a", "b")
    assert found == [
        ("a and b", f"have the overlapping ranges 10.64.0.0/20 and 10.64.0.0/21 in two subnets of `{NETWORK}`")
    ]
    assert notes == []


def test_one_subnet_with_two_ranges_is_wrong_and_stops_check(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    write(project, "a", network={"cidr": "10.64.0.0/20", "subnet": f"{SUBNET}/a", "network": API + NETWORK})
    write(project, "b", network={"cidr": "10.65.0.0/20", "subnet": f"{SUBNET}/a", "network": API + NETWORK})
    found, _ = together(project, "a", "b")
    assert found == [("a and b", f"name the subnet `{SUBNET}/a` with two ranges, 10.64.0.0/20 and 10.65.0.0/20")]
    assert main(["check", "--all", "--folder", str(project.folder)]) == 2
    assert "ranges-apart: `a and b` name the subnet" in capsys.readouterr().err


def test_one_subnet_for_more_machines_than_it_has_room_for_is_noted(project: Project) -> None:
    for stack in ("a", "b", "c"):
        network = {"cidr": "10.64.0.0/21", "subnet": f"{SUBNET}/a", "network": API + NETWORK}
        write(project, stack, network=network, max_nodes=1000)
    found, notes = together(project, "a", "b", "c")
    assert (found, together(project, "a", "b")) == ([], ([], []))
    assert notes == [
        f"a, b, c share the subnet `{SUBNET}/a` with room for 2,044 machines, and their pools' maxima with the heads are 3,003"
    ]


def test_notes_on_ranges_do_not_fail_check(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    write(project, "a", network={"cidr": "10.64.0.0/20"})
    write(project, "b", network={"cidr": "10.64.0.0/20"})
    code = main(["check", "--all", "--folder", str(project.folder)])
    out = capsys.readouterr().out
    assert (code, "note: a and b have the overlapping ranges 10.64.0.0/20 and 10.64.0.0/20" in out) == (0, True)


# buckets that others trust


@pytest.mark.parametrize(
    ("change", "where", "says"),
    [
        ({"buckets": {"d": {"existing": "lab-state", "readers": ["clusters"]}}}, "west: buckets.d", "Pulumi's state"),
        ({"buckets": {"d": {"bucket": "lab-state", "writers": ["clusters"]}}}, "west: buckets.d", "Pulumi's state"),
        ({"records": {"bucket": "lab-state"}}, "west: records", "Pulumi's state"),
        (
            {"buckets": {"d": {"existing": EAST, "writers": ["clusters"]}}},
            "west: buckets.d",
            "the task records of east",
        ),
        ({"buckets": {"d": {"existing": EAST, "readers": ["clusters"]}}}, None, ""),
    ],
)
def test_bucket_for_data_is_neither_the_state_nor_another_stacks_records(
    project: Project, change: dict[str, Any], where: str | None, says: str
) -> None:
    project.copy("marin-pipeline", lambda config: config["ci"].update(state_bucket="lab-state"))
    for stack in ("east", "west"):
        parts = {"registries": {}, "secrets": {}, "buckets": {}, **(change if stack == "west" else {})}
        project.copy(
            "marin-us-west4",
            lambda config, parts=parts: (
                config.update(parts)
                or config["heads"]["main"].update(environment=[], image="rayproject/ray@sha256:" + "0" * 64)
            ),
            to=stack,
        )

    reports = [check_stack(each, folder=project.folder) for each in ("marin-pipeline", "east", "west")]

    assert [each.findings for each in reports] == [()] * 3
    found = [(each.where, each.message) for each in find_collisions(reports) if each.rule == "trusted-bucket"]
    assert [name for name, _ in found] == ([where] if where else [])
    assert all(says in message for _, message in found)


# records in another place


@pytest.mark.parametrize(
    ("location", "costs"),
    [("us-central1", True), ("EU", True), ("US", True), ("NAM4", True), ("us-west4", False), ("US-WEST4", False), (None, False)],
)  # fmt: skip
def test_records_in_another_place_than_the_nodes_are_noted(project: Project, location: str | None, costs: bool) -> None:
    records = {"location": location} if location else {"soft_delete_days": 7}
    write(project, "a", network={"cidr": "10.64.0.0/20"}, records=records)
    notes = [note for note in check_stack("a", folder=project.folder).notes if "records" in note]
    said = f"`records` is in {location} and the heads with their nodes in us-west4: traffic between them costs money"
    assert [note.partition(",")[0] for note in notes] == ([said] if costs else [])


def test_records_of_a_stack_without_heads_are_silent_wherever_they_are(project: Project) -> None:
    project.copy("dev", lambda config: config["records"].update(location="EU"))
    assert check_stack("dev", folder=project.folder).notes == ()


# nodes at all times


def pool(project: Project, **pool: Any) -> tuple[list[str], list[tuple[str, float | None]], float | None]:
    def change(config: dict[str, Any]) -> None:
        config["heads"]["main"]["pools"]["v5e"].update(pool)
        config["heads"]["main"]["image"] = config["heads"]["main"]["image"].replace("0" * 64, "a" * 64)

    project.copy("marin-us-west4", change, to="a")
    report = check_stack("a", folder=project.folder)
    assert report.findings == ()
    costs = [(each.basis, each.monthly_usd) for each in report.costs if "pool" in each.basis]
    return list(report.notes), costs, sum(each.monthly_usd or 0 for each in report.costs)


def test_minimum_of_a_thousand_nodes_on_demand_is_priced_and_noted(project: Project) -> None:
    notes, costs, total = pool(project, min=1024, max=1024, capacity="on_demand")
    assert notes == [
        "pool `main.v5e` keeps 1,024 nodes v5litepod-1 at all times: 897,024.00 USD a month, prices of 2025",
    ]
    assert costs == [
        ("by use: pool v5e, 1,024 to 1,024 nodes v5litepod-1, on_demand", None),
        ("pool v5e, 1,024 nodes at all times, 730 h, us-west4, prices of 2025", 897_024.0),
    ]
    assert total == pytest.approx(897_024.0 + 342.41)


def test_minimum_of_preemptible_nodes_is_bounded_by_their_price_on_demand(project: Project) -> None:
    notes, costs, total = pool(project, min=100, capacity="preemptible")
    assert notes == [
        "pool `main.v5e` keeps 100 nodes v5litepod-1 at all times: a part of the 87,600.00 USD a month on demand, prices of 2025",
    ]
    assert costs[1] == (
        "by use: pool v5e, 100 nodes at all times for a part of the 87,600.00 on demand, us-west4, prices of 2025",
        None,
    )
    assert total == pytest.approx(342.41)


def test_buffer_is_priced_as_nodes_at_all_times_and_said_to_stay_beside_the_busy_ones(project: Project) -> None:
    notes, costs, _ = pool(project, min=4, max=1024, buffer=100, capacity="on_demand")
    kept = "100 nodes v5litepod-1 at all times, and 100 idle beside those that work"
    assert notes == [f"pool `main.v5e` keeps {kept}: 87,600.00 USD a month, prices of 2025"]
    assert costs == [
        ("by use: pool v5e, 4 to 1,024 nodes v5litepod-1, on_demand, 100 of them idle beside the busy ones", None),
        ("pool v5e, 100 nodes at all times, 730 h, us-west4, prices of 2025", 87_600.0),
    ]


@pytest.mark.parametrize("least", [0, 4])
def test_minimum_that_costs_little_is_not_noted(project: Project, least: int) -> None:
    notes, costs, _ = pool(project, min=least)
    assert (notes, len(costs)) == ([], 2 if least else 1)


def test_minima_that_are_much_only_together_are_noted_with_their_sum(project: Project) -> None:
    def change(config: dict[str, Any]) -> None:
        pools = config["heads"]["main"]["pools"]
        pools["v5e"].update(min=8, capacity="on_demand")
        pools["other"] = {**pools["v5e"], "min": 6, "capacity": "spot"}

    project.copy("marin-us-west4", change, to="a")
    notes = [note for note in check_stack("a", folder=project.folder).notes if "image" not in note]
    assert notes == [
        "pool `main.v5e` keeps 8 nodes v5litepod-1 at all times: 7,008.00 USD a month, prices of 2025",
        "pool `main.other` keeps 6 nodes v5litepod-1 at all times: a part of the 5,256.00 USD a month on demand, prices of 2025",
        "the pools' minima together: 12,264.00 USD a month at prices on demand",
    ]


def test_minimum_is_priced_by_chips_also_for_a_type_that_counts_cores(project: Project) -> None:
    v4 = {"accelerator": "v4-8", "runtime_version": "tpu-ubuntu2204-base"}
    _, costs, _ = pool(project, **v4, min=1, capacity="on_demand")
    assert costs[1][1] == pytest.approx(4 * 3.22 * 730, abs=0.01)


def test_minimum_without_a_known_price_says_so(project: Project) -> None:
    notes, costs, _ = pool(project, accelerator="v9x-8", runtime_version="tpu-x", cpus=8, min=1)
    assert costs[1] == ("pool v5e, 1 nodes at all times, 730 h, us-west4: no price known", None)
    assert notes[-1] == "pool `main.v5e` keeps 1 nodes v9x-8 at all times: their price is not known here"
