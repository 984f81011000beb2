"""Which of Google's refusals are waited for, and for how long."""

from __future__ import annotations

import pytest

from infra.components.late import PATIENCE_VARIABLE, Reason, find_reason, find_wait, patience
from runtime.errors import RequestRefused

API_OFF = (
    "Error 403: Cloud Pub/Sub API has not been used in project 1 before or it is disabled. Reason: SERVICE_DISABLED"
)
FORBIDDEN = "googleapi: Error 403: Permission 'pubsub.topics.create' denied on resource."


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (API_OFF, Reason.UNKNOWN),
        ("Error 400: Service account service-1@gcp-sa-pubsub.iam.gserviceaccount.com does not exist.", Reason.UNKNOWN),
        ("Error 400: Role projects/p/roles/head does not exist in the resource's hierarchy", Reason.UNKNOWN),
        ("Error 400: Identity Pool does not exist (projects/1/…/ci). Please check", Reason.UNKNOWN),
        ("Error retrieving IAM policy: googleapi: Error 404: Unknown service account, notFound", Reason.UNKNOWN),
        ('Error 404: Cannot find metric that matches type = "logging.googleapis.com/user/x".', Reason.UNKNOWN),
        (FORBIDDEN, Reason.REFUSED),
        ("Error 400: Cloud Pub/Sub did not have the necessary permissions configured", Reason.REFUSED),
        ("Error 403: Permission denied on Cloud KMS key. Please ensure that x has been granted", Reason.REFUSED),
        ("Error 403: Quota exceeded for quota metric 'Topics', rateLimitExceeded", None),
        ("Error 403: Quota 'CPUS' exceeded.  Limit: 24.0 in region us-west4., quotaExceeded", None),
        ("Error 400: Service account service-1@gs-project-accounts.iam.gserviceaccount.com does not exist.", None),
        ("Error 403: Cloud Billing Budget API has not been used in project 1 before", Reason.UNKNOWN),
        ("Error 400: The resource 'x' of type 'serviceAccount' was not found., invalid", Reason.UNKNOWN),
        ("Error 403: This API method requires billing to be enabled. Reason: BILLING_DISABLED", None),
        ("Error 403: Request is prohibited by organization's policy. vpcServiceControlsUniqueIdentifier: x", None),
        ("Error 412: Constraint constraints/gcp.resourceLocations violated", None),
        ("Error 409: `t` already exists", None),
        ("Error 404: `subnetwork` names `s`, which was not found", None),
        ("500: backend error", None),
    ],
)
def test_reason_is_known_by_googles_words(error: str, reason: Reason | None) -> None:
    assert find_reason(error) is reason


def waits_until_the_end(error: str, *earlier: str) -> list[float]:
    errors, waits = list(earlier), []
    while True:
        errors.insert(0, error)
        wait = find_wait(errors)
        if wait is None:
            return waits
        waits.append(wait)


def test_waits_grow_and_end() -> None:
    unknown, refused = waits_until_the_end(API_OFF), waits_until_the_end(FORBIDDEN)

    assert (unknown[:6], sum(unknown)) == ([5, 10, 20, 40, 60, 60], 600)
    assert (refused, sum(refused)) == ([5, 10, 20, 40, 45], 120)
    assert waits_until_the_end("500: backend error") == []


def test_api_that_was_late_leaves_a_late_grant_its_own_time() -> None:
    assert sum(waits_until_the_end(FORBIDDEN, *[API_OFF] * 8)) == 120


@pytest.mark.parametrize("text", ["-1", "ten", "1e9", "nan"])
def test_patience_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(PATIENCE_VARIABLE, text)

    with pytest.raises(RequestRefused):
        patience()
