"""The life of a project's pipeline, against a Google that judges each call by the roles of its caller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.engine.google_access import CALLER_VARIABLE
from tests.engine.harness import PACK, Lab
from tests.engine.test_adoption import seed
from tests.engine.test_stacks import MARIN, PIPELINE, change, expect_drift_found, make_as_planned

PROJECT = "hai-gcp-models"
DEPLOYER, PREVIEWER = (f"marin-pipeline-{role}@{PROJECT}.iam.gserviceaccount.com" for role in ("deployer", "previewer"))
BILLING = "000000-AAAAAA-111111"
BUDGET = {"billing_account": BILLING, "monthly": 1000}


@contextmanager
def acting_as(lab: Lab, caller: str) -> Iterator[None]:
    lab.environment[CALLER_VARIABLE] = caller
    yield
    lab.environment[CALLER_VARIABLE] = ""


def bootstrap(lab: Lab) -> None:
    """Bring up the pipeline's stack as the person who owns the project does, after `scripts/bootstrap`."""
    bucket = f"{PROJECT}-pulumi-state"
    seed(lab.cloud, "gcp:storage/bucket:Bucket", bucket, project=PROJECT, name=bucket)
    lab.init(PIPELINE)
    lab.set(PIPELINE, "ci.billing_account", BILLING)
    lab.up(PIPELINE, *PACK)
    lab.run("up", "--yes", "--expect-no-changes", "--stack", PIPELINE, *PACK)


def test_pipeline_deploys_the_stacks_of_its_project_and_never_itself(lab: Lab) -> None:
    bootstrap(lab)
    for stack in MARIN:
        lab.init(stack)
    with acting_as(lab, DEPLOYER):
        # The first stack owns the repositories and secrets that the others refer to.
        for stack in MARIN:
            make_as_planned(lab, stack)
        expect_drift_found(lab, MARIN[0])
        lab.up(MARIN[0], "--refresh", *PACK)
        change(lab, MARIN[0])
        # One changed setting: fewer nodes. Ray's file changes on the machine, and the machine stays.
        lab.set(MARIN[0], "heads.main.pools.v4.max", 512)
        steps = lab.preview(MARIN[0])
        lab.up(MARIN[0])
        # A head and an API that the stack did not have.
        head = lab.setting(MARIN[1], "heads")["main"]
        lab.set(MARIN[1], "heads.second", {**head, "pools": {}})
        lab.set(MARIN[1], "alerts.budget", BUDGET)
        lab.up(MARIN[1], *PACK)
        made = lab.resources(MARIN[1])
        lab.set(PIPELINE, "ci.deploys", ["queues", "records"])
        refused = lab.up(PIPELINE, check=False)
        lab.set(MARIN[2], "protect", False)
        lab.up(MARIN[2], *PACK)
        lab.destroy(MARIN[2])
    with acting_as(lab, PREVIEWER):
        seen = lab.preview(MARIN[0], "--refresh", *PACK)
        lab.set(MARIN[0], "queues.third", {})
        written = lab.up(MARIN[0], check=False)
    after = lab.preview(MARIN[1], "--refresh")

    assert [(step.op, step.name) for step in steps] == [
        ("update", "alerts-us-central2-b-tpus"),
        ("update", "main-head-vm"),
    ]
    assert {path.partition(".")[0] for path in steps[1].paths} == {"metadata"}
    assert {"second-head-vm", "alerts-budget"} <= {urn.rpartition("::")[2] for urn in made}
    assert (refused.code != 0, "Permission 'iam.roles.update' denied" in refused.text) == (True, True)
    assert (seen, written.code != 0) == ([], True)
    assert "Permission 'pubsub.topics.create' denied" in written.text
    assert after == []


@pytest.mark.parametrize(
    ("path", "value", "denied"),
    [
        ("access.project_grants", True, "may not make people's grants on the project"),
        (
            "kms_key",
            f"projects/{PROJECT}/locations/us-west4/keyRings/r/cryptoKeys/k",
            "cloudkms.cryptoKeys.setIamPolicy",
        ),
    ],
)
def test_stack_beyond_the_rights_of_its_deployer_fails(lab: Lab, path: str, value: object, denied: str) -> None:
    bootstrap(lab)
    lab.init(MARIN[0])
    with acting_as(lab, DEPLOYER):
        lab.up(MARIN[0], *PACK)
        lab.init(MARIN[1])
        lab.set(MARIN[1], path, value)
        said = lab.up(MARIN[1], check=False)

    assert (said.code != 0, denied in said.text) == (True, True)
