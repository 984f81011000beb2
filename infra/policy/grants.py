"""The rules about who may do what: the resources that a program may register, its roles, members and federation.

Each rule is a list of what is allowed, so that a type, role, permission or condition that nobody thought of is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from infra import naming
from infra.check.recording import UNKNOWN, Registration, UnknownValue
from infra.policy.base import (
    ACCOUNT,
    ACCOUNT_GRANT,
    ADDRESS,
    AGENT,
    BILLING_GRANT,
    BUCKET,
    BUCKET_GRANT,
    CLUSTER_GRANT,
    CLUSTER_ROLE,
    CUSTOM_ROLE,
    IDENTITY_POOL,
    IDENTITY_PROVIDER,
    KEY_GRANT,
    PIPELINE,
    PROJECT_GRANT,
    REPOSITORY_GRANT,
    SCHEDULE,
    SCHEDULED_DISK,
    SECRET_GRANT,
    SERVICE_IDENTITY,
    SUBSCRIPTION_GRANT,
    TOPIC_GRANT,
    Finding,
    Graph,
    StackBounds,
    get,
    is_own_account,
    items_of,
    may_be,
    namespace_of,
)
from infra.settings.rules import PERSON, PUBLIC_DOMAINS

HEAD: Final = "runtime:ray:RayHead"
DATA: Final = "runtime:bucket:Bucket"
NODE_ROLES: Final = "runtime:ray:NodeRoles"
FEDERATION: Final = "runtime:identity:Federation"
PEOPLE: Final = "runtime:identity:Identity"

TYPES: Final = frozenset(
    {
        *("pulumi:providers:gcp", "pulumi:providers:kubernetes"),
        *("gcp:artifactregistry/repository:Repository", "gcp:billing/budget:Budget", "gcp:compute/firewall:Firewall"),
        *("gcp:compute/instance:Instance", "gcp:compute/network:Network", "gcp:compute/router:Router"),
        *("gcp:compute/routerNat:RouterNat", "gcp:compute/subnetwork:Subnetwork", IDENTITY_POOL, IDENTITY_PROVIDER),
        *("gcp:monitoring/alertPolicy:AlertPolicy", "gcp:monitoring/notificationChannel:NotificationChannel"),
        *(ADDRESS, SCHEDULE, SCHEDULED_DISK),
        *(CUSTOM_ROLE, PROJECT_GRANT, "gcp:projects/service:Service", SERVICE_IDENTITY),
        *("gcp:pubsub/subscription:Subscription", SUBSCRIPTION_GRANT, "gcp:pubsub/topic:Topic", TOPIC_GRANT),
        *("gcp:secretmanager/secret:Secret", SECRET_GRANT, ACCOUNT, ACCOUNT_GRANT, REPOSITORY_GRANT),
        *("gcp:storage/bucket:Bucket", BUCKET_GRANT, KEY_GRANT, BILLING_GRANT),
        *("kubernetes:core/v1:LimitRange", "kubernetes:core/v1:Namespace", "kubernetes:core/v1:PersistentVolumeClaim"),
        *("kubernetes:core/v1:ResourceQuota", "kubernetes:core/v1:ServiceAccount", CLUSTER_ROLE, CLUSTER_GRANT),
        "kubernetes:networking.k8s.io/v1:NetworkPolicy",
    }
)
"""Every resource that a program may register, besides components."""

HINTS: Final[Mapping[str, str]] = {
    r"iam(binding|policy)$|accesscontrol$|acl$": "it would replace or bypass the grants of others: use an IAM member",
    r"key$": "no key is ever made: it leaks, and nobody sees who uses it; grant a role to an identity",
    r"secret(version)?$|configmap$": "`runtime secrets put` takes values; Pulumi would keep them in its state",
}
"""Types that programs are tempted to use → the other way."""

PROJECT_ROLES: Final[Mapping[tuple[str, str], str]] = {
    (HEAD, "roles/logging.logWriter"): "log entries have no resource to grant on",
    (HEAD, "roles/monitoring.metricWriter"): "metrics have no resource to grant on",
    (PEOPLE, "roles/logging.logWriter"): "log entries have no resource to grant on",
    (PEOPLE, "roles/monitoring.metricWriter"): "metrics have no resource to grant on",
    (PEOPLE, "roles/logging.viewer"): "log entries have no resource to grant on",
    (PEOPLE, "roles/monitoring.viewer"): "metrics have no resource to grant on",
    (PEOPLE, "roles/iap.tunnelResourceAccessor"): "nodes are made later, and the way in is the same for all",
    (PEOPLE, "roles/compute.osLogin"): "people log in to heads and to nodes that Ray makes later",
    (PEOPLE, "roles/compute.osAdminLogin"): "operators repair heads and nodes that Ray makes later",
    (PIPELINE, "roles/compute.instanceAdmin.v1"): "the deployer makes heads",
    (PIPELINE, "roles/compute.networkAdmin"): "the deployer makes networks",
    (PIPELINE, "roles/compute.securityAdmin"): "the deployer makes firewalls",
    (PIPELINE, "roles/iam.serviceAccountAdmin"): "the deployer makes accounts, and can grant the use of any",
    (PIPELINE, "roles/iam.serviceAccountUser"): "the deployer makes heads that run as an account, whichever it is",
    (PIPELINE, "roles/iam.serviceAccountViewer"): "a preview reads accounts",
    (PIPELINE, "roles/monitoring.alertPolicyEditor"): "the deployer makes alerts",
    (PIPELINE, "roles/monitoring.notificationChannelEditor"): "the deployer makes alerts",
    (PIPELINE, "roles/monitoring.viewer"): "a preview reads alerts",
    (PIPELINE, "roles/resourcemanager.projectIamAdmin"): "the deployer grants what machines have, by a condition",
    (PIPELINE, "roles/serviceusage.serviceUsageAdmin"): "the deployer switches APIs on",
    (PIPELINE, "roles/serviceusage.serviceUsageViewer"): "a preview reads which APIs are on",
    (PIPELINE, "roles/compute.viewer"): "a preview reads networks and heads",
}
"""(Component, role) → reason to grant it on the project and not on one resource. Other roles are violations."""

PROJECT_NODE_ROLES: Final = frozenset(naming.NODE_ROLES.values())
"""Ids of the custom roles of a project's pipeline that the heads of its other stacks have."""

