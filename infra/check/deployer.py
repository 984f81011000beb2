"""Whether the pipeline that deploys a stack may make all that the stack grants."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from infra.check.recording import Recording, Registration, is_grant
from infra.policy.base import (
    ACCOUNT,
    ACCOUNT_GRANT,
    BUCKET_GRANT,
    CUSTOM_ROLE,
    KEY_GRANT,
    PROJECT_GRANT,
    REPOSITORY_GRANT,
    SECRET_GRANT,
    SUBSCRIPTION_GRANT,
    TOPIC_GRANT,
    get,
    items_of,
)
from infra.settings.model import CiSettings, StackSettings
from infra.settings.rules import DEPLOYED_PARTS

NEEDED: Final = {
    ACCOUNT_GRANT: "roles/iam.serviceAccountAdmin",
    BUCKET_GRANT: "storage.buckets.setIamPolicy",
    KEY_GRANT: "cloudkms.cryptoKeys.setIamPolicy",
    REPOSITORY_GRANT: "artifactregistry.repositories.setIamPolicy",
    SECRET_GRANT: "secretmanager.secrets.setIamPolicy",
    SUBSCRIPTION_GRANT: "pubsub.subscriptions.setIamPolicy",
    TOPIC_GRANT: "pubsub.topics.setIamPolicy",
}
"""Type of grant → the permission, or the role, that making it needs."""


def makes_account(recording: Recording, email: str) -> bool:
    return any(each.outputs.get("email") == email for each in recording.of_type(ACCOUNT))


def find_missing_rights(
    stack: Recording, settings: StackSettings, pipeline: Recording, ci: CiSettings
) -> Iterator[tuple[str, str, str]]:
    """Yield where, what and the way out, for what the deployer that `pipeline` makes may not do in `stack`."""
    who = f"`{settings.deployer}`"
    for part in DEPLOYED_PARTS:
        if getattr(settings, part) and part not in ci.deploys:
            yield part, f"is set, and {who} may not deploy it", "add it to `ci.deploys` of the pipeline's stack"
    budget = settings.alerts.budget if settings.alerts is not None else None
    if budget is not None and budget.billing_account != ci.billing_account:
        message = f"is in `{budget.billing_account}`, where {who} may make none"
        yield "alerts.budget", message, "set `ci.billing_account` of the pipeline's stack to it"
    member = f"serviceAccount:{settings.deployer}"
    own = [
        each
        for each in pipeline.of_type(PROJECT_GRANT)
        if (each.inputs.get("member"), each.inputs.get("project")) == (member, settings.project)
    ]
    held = {str(each.inputs.get("role")) for each in own} | set(_permissions(pipeline, own))
    grantable = {role for each in own for role in _grantable(each)}
    for each in stack.resources:
        role = str(each.inputs.get("role"))
        if each.type == PROJECT_GRANT and role not in grantable:
            yield each.name, f"grants `{role}` in the project, which {who} may not grant", _WAY_OUT
        elif is_grant(each.type) and each.type != PROJECT_GRANT and (needed := NEEDED.get(each.type)) not in held:
            yield each.name, f"is a grant for which {who} lacks `{needed}`", _WAY_OUT


_WAY_OUT: Final = "make this grant in the stack with `ci`, which a person brings up"


def _permissions(pipeline: Recording, grants: list[Registration]) -> Iterator[str]:
    named = {str(each.inputs.get("role")).rpartition("/")[2] for each in grants}
    for each in pipeline.of_type(CUSTOM_ROLE):
        if each.inputs.get("roleId") in named:
            yield from map(str, items_of(each.inputs.get("permissions")))


def _grantable(grant: Registration) -> list[str]:
    """Return the roles that a condition lets the holder of `grant` give to others."""
    return re.findall(r"'((?:roles|projects)/[^']+)'", str(get(grant.inputs.get("condition"), "expression")))
