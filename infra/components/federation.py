"""Identities of machines outside of Google: an issuer's tokens of agreed subjects, instead of keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pulumi
from pulumi_gcp import iam

from infra.components.apis import Apis
from infra.components.shared import Part, StackSite
from infra.naming import shorten
from infra.settings.model import IssuerSettings
from infra.settings.read import ensure_valid


@dataclass(frozen=True, slots=True, kw_only=True)
class FederationArgs:
    site: StackSite
    issuers: Mapping[str, IssuerSettings]
    apis: Apis | None = None


class Federation(Part):
    """A pool with a provider for each issuer. Who is let in may do what is granted to its `members`, and nothing else."""

    members: Mapping[str, pulumi.Output[str]]
    """Label → `principal://…/subject/SUBJECT`, of every subject."""
    providers: Mapping[str, pulumi.Output[str]]
    """Issuer → `projects/NUMBER/locations/global/workloadIdentityPools/POOL/providers/oidc-ISSUER`, for the credentials' file."""

    def __init__(self, name: str, args: FederationArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        for issuer, settings in args.issuers.items():
            ensure_valid(settings, f"federation.{issuer}")
        site = args.site
        super().__init__("runtime:identity:Federation", name, site, args.apis, opts)
        pool_id = site.names.identity_pool("workers")
        path = f"projects/{site.project}/locations/global/workloadIdentityPools/{pool_id}"
        pool = iam.WorkloadIdentityPool(
            f"{name}-pool",
            project=site.project,
            workload_identity_pool_id=pool_id,
            display_name="Machines elsewhere",
            description="Workers and submitters outside of Google",
            disabled=False,
            deletion_policy="ABANDON",
            # Google keeps a deleted pool's id for 30 days and refuses a new pool with that id.
            opts=self._surviving(path, "iam", "sts", "iamcredentials", protect=site.protect),
        )
        for issuer, settings in args.issuers.items():
            iam.WorkloadIdentityPoolProvider(
                f"{name}-{issuer}",
                project=site.project,
                workload_identity_pool_id=pool.workload_identity_pool_id,
                workload_identity_pool_provider_id=provider_id(issuer),
                display_name=issuer[:32],
                disabled=False,
                attribute_condition=subject_condition(settings.subjects),
                attribute_mapping={"google.subject": "assertion.sub"},
                oidc=iam.WorkloadIdentityPoolProviderOidcArgs(
                    issuer_uri=settings.issuer, allowed_audiences=[settings.audience], jwks_json=settings.jwks
                ),
                deletion_policy="ABANDON",
                opts=self._surviving(f"{path}/providers/{provider_id(issuer)}", protect=site.protect),
            )
        self.providers = {
            issuer: pulumi.Output.concat(pool.name, f"/providers/{provider_id(issuer)}") for issuer in args.issuers
        }
        self.members = {
            f"{issuer}-{index}": pulumi.Output.concat(
                "principal://iam.googleapis.com/", pool.name, f"/subject/{subject}"
            )
            for issuer, settings in args.issuers.items()
            for index, subject in enumerate(settings.subjects)
        }
        self._register()


def provider_id(issuer: str) -> str:
    """4 to 32 characters."""
    return shorten(f"oidc-{issuer}", 32)


def subject_condition(subjects: Sequence[str]) -> str:
    """Accept the tokens of these subjects; an issuer signs many others."""
    listed = ", ".join(f"'{subject}'" for subject in subjects)
    return f"assertion.sub in [{listed}]"
