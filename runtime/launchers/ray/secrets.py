"""Secrets of jobs on Ray: files of a shared folder, or, if the record root is a bucket, values that a node reads itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from runtime.errors import NotPossible
from runtime.jobs.plan import PlanContext, Target
from runtime.jobs.secret_schemes import COMMON_SCHEMES, SecretReader, SecretScheme
from runtime.jobs.spec import JobSpec, SecretRef, secret_refs

_OF_STACK: Final = "secret-manager"
SECRET_SCHEMES: Final[Mapping[str, SecretScheme]] = {
    "env": SecretScheme(
        reader=SecretReader.LAUNCH, how=f"{COMMON_SCHEMES['env'].how}; refused if the record root is a bucket"
    ),
    "file": SecretScheme(
        reader=SecretReader.LAUNCH, how=f"{COMMON_SCHEMES['file'].how}; refused if the record root is a bucket"
    ),
    _OF_STACK: SecretScheme(
        reader=SecretReader.LAUNCH,
        how=f"{COMMON_SCHEMES[_OF_STACK].how}; if the record root is a bucket, each node reads it when an attempt begins",
    ),
}
_IN_BUCKET: Final[Mapping[str, SecretScheme]] = {
    **SECRET_SCHEMES,
    _OF_STACK: SecretScheme(reader=SecretReader.MACHINE, how="each node, with its own account, when an attempt begins"),
}


def schemes_of(bucket: str | None) -> Mapping[str, SecretScheme]:
    """The schemes by the record root: values never enter a bucket."""
    return SECRET_SCHEMES if bucket is None else _IN_BUCKET


def find_machine_secrets(spec: JobSpec, target: Target, context: PlanContext) -> dict[str, str]:
    """Variable → `projects/P/secrets/N`, for the secrets that the nodes read; no value is read here.

    Raises `NotPossible` for a secret that only the launching machine can read, and `UnknownName` for one that the stack does
    not have.
    """
    refs = secret_refs(spec)
    for ref in refs:
        if ref.scheme != _OF_STACK:
            raise SecretNotBrought(ref)
    return {ref.name: _find_resource(ref, target, context) for ref in refs}


class SecretNotBrought(NotPossible):
    """A secret that only the launching machine can read, for a record root that values never enter."""

    def __init__(self, ref: SecretRef) -> None:
        super().__init__(
            f"secret `{ref.name}` cannot be brought to a Ray cluster whose record root is a bucket",
            facts=[
                f"only this machine can read `{ref.scheme}://`, and values never enter a bucket",
                "Ray shows what a job is submitted with to everybody who reaches its head",
            ],
            hint=f"put it into the stack (`runtime secrets put`) and name it: {ref.name}={_OF_STACK}://NAME; docs/ray.md",
        )


def _find_resource(ref: SecretRef, target: Target, context: PlanContext) -> str:
    from runtime.stack.find import find_stack
    from runtime.stack.secret_reader import find_source

    return find_source(find_stack(target.stack, settings=context.settings).outputs, ref, target).resource
