"""Graphs that open a stack to nobody, and the same graphs with a stranger in the place of a value of the stack."""

from __future__ import annotations

from typing import Any

import pulumi
import pulumi_gcp as gcp
import pytest

from infra.policy.base import PIPELINE
from infra.policy.grants import HEAD
from infra.policy.rules import apply_rules
from tests.infra.test_policy_bad_graphs import (
    BOUNDS,
    CONDITION,
    FEDERATED,
    LAB_GROUP,
    POOL,
    USER,
    account,
    account_grant,
    binding,
    bucket_grant,
    contract,
    federation,
    firewall,
    instance,
    known_later,
)
from tests.infra.test_policy_rules import NEW, THERE, Component, Lab, Program, queue, run

IAM = "api.getAttribute('iam.googleapis.com/modifiedGrantsByRole', [])"


def disguised_role(lab: Lab) -> None:
    lab.project_grant(lab.custom_role("tpu.nodes.list").name.apply(lambda _: "roles/owner"))


def disguised_account(lab: Lab) -> None:
    stranger = "projects/my-lab/serviceAccounts/1234567-compute@developer.gserviceaccount.com"
    gcp.serviceaccount.IAMMember(
        "lab-grant",
        service_account_id=account(lab).name.apply(lambda _: stranger),
        role=USER,
        member="group:lab@example.com",
        opts=lab.opts(),
    )


def decrypter(*, disguised: bool) -> Program:
    """Google's agent may decrypt with the key, or everybody in its place."""

    def program(lab: Lab) -> None:
        agent = gcp.projects.ServiceIdentity("lab-agent", service="pubsub.googleapis.com", opts=lab.opts())
        gcp.kms.CryptoKeyIAMMember(
            "lab-grant",
            crypto_key_id="k",
            role="roles/cloudkms.cryptoKeyEncrypterDecrypter",
            member=agent.member.apply(lambda member: "allUsers" if disguised else member),
            opts=lab.opts(),
        )

    return program


def federated_account(lab: Lab) -> None:
    pool = gcp.iam.WorkloadIdentityPool("lab-pool", workload_identity_pool_id="lab-ci", opts=lab.opts())
    gcp.serviceaccount.IAMMember(
        "lab-grant",
        service_account_id=account(lab).name,
        role=FEDERATED,
        member=pool.name.apply(lambda _: f"{POOL}/attribute.role/preview"),
        opts=lab.opts(),
    )


def grant_in_a_made_bucket(sign: str, *, to_deployer: bool = False) -> Program:
    def program(lab: Lab) -> None:
        made = gcp.storage.Bucket("lab-records", location="us-west4", opts=lab.opts())
        member: Any = "group:lab@example.com"
        if to_deployer:
            member = account(lab, "deployer").email.apply(lambda email: f"serviceAccount:{email}")
        condition = {"title": "t", "expression": made.name.apply(lambda name: contract(sign, name)["expression"])}
        bucket_grant(member, "roles/storage.objectUser", condition=condition, bucket=made.name)(lab)

    return program


def grant_in_a_bucket_named_by(bucket: Any) -> Program:
    return lambda lab: bucket_grant(
        "group:lab@example.com", "roles/storage.objectUser", condition=contract("!", "b"), bucket=bucket(lab)
    )(lab)


def pipeline_that_grants(expression: str) -> Program:
    """The pipeline grants roles under a condition, and there are custom roles of it and of a head."""

    def program(lab: Lab) -> None:
        lab.custom_role("storage.buckets.get")
        head = Component("head", HEAD, pulumi.ResourceOptions(providers=[lab.google]))
        for name in ("head", "second"):
            gcp.projects.IAMCustomRole(
                f"head-{name}",
                role_id=name,
                title="Head",
                permissions=["tpu.nodes.list"],
                opts=pulumi.ResourceOptions(parent=head),
            )
        condition = {"title": "t", "expression": expression}
        lab.project_grant("roles/resourcemanager.projectIamAdmin", condition=condition)

    return program


