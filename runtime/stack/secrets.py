"""The stack's secrets in Google Secret Manager: their places, versions and readers.

A value goes one way here, from standard input or a file into a new version. This module reads no value, and no value is in
an argument list, an error, a log or other output. `runtime.stack.secret_reader` reads them.
"""

from __future__ import annotations

import base64
import functools
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from runtime.errors import InfrastructureFailure, InvalidContract, RequestRefused, UnknownName
from runtime.outputs import SecretOutput, StackOutputs, need_output
from runtime.stack.google_api import GoogleApi, GoogleRefused
from runtime.system import system
from runtime.units import parse_time

MAX_BYTES: Final = 65_536
"""https://cloud.google.com/secret-manager/quotas#content_limits"""
READERS: Final = frozenset({"roles/secretmanager.secretAccessor", "roles/secretmanager.admin", "roles/owner"})
"""Roles whose members can read a value."""
_RESOURCE: Final = re.compile(r"projects/[^/\s]+/secrets/[A-Za-z0-9_-]{1,255}")
_AT_ONCE: Final = 8


class VersionState(StrEnum):
    ENABLED = "enabled"
    DISABLED = "disabled"
    DESTROYED = "destroyed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretSeen:
    """A secret of the contract in Secret Manager. Facts that this identity may not see are None."""

    name: str
    env: str
    """Variable that carries the value."""
    resource: str
    versions: int | None = None
    """Number of versions that are not destroyed."""
    newest: str | None = None
    """Number of the newest enabled version; `latest` may be a disabled one."""
    created_at: datetime | None = None
    """Creation time of that version."""
    readers: tuple[str, ...] | None = None
    """Members with a grant on this secret, without grants on the whole project."""
    may_read: bool | None = None
    """Whether this identity can read the value."""
    problem: str | None = None
    """The reason why readers cannot get the value."""
    next_step: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewVersion:
    name: str
    env: str
    resource: str
    version: str
    disabled: tuple[str, ...] = ()
    """Older versions that this call disabled."""


class InvalidSecret(RequestRefused):
    """A value that no secret can have; the message never has the value."""


class NotTheProject(RequestRefused):
    """A secret of the contract that lies in a project that the caller did not name."""


class VersionNotVerified(InfrastructureFailure):
    """A version was added, and Google did not confirm its checksum."""


def list_secrets(outputs: StackOutputs, api: GoogleApi) -> Iterator[SecretSeen]:
    """Yield every secret of the contract, by name; a problem of one does not stop the others.

    Raises `MissingOutput` for a contract without secrets.
    """
    found: dict[str, SecretOutput] = need_output(outputs, "secrets", "`runtime secrets`")
    with system.pool(_AT_ONCE, name="secrets") as pool:
        yield from pool.map(lambda pair: look_at(pair[0], pair[1], outputs.stack, api), sorted(found.items()))


def look_at(name: str, secret: SecretOutput, stack: str, api: GoogleApi) -> SecretSeen:
    """Look at one secret. Raises `GoogleUnreachable`; a refusal becomes the `problem`."""
    about: dict[str, Any] = {"name": name, "env": secret.env, "resource": secret.resource}
    if not _RESOURCE.fullmatch(secret.resource):
        about["resource"] = "?"
        return SecretSeen(
            **about, problem="its `resource` is no name of Secret Manager", next_step=f"pulumi up --stack {stack}"
        )
    permission = "secretmanager.versions.access"
    with suppress(GoogleRefused):
        about["may_read"] = permission in api.allowed("secretmanager", f"v1/{secret.resource}", (permission,))
    about["readers"] = _readers(secret.resource, api)
    try:
        versions = list(api.pages("secretmanager", f"v1/{secret.resource}/versions", "versions", pageSize=100))
    except GoogleRefused as refused:
        problem, step = _explain_refusal(refused, secret.resource, stack)
        return SecretSeen(**about, problem=problem, next_step=step)
    alive = [version for version in versions if _state(version) is not VersionState.DESTROYED]
    enabled = [version for version in versions if _state(version) is VersionState.ENABLED]
    about["versions"] = len(alive)
    if not enabled:
        why = "all its versions are disabled" if alive else "it has no value yet"
        return SecretSeen(**about, problem=why, next_step=f"runtime secrets put {name} --stack {stack}")
    newest = max(enabled, key=_number)
    about["newest"] = str(_number(newest))
    about["created_at"] = parse_time(newest["createTime"]) if "createTime" in newest else None
    if about["readers"] == ():
        step = f"add `readers` to `secrets.{name}` in Pulumi.{stack}.yaml, then run `pulumi up --stack {stack}`"
        return SecretSeen(**about, problem="nobody was granted to read it", next_step=step)
    # Readers ask for `latest`, which is the newest version in any state.
    if max(alive, key=_number) is not newest:
        return SecretSeen(
            **about,
            problem=f"its newest version {_number(max(alive, key=_number))} is disabled, and readers ask for that one",
            next_step=f"runtime secrets put {name} --stack {stack}",
        )
    return SecretSeen(**about)