ROLES: Final[Mapping[str, Mapping[str, str]]] = {
    KEY_GRANT: {
        "roles/cloudkms.cryptoKeyEncrypterDecrypter": "encrypts what the stack keeps, for Google's agents, and the state",
        "roles/cloudkms.cryptoKeyDecrypter": "reads the state, for previews",
    },
    BILLING_GRANT: {"roles/billing.costsManager": "makes budgets"},
    TOPIC_GRANT: {"roles/pubsub.publisher": "puts tasks, or dead letters"},
    SUBSCRIPTION_GRANT: {
        "roles/pubsub.subscriber": "takes tasks",
        "roles/pubsub.viewer": "reads the settings of the subscription",
    },
    BUCKET_GRANT: {
        "roles/storage.objectUser": "writes records, except the contract",
        "roles/storage.objectViewer": "reads records and the contract",
        "roles/storage.objectAdmin": "writes Pulumi's state, for the deployer",
    },
    REPOSITORY_GRANT: {
        "roles/artifactregistry.reader": "pulls images",
        "roles/artifactregistry.writer": "pushes images",
    },
    SECRET_GRANT: {
        "roles/secretmanager.secretAccessor": "reads the value",
        "roles/secretmanager.secretVersionManager": "puts values without reading them",
        "roles/secretmanager.viewer": "sees versions and readers",
    },
    ACCOUNT_GRANT: {
        "roles/iam.serviceAccountUser": "starts machines that run as the account",
        "roles/iam.workloadIdentityUser": "lets pipelines be the account",
    },
}
"""Type of grant → role → what its holder does with it."""

DEPLOYER_ROLES: Final = ("roles/artifactregistry.writer", "roles/storage.objectUser")
"""What a stack grants to the pipeline that deploys it: to push images, and to write the contract."""

_READ: Final = ("get", "getIamPolicy", "list")
_MANAGE: Final = ("create", *_READ, "setIamPolicy", "update")

PERMISSIONS: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    NODE_ROLES: {
        "compute.instances": ("get", "getGuestAttributes", "list", "setLabels"),
        "compute.zoneOperations": ("get",),
        "tpu.nodes": ("create", "delete", "get", "list", "update"),
        "tpu.operations": ("get", "list"),
    },
    PIPELINE: {
        "resourcemanager.projects": ("get", "getIamPolicy"),
        "serviceusage.services": ("use",),
        "pubsub.subscriptions": (*_MANAGE, "delete"),
        "pubsub.topics": (*_MANAGE, "delete", "attachSubscription"),
        "storage.buckets": _MANAGE,
        "artifactregistry.repositories": (*_MANAGE, "delete"),
        "secretmanager.secrets": (*_MANAGE, "delete"),
        "cloudkms.cryptoKeys": ("getIamPolicy", "setIamPolicy"),
    },
}
"""Component → permissions of its custom roles: nothing that reads content, makes keys or acts as another identity. The
pipeline's `setIamPolicy` could grant all of that; see "What the deployer can reach" in docs/operations.md."""

