"""The engine runs this file for `--policy-pack`. Making the pack starts its server, so nothing else may import it."""

from __future__ import annotations

from pulumi_policy import EnforcementLevel, PolicyPack

from infra.policy.crossguard import PACK, policies

PolicyPack(name=PACK, enforcement_level=EnforcementLevel.MANDATORY, policies=policies())
