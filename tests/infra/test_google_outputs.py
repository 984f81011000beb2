"""Google's outputs, as far as they can be predicted."""

from __future__ import annotations

import re
from typing import Any

import pytest

from infra.check.recording import UNKNOWN, Recording
from infra.gcp.outputs import PATTERNS, compute
from tests.fakes.google import methods_of
from tests.infra.provider_types import find_args_class

LINK = "https://www.googleapis.com/compute/v1/projects/lab-1234"


@pytest.mark.parametrize(
    ("type_", "inputs", "expected"),
    [
        ("gcp:pubsub/topic:Topic", {"name": "t", "project": "lab-1234"}, {"id": "projects/lab-1234/topics/t"}),
        (
            "gcp:pubsub/subscription:Subscription",
            {"name": "s", "project": "lab-1234"},
            {"id": "projects/lab-1234/subscriptions/s"},
        ),
        (
            "gcp:serviceaccount/account:Account",
            {"accountId": "worker", "project": "lab-1234"},
            {
                "id": "projects/lab-1234/serviceAccounts/worker@lab-1234.iam.gserviceaccount.com",
                "name": "projects/lab-1234/serviceAccounts/worker@lab-1234.iam.gserviceaccount.com",
                "email": "worker@lab-1234.iam.gserviceaccount.com",
                "member": "serviceAccount:worker@lab-1234.iam.gserviceaccount.com",
            },
        ),
        (
            "gcp:projects/serviceIdentity:ServiceIdentity",
            {"service": "pubsub.googleapis.com", "project": "lab-1234"},
            {"id": "projects/lab-1234/services/pubsub.googleapis.com", "email": UNKNOWN, "member": UNKNOWN},
        ),
        (
            "gcp:secretmanager/secret:Secret",
            {"secretId": "hf", "project": "lab-1234"},
            {"id": "projects/lab-1234/secrets/hf", "name": UNKNOWN},
        ),
        (
            "gcp:compute/network:Network",
            {"name": "n", "project": "lab-1234"},
            {
                "id": "projects/lab-1234/global/networks/n",
                "selfLink": f"{LINK}/global/networks/n",
            },
        ),
        (
            "gcp:projects/iAMCustomRole:IAMCustomRole",
            {"roleId": "head", "project": "lab-1234"},
            {"id": "projects/lab-1234/roles/head", "name": "projects/lab-1234/roles/head"},
        ),
        (
            "gcp:iam/workloadIdentityPool:WorkloadIdentityPool",
            {"workloadIdentityPoolId": "ci-1", "project": "lab-1234"},
            {
                "id": "projects/lab-1234/locations/global/workloadIdentityPools/ci-1",
                "name": UNKNOWN,
            },
        ),
        ("gcp:unheard/of:Thing", {"name": "x"}, {}),
        ("kubernetes:core/v1:Namespace", {"metadata": {"name": "l2r"}}, {"id": "l2r"}),
        ("kubernetes:core/v1:Secret", {"metadata": {"name": "a", "namespace": "b"}}, {"id": "b/a"}),
        ("kubernetes:core/v1:Secret", {"metadata": {"name": "a", "namespace": UNKNOWN}}, {"id": UNKNOWN}),
        ("kubernetes:core/v1:Secret", {"metadata": {"generateName": "a-"}}, {"id": UNKNOWN}),
    ],
)
def test_compute_of_known_inputs_is_what_google_answers(
    type_: str, inputs: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert compute(type_, "logical", inputs) == expected


@pytest.mark.parametrize("type_", sorted(PATTERNS))
def test_compute_of_unknown_inputs_has_no_half_made_id(type_: str) -> None:
    """Known-bad input: an unknown name must not become text in an id."""
    inputs = dict.fromkeys(["project", "name", "accountId", "secretId", "roleId", "repositoryId"], UNKNOWN)
    assert all(
        "known after up" not in str(each) for each in compute(type_, "x", inputs).values() if each is not UNKNOWN
    )
    assert compute(type_, "x", inputs)["id"] is UNKNOWN


@pytest.mark.parametrize("type_", sorted(PATTERNS))
def test_patterns_name_types_that_the_wheels_have(type_: str) -> None:
    assert find_args_class(type_)


@pytest.mark.parametrize(
    "type_", sorted(type_ for type_, outputs in PATTERNS.items() if str(outputs["id"]).startswith("projects/"))
)
def test_id_is_the_path_of_the_resource_in_googles_own_description(type_: str) -> None:
    fields = re.findall(r"\{(\w+)\}", str(PATTERNS[type_]["id"]))
    id_ = compute(type_, "x", dict.fromkeys(fields, "x-1"))["id"]
    hosts = ("artifactregistry", "compute", "iam", "pubsub", "secretmanager", "serviceusage")
    reads = [each for host in hosts for each in methods_of(f"{host}.googleapis.com") if each.id.endswith(".get")]

    assert any(each.pattern.fullmatch(f"{root}{id_}") for each in reads for root in ("v1/", "compute/v1/"))


def test_compute_grants_in_two_regions_have_two_ids() -> None:
    grants = [
        {"project": "p", "location": region, "repository": "images", "role": "roles/r", "member": "user:a@b.c"}
        for region in ("us-west4", "europe-west4")
    ]
    type_ = "gcp:artifactregistry/repositoryIamMember:RepositoryIamMember"
    assert [compute(type_, "g", each)["id"] for each in grants] == [
        "p/us-west4/images/roles/r/user:a@b.c",
        "p/europe-west4/images/roles/r/user:a@b.c",
    ]


def test_compute_instance_address_is_not_known() -> None:
    inputs = {"name": "vm", "zone": "z-1-a", "project": "lab-1234", "networkInterfaces": [{"subnetwork": "s"}]}
    outputs = compute("gcp:compute/instance:Instance", "vm", inputs)
    assert outputs["networkInterfaces"] == [{"networkIp": UNKNOWN, "name": UNKNOWN, "subnetwork": "s"}]


def test_compute_knows_every_google_type_of_the_stack(recording: Recording) -> None:
    types = {each.type for each in recording.resources if each.type.startswith("gcp:")}
    grants = {each for each in types if each.endswith(("IAMMember", "IamMember"))}
    assert types - grants <= set(PATTERNS)