_ALL: Final = ("get", "list", "watch", "create", "update", "patch", "delete")

VERBS: Final[Mapping[tuple[str, str], tuple[str, ...]]] = {
    ("batch", "jobs"): _ALL,
    ("", "pods"): _ALL,
    ("", "pods/log"): ("get",),
    ("", "pods/exec"): ("get", "create"),
    ("", "pods/eviction"): ("create",),
    ("", "configmaps"): _ALL,
    # A role that gets or lists secrets reads them; one that creates them reads none.
    ("", "secrets"): ("create",),
    ("", "services"): _ALL,
    ("", "events"): ("get", "list", "watch"),
    ("", "persistentvolumeclaims"): ("get", "list"),
    ("", "resourcequotas"): ("get", "list"),
    ("", "limitranges"): ("get", "list"),
    ("coordination.k8s.io", "leases"): _ALL,
}
"""API group and resource → verbs of a role in a namespace."""

ISSUER: Final = "https://token.actions.githubusercontent.com"
_PINNED: Final = re.compile(
    r"\(assertion\.repository_id == '(?P<repository>[0-9]+)' && assertion\.repository_owner_id == '(?P<owner>[0-9]+)'"
    r" && assertion\.event_name != 'pull_request_target'"
    r"(?P<deploys> && assertion\.ref == 'refs/(?:heads|tags)/[^'\\*]+' && assertion\.environment == '[^'\\*]+')?\)"
)
"""The only form of a federation's condition, for each repository. Names change hands, so the ids are pinned; whoever deploys
is pinned to a branch and an environment too."""
_MAPPING: Final = {"google.subject": ("assertion.sub",), "attribute.role": ("'deploy'", "'preview'")}
_FEDERATED: Final = re.compile(
    r"principalSet://iam\.googleapis\.com/projects/[^/]+/locations/global/workloadIdentityPools/(?P<id>[a-z0-9-]+)"
    r"/attribute\.role/(?:deploy|preview)"
)

_SIGNS_IN: Final = re.compile(
    r"principal://iam\.googleapis\.com/projects/[^/]+/locations/global/workloadIdentityPools/(?P<id>[a-z0-9-]+)/subject/[^*]+"
    r"|serviceAccount:[a-z0-9.:-]+\.svc\.id\.goog\[[a-z0-9-]+/runtime-job\]"
)
"""One subject of an issuer, or the pods of a namespace."""
_SUBJECTS: Final = re.compile(r"assertion\.sub in \['[^'\\]+'(?:, '[^'\\]+')*\]")

_GRANTS_ONLY: Final = re.compile(
    r"api\.getAttribute\('iam\.googleapis\.com/modifiedGrantsByRole', \[\]\)\.hasOnly\(\['[^']+'(?:, '[^']+')*\]\)"
)
_CUSTOM: Final = re.compile(r"projects/[^/]+/roles/(?P<id>\w+)")

_CONTRACT: Final = re.compile(
    r'(?P<keeps>!?)resource\.name\.startsWith\("projects/_/buckets/(?P<bucket>[^/"]+)/objects/contract/"\)'
)
"""A condition that takes the contract out of a grant, or leaves nothing else in it."""


def find_foreign_types(graph: Graph, bounds: StackBounds) -> Iterator[Finding]:
    """A program registers the types of resources in `TYPES`, and no other."""
    for each in graph.resources:
        if each.custom and each.type not in TYPES:
            hints = (hint for form, hint in HINTS.items() if re.search(form, each.type, re.IGNORECASE))
            hint = next(hints, "give it a line in `TYPES`, and rules of its own")
            yield each, f"is a `{each.type}`, which no stack may make", hint


