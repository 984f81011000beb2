"""The rules as policies of the engine.

The engine shows a policy pack every resource twice: its inputs as soon as the program registers it, and at the end of a
preview or an `up` all resources of the stack, with their provider's answers in place of the inputs. The program's wishes
are in the inputs alone: an answer also holds defaults of the cloud and members without any grant. The dependencies are in
the final view alone. So the pack keeps the inputs until the end, and makes from both the registrations that the rules
take. With `--target`, a resource that the program no longer registers stays, and the rules judge its state; a resource
that is left for a later run does not exist for the rules.

The engine does not show a rule which values are marked as secret, and which resources stay on destroy.
`python -m infra check` sees both.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from pulumi_policy import (
    EnforcementLevel,
    Policy,
    PolicyResource,
    ReportViolation,
    ResourceValidationArgs,
    ResourceValidationPolicy,
    StackValidationArgs,
    StackValidationPolicy,
)
from pulumi_policy.proxy import UnknownValueError

from infra.check.recording import UNKNOWN, Registration
from infra.policy.base import Rule, StackBounds
from infra.policy.rules import RULES, apply_rule, bounds_of
from infra.settings.read import settings_from
from runtime.errors import RuntimeFailure

PACK: Final = "research-runtime"
READER: Final = "inputs"

Inputs: TypeAlias = dict[str, Mapping[str, Any]]
"""URN → inputs that the program passed."""


def policies() -> list[Policy]:
    """Return a policy for each rule, which stops an `up`, behind one that reads the inputs for them."""
    inputs: Inputs = {}
    return [_reader(inputs), *(_policy(name, rule, inputs) for name, rule in RULES.items())]


def as_registration(resource: PolicyResource, inputs: Mapping[str, Any] | None = None) -> Registration:
    """Return `resource` as registered with `inputs`, by default with its state."""
    return Registration(
        urn=resource.urn,
        type=resource.resource_type,
        name=resource.name,
        inputs=_plain(resource.props) if inputs is None else inputs,
        custom=_is_custom(resource.resource_type),
        # Only the URN of a resource's provider is shown; its id, which follows in a registration, judges nothing.
        parent=resource.parent.urn if resource.parent else None,
        provider=f"{resource.provider.urn}::-" if resource.provider else None,
        protect=resource.opts.protect,
        delete_before_replace=resource.opts.delete_before_replace,
        ignore_changes=tuple(resource.opts.ignore_changes),
        aliases=tuple(resource.opts.aliases),
        dependencies=frozenset(each.urn for each in resource.dependencies),
        property_dependencies={
            key: frozenset(each.urn for each in behind) for key, behind in resource.property_dependencies.items()
        },
    )


def stack_bounds(environment: Mapping[str, str] = os.environ) -> StackBounds:
    """Return the bounds of the stack's settings; if these cannot be read, the program itself fails."""
    return _bounds(environment.get("PULUMI_STACK", ""), environment.get("PULUMI_CONFIG") or "{}")


@functools.lru_cache(1)  # every rule asks for them
def _bounds(stack: str, config: str) -> StackBounds:
    try:
        return bounds_of(settings_from(stack, json.loads(config)))
    except (RuntimeFailure, ValueError):
        return StackBounds()


def _reader(inputs: Inputs) -> ResourceValidationPolicy:
    def keep(args: ResourceValidationArgs, report_violation: ReportViolation) -> None:
        inputs[args.urn] = _plain(args.props)

    return ResourceValidationPolicy(
        name=READER,
        description="Reads what the program asks for, and finds nothing by itself",
        enforcement_level=EnforcementLevel.MANDATORY,
        validate=keep,
    )


def _policy(name: str, rule: Rule, inputs: Inputs) -> StackValidationPolicy:
    def validate(args: StackValidationArgs, report_violation: ReportViolation) -> None:
        there = [each for each in args.resources if not _is_for_later(each, inputs)]
        resources = [as_registration(each, inputs.get(each.urn)) for each in there]
        for violation in apply_rule(name, resources, stack_bounds()):
            report_violation(
                f"{violation.message}; {violation.hint}" if violation.hint else violation.message, violation.urn
            )

    return StackValidationPolicy(
        name=name,
        description=describe(name, rule),
        enforcement_level=EnforcementLevel.MANDATORY,
        validate=validate,
    )


def describe(name: str, rule: Rule) -> str:
    """Return the first sentence of the rule's docstring, or its name in words."""
    text = " ".join((rule.__doc__ or "").split())
    return text.partition(". ")[0].rstrip(".") or name.replace("-", " ")


def _is_custom(type_: str) -> bool:
    return not type_.startswith(("runtime:", "pulumi:pulumi:"))


def _is_for_later(resource: PolicyResource, inputs: Inputs) -> bool:
    """Whether `--target` leaves the resource to another run; the engine then shows neither inputs nor answer."""
    return _is_custom(resource.resource_type) and not inputs.get(resource.urn) and not resource.props


def _plain(value: Any) -> Any:
    """Replace the proxies of the policy library, which raise on every unknown value, by values and `UNKNOWN`."""
    if isinstance(value, Mapping):
        # Google's provider lists the defaults that it filled in under this key, in every object.
        return {key: _item(value, key) for key in value if key != "__defaults"}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_item(value, index) for index in range(len(value))]
    return value


def _item(container: Any, key: Any) -> Any:
    try:
        return _plain(container[key])
    except UnknownValueError:
        return UNKNOWN