GOOD: dict[str, Program] = {
    "federation-to-deploy": federation(),
    "federation-to-preview": federation("preview", CONDITION),
    "federated-by-its-own-pool": federated_account,
    "federated-by-role": account_grant(FEDERATED, f"{POOL}/attribute.role/deploy", pool=True),
    "lab-acts-as-the-head": account_grant(USER, "group:lab@example.com"),
    "head-acts-as-itself": account_grant(USER, None),
    "group-reads": bucket_grant("group:lab@example.com"),
    "group-writes-records": bucket_grant(
        "group:lab@example.com", "roles/storage.objectUser", condition=contract("!", "b")
    ),
    "group-writes-records-of-a-new-bucket": grant_in_a_made_bucket("!"),
    "group-writes-records-of-a-bucket-with-a-later-id": grant_in_a_bucket_named_by(lambda lab: known_later(lab, "b")),
    "group-wrote-records-of-a-bucket-in-the-state": grant_in_a_bucket_named_by(lambda lab: "b/b"),
    "deployer-writes-the-contract": grant_in_a_made_bucket("", to_deployer=True),
    "agents-move-dead-letters": queue,
    "agents-decrypt": decrypter(disguised=False),
    "binding": binding("Role", "r", LAB_GROUP),
    "binding-of-an-account": binding("Role", "r", {"kind": "ServiceAccount", "name": "runner", "namespace": "train"}),
    "proxy-and-inside": firewall(source_ranges=["35.235.240.0/20", "10.64.0.0/20"]),
    "machine": instance(**{"startup-script": "true", "enable-oslogin": "TRUE", "ray-settings": "{}"}),
}
OPENING = {
    "allowed-types",
    "allowed-roles",
    "allowed-members",
    "project-grants",
    "narrow-custom-roles",
    "narrow-cluster-roles",
    "pinned-federation",
    "closed-contract",
    "closed-firewalls",
    "closed-instances",
    "no-secret-values",
    "stack-key",
}
"""Rules against strangers; the small programs here break others, such as the one about labels."""


@pytest.mark.parametrize("day", [NEW, THERE])
@pytest.mark.parametrize("name", GOOD)
def test_graph_that_opens_nothing_is_let_through(name: str, day: str) -> None:
    found = [each for each in apply_rules(run(GOOD[name], day=day).resources, BOUNDS) if each.rule in OPENING]

    assert found == []


@pytest.mark.parametrize(
    ("expected", "program"),
    [
        ("project-grants", disguised_role),
        ("allowed-roles", disguised_account),
        ("stack-key", decrypter(disguised=True)),
    ],
)
def test_value_in_the_place_of_one_of_the_stack_is_refused_once_it_is_known(expected: str, program: Program) -> None:
    found = {each.rule for each in apply_rules(run(program, day=THERE).resources, BOUNDS)}

    assert expected in found


@pytest.mark.parametrize(
    ("expression", "refused"),
    [
        (f"{IAM}.hasOnly(['roles/logging.logWriter'])", False),
        (f"{IAM}.hasOnly(['projects/my-lab/roles/head', 'roles/logging.logWriter'])", False),
        ("true", True),
        (f"{IAM}.hasOnly(['roles/logging.logWriter']) || true", True),
        (f"{IAM}.hasOnly(['roles/logging.logWriter', 'roles/owner'])", True),
        # Roles that people or pipelines alone have, and the pipeline's own custom role.
        (f"{IAM}.hasOnly(['roles/logging.logWriter', 'roles/compute.osAdminLogin'])", True),
        (f"{IAM}.hasOnly(['roles/logging.logWriter', 'roles/iam.serviceAccountAdmin'])", True),
        (f"{IAM}.hasOnly(['roles/logging.logWriter', 'projects/my-lab/roles/lab'])", True),
        (f"{IAM}.hasOnly(['projects/my-lab/roles/stranger'])", True),
    ],
)
def test_pipeline_may_grant_roles_of_machines_only(expression: str, refused: bool) -> None:
    resources = run(pipeline_that_grants(expression), component=PIPELINE).resources

    found = [each.message for each in apply_rules(resources, BOUNDS) if each.rule == "project-grants"]

    role = "roles/resourcemanager.projectIamAdmin"
    assert found == ([f"grants `{role}` without a condition that lists what its holder may grant"] if refused else [])