def find_foreign_roles(graph: Graph, bounds: StackBounds) -> Iterator[Finding]:
    """Each type of grant has its roles, and an account of the stack is what a grant on an account is about."""
    for each in graph.of_type(*ROLES):
        role, allowed = each.inputs.get("role"), ROLES[each.type]
        if role not in allowed:
            yield each, f"grants `{role}`, allowed are {', '.join(allowed)}", "give it a reason in `ROLES`"
        account = each.inputs.get("serviceAccountId")
        known = isinstance(account, str) and is_own_account(graph, f"serviceAccount:{account.rpartition('/')[2]}")
        made = isinstance(account, UnknownValue) and graph.behind(each, "serviceAccountId", ACCOUNT)
        if each.type == ACCOUNT_GRANT and not (known or made):
            yield each, f"grants on `{account}`, which is no account of this stack", None


def find_project_grants(graph: Graph, bounds: StackBounds) -> Iterator[Finding]:
    """Grants are on the resource, and on the project only those that have a reason. `PROJECT_ROLES` lists them."""
    for each in graph.of_type(PROJECT_GRANT):
        role = each.inputs.get("role")
        made = [found for urn in graph.behind(each, "role", CUSTOM_ROLE) if (found := graph.get(urn))]
        if made and (isinstance(role, UnknownValue) or _is_custom(role, made)):
            continue
        if _component(graph, each) in (HEAD, PEOPLE) and str(role).rpartition("/")[2] in PROJECT_NODE_ROLES:
            continue
        if isinstance(role, UnknownValue):
            yield each, "grants a role on the project that is not known before `up`", "name the role"
        elif (_component(graph, each), role) not in PROJECT_ROLES:
            hint = "grant it on the resource, or give the exception a reason in `PROJECT_ROLES`"
            yield each, f"grants `{role}` on the whole project", hint
        elif role == "roles/resourcemanager.projectIamAdmin" and not _limits(graph, each.inputs.get("condition")):
            message = f"grants `{role}` without a condition that lists what its holder may grant"
            yield each, message, "list roles that heads have in `PROJECT_ROLES`"


def find_foreign_members(graph: Graph, bounds: StackBounds) -> Iterator[Finding]:
    """A role goes to an account of the stack, to Google's own agents, to its pipeline, or to people in the stack file."""
    for each in graph.of_type(*ROLES, PROJECT_GRANT):
        member = each.inputs.get("member")
        agents = graph.behind(each, "member", SERVICE_IDENTITY)
        pipeline: object = graph.behind(each, "member", IDENTITY_POOL)
        if isinstance(member, UnknownValue):
            if not (agents or graph.behind(each, "member", ACCOUNT) or pipeline):
                yield each, "grants to a member that is not known before `up`", "name the member"
        else:
            pipeline = _FEDERATED.fullmatch(str(member))
            pipeline = pipeline or (_component(graph, each) == PEOPLE and _SIGNS_IN.fullmatch(str(member)))
        if bool(pipeline) != (each.inputs.get("role") == "roles/iam.workloadIdentityUser"):
            # The role makes tokens of an account, and a pipeline is nothing but its account.
            hint = "only a pipeline, a machine that signs in and a pod may be an account"
            yield each, f"grants `{each.inputs.get('role')}` to `{member}`", hint
        if not isinstance(member, UnknownValue) and not (
            isinstance(member, str) and (_is_known(graph, bounds, member) or (agents and AGENT.fullmatch(member)))
        ):
            hint = "name people under `access`, and make an account for a machine"
            yield each, f"grants to `{member}`, which is not of this stack", hint
        elif member and member == bounds.deployer and each.inputs.get("role") not in DEPLOYER_ROLES:
            yield each, f"grants `{each.inputs.get('role')}` to the pipeline", "its own stack says what it may do"


def find_stray_pipelines(graph: Graph, bounds: StackBounds) -> Iterator[Finding]:
    """Pipelines are in the stack whose file has `ci`, and what they get goes to accounts that this stack makes."""
    for each in graph.made("gcp"):
        if _component(graph, each) != PIPELINE:
            continue
        member = each.inputs.get("member")
        if bounds.repositories == frozenset():
            yield each, "is part of a pipeline, and the stack file has no `ci`", "put it into the stack that has"
        elif isinstance(member, str) and not (is_own_account(graph, member) or _FEDERATED.fullmatch(member)):
            yield each, f"grants to `{member}`, which is no account of the pipeline", "name people under `access`"


