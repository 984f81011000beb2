"""The explicit providers of a stack. Stacks disable default providers, which would silently use an ambient project."""

from __future__ import annotations

import pulumi
import pulumi_gcp
import pulumi_kubernetes

from infra.naming import shorten
from infra.settings.model import KubernetesAccess, StackSettings
from runtime.errors import NotPossible


def google_provider(settings: StackSettings) -> pulumi.ProviderResource:
    """Make the one Google provider, without default labels: each resource has its own, so that reviews see them."""
    if settings.project is None or settings.region is None:
        raise NotPossible(
            f"stack `{settings.stack}` has Google resources and no project or region",
            facts=[f"project: {settings.project}", f"region: {settings.region}"],
            hint="set `research-runtime:project` and `research-runtime:region` in the stack's file",
        )
    # Budgets are billed to the caller's project, which user credentials do not have.
    # https://cloud.google.com/billing/docs/how-to/budget-api-setup
    counted = settings.alerts is not None and settings.alerts.budget is not None
    return pulumi_gcp.Provider(
        "google",
        project=settings.project,
        region=settings.region,
        # An output of None keeps GOOGLE_ZONE out; a plain None would not.
        zone=settings.zone or pulumi.Output.from_input(None),
        impersonate_service_account=settings.impersonate,
        add_pulumi_attribution_label=False,
        user_project_override=counted,
        billing_project=settings.project if counted else None,
    )


def kubernetes_provider(name: str, settings: KubernetesAccess, *, adopt: bool = False) -> pulumi.ProviderResource:
    """Make a provider for a context and cluster identifier; the kubeconfig stays on the engine's machine.

    With `adopt` the provider takes over existing objects of the same names, instead of failing on them.
    """
    return pulumi_kubernetes.Provider(
        f"kubernetes-{shorten(name, 100)}",
        context=settings.context,
        cluster_identifier=settings.cluster_identifier,
        # An output of None keeps KUBECONFIG out of the state; the provider itself finds the file by that variable.
        kubeconfig=pulumi.Output.from_input(None),
        enable_server_side_apply=True,
        # Namespaces and claims of an unreachable cluster stay in the state.
        delete_unreachable=False,
        skip_update_unreachable=False,
        enable_config_map_mutable=False,
        enable_secret_mutable=False,
        # Reverts changes by hand: otherwise one edited rule of a role would stop every later `up`.
        enable_patch_force=True,
        upsert_existing_objects=adopt,
        suppress_deprecation_warnings=False,
        suppress_helm_hook_warnings=False,
    )