def find_secret(outputs: StackOutputs, name: str) -> SecretOutput:
    """Raises `MissingOutput`, `UnknownName`, and `InvalidContract` for an invalid resource name."""
    secrets: dict[str, SecretOutput] = need_output(outputs, "secrets", f"secret `{name}`")
    if name not in secrets:
        raise UnknownName(
            "secret",
            name,
            secrets,
            where=f"in stack `{outputs.stack}`",
            hint=f"`runtime secrets list --stack {outputs.stack}` shows where each lies",
        )
    if not _RESOURCE.fullmatch(secrets[name].resource):
        raise InvalidContract(
            f"`secrets.{name}.resource` of stack `{outputs.stack}` is no name of Secret Manager",
            facts=["expected: projects/PROJECT/secrets/NAME"],
            hint=f"run `pulumi up --stack {outputs.stack}`",
        )
    return secrets[name]


def find_destination(outputs: StackOutputs, name: str, project: str | None = None) -> SecretOutput:
    """Return the secret to put a value into: one in `project`, by default in the stack's own.

    Raises the errors of `find_secret`, and `NotTheProject` for a secret that the contract places elsewhere: a value
    that was sent to a stranger's project is lost, and the contract is only as trustworthy as everybody who can write it.
    """
    secret = find_secret(outputs, name)
    lies_in, expected = secret.resource.split("/")[1], project or outputs.project
    if lies_in != expected:
        raise NotTheProject(
            f"secret `{name}` of stack `{outputs.stack}` lies in the project `{lies_in}`, "
            + (f"not in `{expected}`" if expected else "and the contract names no project of the stack"),
            facts=[f"resource: {secret.resource}", "no value was read or sent"],
            hint=f"if that project is meant: `runtime secrets put {name} --project {lies_in}`",
        )
    return secret


def check_value(value: bytes, name: str) -> None:
    """Raise `InvalidSecret` for a value that no variable can carry or Secret Manager does not take."""
    if not value.strip():
        raise InvalidSecret(
            f"the value of secret `{name}` is empty", hint="pipe the value in, or name its file with `--file`"
        )
    if b"\0" in value:
        raise InvalidSecret(
            f"the value of secret `{name}` holds a zero byte, which no variable can carry",
            hint="encode it, such as with base64",
        )
    if len(value) > MAX_BYTES:
        raise InvalidSecret(
            f"the value of secret `{name}` has {len(value):,} bytes",
            facts=[f"allowed are {MAX_BYTES:,}"],
            hint="keep it in a bucket, and the key to it here",
        )