def find_open_contract(graph: Graph, bounds: StackBounds) -> Iterator[Finding]:
    """Whoever writes records cannot write the contract, which commands trust with secrets and images.

    A bucket for data holds none, and has to be named in the stack file.
    """
    kept = {each.inputs.get("name") for each in graph.of_type(BUCKET) if _component(graph, each) != DATA}
    for each in graph.of_type(BUCKET_GRANT):
        bucket = each.inputs.get("bucket")
        writes = each.inputs.get("role") != "roles/storage.objectViewer" and _component(graph, each) != PIPELINE
        named = str(bucket).removeprefix("b/")
        is_data = named not in kept and (bounds.buckets is None or named in bounds.buckets)
        if _component(graph, each) == DATA and isinstance(bucket, str) and is_data:
            continue
        expression = get(each.inputs.get("condition"), "expression")
        if not writes or isinstance(expression, UnknownValue):
            continue
        found = _CONTRACT.fullmatch(str(expression))
        # A resource that the program no longer has shows its state, `b/BUCKET`.
        if found is None or not (isinstance(bucket, UnknownValue) or named == found["bucket"]):
            yield each, "lets its member write the contract with the records", "exclude `contract/` by a condition"
        elif not found["keeps"] and not str(each.inputs.get("member")).startswith(("serviceAccount:", repr(UNKNOWN))):
            yield each, "lets people or any pipeline write the contract", "grant it to the deployer's account"
        elif found["keeps"] and each.inputs.get("member") == bounds.deployer:
            yield each, "lets the deployer write more than the contract", "limit it to `contract/`"


def find_wide_custom_roles(graph: Graph, bounds: StackBounds) -> Iterator[Finding]:
    """A custom role has permissions of its component's line in `PERMISSIONS`, and no other."""
    for each in graph.of_type(CUSTOM_ROLE):
        allowed = PERMISSIONS.get(_component(graph, each), {})
        given = each.inputs.get("permissions")
        wide = [
            str(permission)
            for permission in ([given] if isinstance(given, UnknownValue) else items_of(given))
            if (parts := str(permission).rpartition("."))[2] not in allowed.get(parts[0], ())
        ]
        if wide:
            hint = "grant a role on the one resource, or give it a line in `PERMISSIONS`"
            yield each, f"contains {', '.join(f'`{one}`' for one in wide)}", hint


def find_loose_federation(graph: Graph, bounds: StackBounds) -> Iterator[Finding]:
    """Tokens are accepted from one repository, and to deploy from one branch and environment of it."""
    for each in graph.of_type(IDENTITY_PROVIDER):
        if _component(graph, each) == FEDERATION:
            yield from _find_loose_issuer(each, bounds)
            continue
        condition, mapping = each.inputs.get("attributeCondition"), each.inputs.get("attributeMapping")
        found = [_PINNED.fullmatch(part) for part in str(condition).split(" || ")]
        others = sorted({"aws", "saml", "x509"} & {key for key, value in each.inputs.items() if value})
        if each.inputs.get("oidc") != {"issuerUri": ISSUER}:
            others.append("oidc")
        for key in others:
            yield each, f"accepts tokens by `{key}` of another issuer than {ISSUER}", None
        if not isinstance(mapping, Mapping) or any(mapping.get(key) not in given for key, given in _MAPPING.items()):
            hint = "make it the constant of this provider"
            yield each, "takes its `attribute.role` from the token, or has none", hint
        elif len(mapping) != len(_MAPPING):
            yield each, f"maps other attributes than {', '.join(_MAPPING)}", None
        elif not all(each and (each["deploys"] or mapping["attribute.role"] != "'deploy'") for each in found):
            hint = "pin the ids of repository and owner; to deploy, branch and environment too"
            yield each, "accepts tokens under another condition than `deploy_condition` and `preview_condition`", hint
        elif bounds.repositories is not None and not bounds.repositories.issuperset(
            (int(each["repository"]), int(each["owner"])) for each in found if each
        ):
            yield each, "accepts tokens of a repository that the stack file does not name", "put its ids under `ci`"


def _find_loose_issuer(provider: Registration, bounds: StackBounds) -> Iterator[Finding]:
    """Judge the provider for machines outside of Google: one issuer, and a list of subjects."""
    if not _SUBJECTS.fullmatch(str(provider.inputs.get("attributeCondition"))):
        yield provider, "accepts tokens of other subjects than a list of them", "list them with `subject_condition`"
    if provider.inputs.get("attributeMapping") != {"google.subject": "assertion.sub"}:
        yield provider, "maps other attributes than google.subject", None
    issuer = get(provider.inputs.get("oidc"), "issuerUri")
    if bounds.issuers is not None and issuer not in bounds.issuers:
        yield provider, f"accepts tokens of `{issuer}`, which the stack file does not name", "name it in `federation`"


