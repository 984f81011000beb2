"""The rules as policies of the engine.

The engine shows a policy pack every resource twice: its inputs as soon as the program registers it, and at the end of a
preview or an `up` all resources of the stack, with what their provider answered in place of the inputs. Only the inputs
say what the program wants: an answer holds defaults of the cloud and members that nobody granted anything. Only the end
says what depends on what. So the inputs are kept until the end, and both together are the registrations that the rules
know. With `--target`, a resource that the program no longer registers stays, and is judged by what the state says; one
that is left for later is as little there for the rules as it is for the stack.

What the engine does not show, a rule cannot see: that a value is marked as secret, and what is kept on destroy.
`python -m infra check` sees both.
"""

from __future__ import annotations

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
from infra.policy.base import Bounds, Rule
from infra.policy.rules import RULES, apply_rule, bounds_of
from infra.settings.read import settings_from
from runtime.errors import RuntimeFailure

PACK: Final = "research-runtime"
READER: Final = "inputs"

Inputs: TypeAlias = dict[str, Mapping[str, Any]]
"""URN → what the program passed."""


def policies() -> list[Policy]:
    """A policy for each rule, which stops an `up`; the first policy finds nothing and reads the inputs for the others."""
    inputs: Inputs = {}
    return [_reader(inputs), *(_policy(name, rule, inputs) for name, rule in RULES.items())]


def as_registration(resource: PolicyResource, inputs: Mapping[str, Any] | None = None) -> Registration:
    """`resource` with the inputs that it was registered with, or with its state if they are not given."""
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


def stack_bounds(environment: Mapping[str, str] = os.environ) -> Bounds:
    """The bounds of the stack's settings. If they cannot be read, the program itself fails and says so."""
    try:
        config = json.loads(environment.get("PULUMI_CONFIG") or "{}")
        return bounds_of(settings_from(environment.get("PULUMI_STACK", ""), config))
    except (RuntimeFailure, ValueError):
        return Bounds()


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
    """The first sentence of the rule's docstring, or its name in words."""
    text = " ".join((rule.__doc__ or "").split())
    return text.partition(". ")[0].rstrip(".") or name.replace("-", " ")


def _is_custom(type_: str) -> bool:
    return not type_.startswith(("runtime:", "pulumi:pulumi:"))


def _is_for_later(resource: PolicyResource, inputs: Inputs) -> bool:
    """Whether `--target` leaves a resource to another run: the engine then shows neither inputs nor an answer."""
    return _is_custom(resource.resource_type) and not inputs.get(resource.urn) and not resource.props


def _plain(value: Any) -> Any:
    """Replace the proxies of the policy library, which raise on every unknown value, by values and `UNKNOWN`."""
    if isinstance(value, Mapping):
        return {key: _item(value, key) for key in value}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_item(value, index) for index in range(len(value))]
    return value


def _item(container: Any, key: Any) -> Any:
    try:
        return _plain(container[key])
    except UnknownValueError:
        return UNKNOWN