def put_secret(
    outputs: StackOutputs,
    name: str,
    value: bytes,
    api: GoogleApi,
    *,
    disable_older: bool = False,
    project: str | None = None,
) -> NewVersion:
    """Add `value` as the newest version; with `disable_older` disable the versions before it.

    Two calls add two versions. Raises `InvalidSecret` and the errors of `find_destination` before anything is sent;
    `VersionNotVerified` if the new version may be damaged: then the older versions stay enabled.
    """
    secret = find_destination(outputs, name, project)
    check_value(value, name)
    payload = {"data": base64.b64encode(value).decode(), "dataCrc32c": str(crc32c(value))}
    try:
        added = api.post("secretmanager", f"v1/{secret.resource}:addVersion", {"payload": payload})
    except GoogleRefused as refused:
        raise _explain_put(refused, name, outputs.stack) from refused
    version = str(_number(added))
    if added.get("clientSpecifiedPayloadChecksum") is not True:
        raise VersionNotVerified(
            f"version {version} of secret `{name}` was added, and google did not verify its checksum",
            facts=["older versions are as they were"],
            hint=f"add it again, then disable version {version}",
            retryable=False,
        )
    disabled = _disable_older(secret.resource, name, int(version), api) if disable_older else ()
    return NewVersion(name=name, env=secret.env, resource=secret.resource, version=version, disabled=disabled)


def crc32c(data: bytes) -> int:
    """Return the checksum that Secret Manager compares (Castagnoli's polynomial, which zlib lacks)."""
    table, crc = _crc32c_table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


@functools.cache
def _crc32c_table() -> tuple[int, ...]:
    def entry(value: int) -> int:
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        return value

    return tuple(map(entry, range(256)))


def _disable_older(resource: str, name: str, newest: int, api: GoogleApi) -> tuple[str, ...]:
    versions = api.pages("secretmanager", f"v1/{resource}/versions", "versions", filter="state:ENABLED", pageSize=100)
    done: list[str] = []
    try:
        for number in sorted(_number(version) for version in versions):
            if number < newest:
                api.post("secretmanager", f"v1/{resource}/versions/{number}:disable")
                done.append(str(number))
    except GoogleRefused as refused:
        raise InfrastructureFailure(
            f"version {newest} of secret `{name}` was added, but older ones could not be disabled",
            facts=[refused.message, f"disabled: {', '.join(done) or 'none'}"],
            hint="give this identity `roles/secretmanager.secretVersionManager` on it and put the value again",
            retryable=refused.retryable,
        ) from refused
    return tuple(done)


def _readers(resource: str, api: GoogleApi) -> tuple[str, ...] | None:
    try:
        policy = api.get("secretmanager", f"v1/{resource}:getIamPolicy", **{"options.requestedPolicyVersion": 3})
    except GoogleRefused:
        return None
    bindings: Sequence[dict[str, Any]] = policy.get("bindings", ())
    members = {
        f"{member} (under a condition)" if "condition" in each else member
        for each in bindings
        if each.get("role") in READERS
        for member in each.get("members", ())
    }
    return tuple(sorted(members))


def _explain_refusal(refused: GoogleRefused, resource: str, stack: str) -> tuple[str, str]:
    if refused.disabled_api:
        return "the Secret Manager API is not enabled in its project", f"pulumi up --stack {stack}"
    if refused.status == 404:
        return f"there is no secret `{resource}`", f"pulumi up --stack {stack}"
    if refused.status == 403:
        return "this identity may not see its versions", "ask an operator for `roles/secretmanager.viewer` on it"
    return refused.message, refused.hint or "try again"


def _explain_put(refused: GoogleRefused, name: str, stack: str) -> InfrastructureFailure:
    problem, step = {
        403: (
            "this identity may not add versions",
            "ask an operator for `roles/secretmanager.secretVersionAdder` on it",
        ),
        404: (
            "it does not exist",
            f"run `pulumi up --stack {stack}`: the stack makes it, and `put` only adds its value",
        ),
    }.get(refused.status, (refused.message, refused.hint))
    if refused.disabled_api:
        problem, step = "the Secret Manager API is not enabled", f"run `pulumi up --stack {stack}`"
    return InfrastructureFailure(
        f"cannot put a value into secret `{name}`: {problem}",
        facts=[*refused.facts, "nothing was added" if refused.status < 500 else "it may have been added"],
        hint=step,
        retryable=refused.retryable,
    )


def _state(version: dict[str, Any]) -> VersionState:
    try:
        return VersionState(str(version.get("state", "")).lower())
    except ValueError:
        return VersionState.UNKNOWN


def _number(version: dict[str, Any]) -> int:
    return int(version["name"].rpartition("/")[2])
