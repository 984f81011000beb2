"""The explicit providers of a stack. Default ones are switched off: they would take an ambient project silently."""

from __future__ import annotations

import pulumi

from infra.config import KubernetesSettings, Settings


def google_provider(settings: Settings) -> pulumi.ProviderResource:
    """The one Google provider, from typed settings only."""
    raise NotImplementedError


def kubernetes_provider(name: str, settings: KubernetesSettings) -> pulumi.ProviderResource:
    """Named by context and cluster identifier; the kubeconfig itself is read where the engine runs and stays there."""
    raise NotImplementedError