def find_wide_cluster_roles(graph: Graph, bounds: StackBounds) -> Iterator[Finding]:
    """A role in a namespace has the verbs of `VERBS`, and is bound by name to subjects that the stack file names."""
    for each in graph.of_type(CLUSTER_ROLE):
        for rule in items_of(each.inputs.get("rules")) or [each.inputs.get("rules")]:
            pairs = [
                (group, one) for group in items_of(get(rule, "apiGroups")) for one in items_of(get(rule, "resources"))
            ]
            verbs = items_of(get(rule, "verbs"))
            wide = [
                f"{verb} {one}" for group, one in pairs for verb in verbs if verb not in VERBS.get((group, one), ())
            ]
            if wide or not (pairs and verbs) or get(rule, "nonResourceURLs"):
                yield each, f"allows {', '.join(f'`{one}`' for one in wide) or 'what is not listed'}", "see `VERBS`"
    roles = [
        (each.provider, namespace_of(each), get(each.inputs.get("metadata"), "name"))
        for each in graph.of_type(CLUSTER_ROLE)
    ]
    for each in graph.of_type(CLUSTER_GRANT):
        bound = each.inputs.get("roleRef")
        if get(bound, "kind") != "Role" or not any(
            (provider, namespace) == (each.provider, namespace_of(each)) and may_be(name, get(bound, "name"))
            for provider, namespace, name in roles
        ):
            yield each, f"binds the {get(bound, 'kind')} `{get(bound, 'name')}`, which is no role of this stack", None
        for subject in items_of(each.inputs.get("subjects")) or [each.inputs.get("subjects")]:
            written = _subject(subject)
            named = written in bounds.subjects if bounds.subjects is not None else ":system:" not in written
            if not named:
                yield each, f"grants to `{written}`, which the stack file does not name", "name it under `launchers`"


def _component(graph: Graph, resource: Registration) -> str:
    parent = graph.parent(resource)
    return parent.type if parent else ""


def _is_custom(role: Any, made: list[Registration]) -> bool:
    found = _CUSTOM.fullmatch(str(role))
    return found is not None and any(may_be(each.inputs.get("roleId"), found["id"]) for each in made)


def _limits(graph: Graph, condition: Any) -> bool:
    """Whether a condition lists the only roles that may be granted, and all of them are for machines."""
    expression = str(get(condition, "expression"))
    harmless = {role for component, role in PROJECT_ROLES if component == HEAD}
    nodes = [each for each in graph.of_type(CUSTOM_ROLE) if _component(graph, each) != PIPELINE]
    listed = re.findall(r"'((?:roles|projects)/[^']+)'", expression)
    return bool(_GRANTS_ONLY.fullmatch(expression)) and all(
        role in harmless or _is_custom(role, nodes) for role in listed
    )


def _is_known(graph: Graph, bounds: StackBounds, member: str) -> bool:
    if is_own_account(graph, member) or member in (*(bounds.members or ()), bounds.deployer):
        return True
    if federated := _FEDERATED.fullmatch(member) or _SIGNS_IN.fullmatch(member):
        if federated["id"] is None:
            return bounds.members is None
        pools = (each.inputs.get("workloadIdentityPoolId") for each in graph.of_type(IDENTITY_POOL))
        return federated["id"] in pools
    person = PERSON.fullmatch(member)
    return bounds.members is None and person is not None and person["domain"] not in PUBLIC_DOMAINS


def _subject(subject: Any) -> str:
    """Return a subject as the stack file writes it."""
    kind, name = get(subject, "kind"), get(subject, "name")
    return f"{kind}:{get(subject, 'namespace')}/{name}" if kind == "ServiceAccount" else f"{kind}:{name}"


def find_hasty_agent_grants(graph: Graph, bounds: StackBounds) -> Iterator[Finding]:
    """A service's agent comes into being on first use, and nobody can be granted anything before."""
    for each in graph.made("gcp"):
        member = each.inputs.get("member")
        if not each.type.lower().endswith("iammember") or not isinstance(member, str) or not AGENT.match(member):
            continue
        if not any(other.type == SERVICE_IDENTITY for other in graph.waited_for(each)):
            yield each, f"grants to `{member}`, and does not wait until that is made", "depend on its ServiceIdentity"
