"""Secrets in Secret Manager: listing and putting them, without ever returning a value."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import InfrastructureFailure, InvalidContract, RuntimeFailure, UnknownName
from runtime.outputs import MissingOutput, SecretOutput, StackOutputs
from runtime.stack import secrets
from runtime.stack.google_api import GoogleApi, GoogleUnreachable
from runtime.stack.secrets import InvalidSecret, SecretSeen, VersionNotVerified, list_secrets, put_secret
from runtime.units import parse_time
from tests.fakes import google as fake
from tests.fakes.google import GoogleServer

CANARY = b"hf_canary_31337"
OUTPUTS = StackOutputs(
    stack="dev",
    project="p",
    secrets={"hf-token": SecretOutput(resource="projects/p/secrets/dev-hf-token", env="HF_TOKEN")},
)


@pytest.fixture
def google() -> Iterator[GoogleServer]:
    server = GoogleServer().start()
    yield server
    server.stop()
    assert server.refused == []


@pytest.fixture
def api(google: GoogleServer) -> GoogleApi:
    return GoogleApi(server=google.url, again=False)


def seen(api: GoogleApi) -> SecretSeen:
    [only] = list_secrets(OUTPUTS, api)
    return only


RESOURCE = "projects/p/secrets/dev-hf-token"
PLAIN = {"name": "hf-token", "env": "HF_TOKEN", "resource": RESOURCE}


def test_secret_in_order_is_seen_with_versions_and_readers(google: GoogleServer, api: GoogleApi) -> None:
    google.put_secret("dev-hf-token", b"one", b"two", b"three", readers=["serviceAccount:w@p", "group:a@b"])

    assert seen(api) == SecretSeen(
        **PLAIN,
        versions=3,
        newest="3",
        created_at=parse_time("2026-11-03T00:00:00Z"),
        readers=("group:a@b", "serviceAccount:w@p"),
        may_read=True,
    )


def test_looking_never_asks_for_a_value(google: GoogleServer, api: GoogleApi) -> None:
    google.put_secret("dev-hf-token", CANARY, readers=["user:a"])
    seen(api)

    assert google.calls("*.access") == []
    assert set(google.calls()) == {
        "secretmanager.projects.secrets.testIamPermissions",
        "secretmanager.projects.secrets.getIamPolicy",
        "secretmanager.projects.secrets.versions.list",
    }


def test_secret_without_a_value_is_lacking(google: GoogleServer, api: GoogleApi) -> None:
    google.put_secret("dev-hf-token", readers=["user:a"])

    found = seen(api)

    assert (found.versions, found.newest, found.problem) == (0, None, "it has no value yet")
    assert found.next_step == "runtime secrets put hf-token --stack dev"


def test_secret_whose_versions_are_all_disabled_is_lacking(google: GoogleServer, api: GoogleApi) -> None:
    resource = google.put_secret("dev-hf-token", b"one", b"two", readers=["user:a"])
    google.versions[resource][0]["state"] = "DESTROYED"
    google.versions[resource][1]["state"] = "DISABLED"

    assert (seen(api).versions, seen(api).problem) == (1, "all its versions are disabled")


def test_secret_whose_newest_version_is_disabled_is_lacking_though_an_older_one_is_not(
    google: GoogleServer, api: GoogleApi
) -> None:
    resource = google.put_secret("dev-hf-token", b"one", b"two", readers=["user:a"])
    google.versions[resource][1]["state"] = "DISABLED"

    found = seen(api)

    assert found.newest == "1"
    assert found.problem == "its newest version 2 is disabled, and readers ask for that one"


def test_secret_that_nobody_may_read_is_lacking(google: GoogleServer, api: GoogleApi) -> None:
    google.put_secret("dev-hf-token", b"one")

    assert (seen(api).readers, seen(api).problem) == ((), "nobody was granted to read it")


def test_reader_under_a_condition_is_said_so_and_other_roles_do_not_count(google: GoogleServer, api: GoogleApi) -> None:
    resource = google.put_secret("dev-hf-token", b"one")
    google.policies[resource] = {
        "bindings": [
            {"role": "roles/secretmanager.secretAccessor", "members": ["user:a"], "condition": {"title": "until"}},
            {"role": "roles/secretmanager.viewer", "members": ["user:b"]},
        ]
    }

    assert seen(api).readers == ("user:a (under a condition)",)


def test_what_this_identity_may_not_see_is_none_and_no_lack(google: GoogleServer, api: GoogleApi) -> None:
    resource = google.put_secret("dev-hf-token", b"one")
    google.deny("*.getIamPolicy", "secretmanager.secrets.getIamPolicy")
    google.allowed[resource] = set()

    found = seen(api)

    assert (found.readers, found.may_read, found.newest, found.problem) == (None, False, "1", None)


@pytest.mark.parametrize("kind", ["absent", "off", "denied"])
def test_secret_that_cannot_be_seen_says_why_and_what_to_do(google: GoogleServer, api: GoogleApi, kind: str) -> None:
    if kind != "absent":
        google.put_secret("dev-hf-token", b"one", readers=["user:a"])
    if kind == "off":
        google.disable_api("secretmanager", "Secret Manager")
    if kind == "denied":
        google.deny("*.versions.list", "secretmanager.versions.list")

    found = seen(api)

    assert (found.problem, found.next_step) == {
        "absent": (f"there is no secret `{RESOURCE}`", "pulumi up --stack dev"),
        "off": ("the Secret Manager API is not enabled in its project", "pulumi up --stack dev"),
        "denied": (
            "this identity may not see its versions",
            "ask an operator for `roles/secretmanager.viewer` on it",
        ),
    }[kind]


def test_one_bad_secret_stops_none_of_the_others(google: GoogleServer, api: GoogleApi) -> None:
    google.put_secret("b", b"x", readers=["user:a"])
    outputs = StackOutputs(
        stack="dev",
        secrets={
            "a": SecretOutput(resource=CANARY.decode(), env="A"),
            "b": SecretOutput(resource="projects/p/secrets/b", env="B"),
            "c": SecretOutput(resource="projects/p/secrets/c", env="C"),
        },
    )

    found = {each.name: each.problem for each in list_secrets(outputs, api)}

    assert found == {
        "a": "its `resource` is no name of Secret Manager",
        "b": None,
        "c": "there is no secret `projects/p/secrets/c`",
    }


def test_stack_without_secrets_names_the_key(api: GoogleApi) -> None:
    with pytest.raises(MissingOutput) as missing:
        list(list_secrets(StackOutputs(stack="dev"), api))

    assert missing.value.key == "secrets"


def test_google_that_does_not_answer_is_one_failure() -> None:
    gone = GoogleServer()
    gone._server.server_close()

    with pytest.raises(GoogleUnreachable):
        seen(GoogleApi(server=gone.url, again=False))


# putting


def test_put_adds_a_version_with_its_checksum(google: GoogleServer, api: GoogleApi) -> None:
    resource = google.put_secret("dev-hf-token", b"old")

    made = put_secret(OUTPUTS, "hf-token", CANARY, api)

    assert (made.version, made.disabled, made.env, made.resource) == ("2", (), "HF_TOKEN", RESOURCE)
    assert google.payloads[f"{resource}/versions/2"] == CANARY
    assert [each["state"] for each in google.versions[resource]] == ["ENABLED", "ENABLED"]


def test_put_with_disable_older_leaves_the_newest_alone(google: GoogleServer, api: GoogleApi) -> None:
    resource = google.put_secret("dev-hf-token", b"1", b"2", b"3")
    google.versions[resource][1]["state"] = "DISABLED"

    made = put_secret(OUTPUTS, "hf-token", CANARY, api, disable_older=True)

    assert (made.version, made.disabled) == ("4", ("1", "3"))
    assert [each["state"] for each in google.versions[resource]] == ["DISABLED"] * 3 + ["ENABLED"]


def test_put_says_what_stands_where_older_versions_cannot_be_disabled(google: GoogleServer, api: GoogleApi) -> None:
    google.put_secret("dev-hf-token", b"1", b"2")
    google.fail("*.disable", 403, "PERMISSION_DENIED", "no", on="versions/2")

    with pytest.raises(InfrastructureFailure) as failed:
        put_secret(OUTPUTS, "hf-token", CANARY, api, disable_older=True)

    assert failed.value.message == "version 3 of secret `hf-token` was added, but older ones could not be disabled"
    assert "disabled: 1" in failed.value.facts


def test_version_that_google_did_not_verify_is_a_failure_and_older_ones_stay(
    google: GoogleServer, api: GoogleApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    resource = google.put_secret("dev-hf-token", b"1")
    post = api.post
    monkeypatch.setattr(api, "post", lambda *a, **k: {**post(*a, **k), "clientSpecifiedPayloadChecksum": False})

    with pytest.raises(VersionNotVerified):
        put_secret(OUTPUTS, "hf-token", CANARY, api, disable_older=True)

    assert google.versions[resource][0]["state"] == "ENABLED"


def test_wrong_checksum_is_refused_by_google_and_explained(
    google: GoogleServer, api: GoogleApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    google.put_secret("dev-hf-token")
    monkeypatch.setattr(secrets, "crc32c", lambda data: 7)

    with pytest.raises(InfrastructureFailure, match="CRC32C"):
        put_secret(OUTPUTS, "hf-token", CANARY, api)


@pytest.mark.parametrize("value", [b"", b"\n", b" \t", b"a\0b", b"x" * 65_537])
def test_value_that_cannot_be_one_is_refused_before_anything_is_sent(
    google: GoogleServer, api: GoogleApi, value: bytes
) -> None:
    google.put_secret("dev-hf-token")

    with pytest.raises(InvalidSecret):
        put_secret(OUTPUTS, "hf-token", value, api)
    assert google.calls() == []


def test_largest_value_is_taken(google: GoogleServer, api: GoogleApi) -> None:
    google.put_secret("dev-hf-token")

    assert put_secret(OUTPUTS, "hf-token", b"x" * 65_536, api).version == "1"


@pytest.mark.parametrize(
    ("kind", "problem", "hint"),
    [
        ("denied", "this identity may not add versions", "roles/secretmanager.secretVersionAdder"),
        ("absent", "it does not exist", "pulumi up --stack dev"),
        ("off", "the Secret Manager API is not enabled", "pulumi up --stack dev"),
    ],
)
def test_put_that_is_refused_says_why_and_that_nothing_was_added(
    google: GoogleServer, api: GoogleApi, kind: str, problem: str, hint: str
) -> None:
    if kind != "absent":
        google.put_secret("dev-hf-token")
    if kind == "denied":
        google.deny("*.addVersion", "secretmanager.versions.add")
    if kind == "off":
        google.disable_api("secretmanager", "Secret Manager")

    with pytest.raises(InfrastructureFailure) as failed:
        put_secret(OUTPUTS, "hf-token", CANARY, api)

    assert failed.value.message == f"cannot put a value into secret `hf-token`: {problem}"
    assert hint in (failed.value.hint or "")
    assert "nothing was added" in failed.value.facts


def test_put_without_an_answer_says_that_it_may_be_there(google: GoogleServer, api: GoogleApi) -> None:
    google.put_secret("dev-hf-token")
    google.fail("*.addVersion", 503, "UNAVAILABLE", "try later")

    with pytest.raises(InfrastructureFailure) as failed:
        put_secret(OUTPUTS, "hf-token", CANARY, api)

    assert "it may have been added" in failed.value.facts


def test_unknown_secret_lists_those_of_the_stack(api: GoogleApi) -> None:
    with pytest.raises(UnknownName) as refused:
        put_secret(OUTPUTS, "hf-tokne", CANARY, api)

    assert (refused.value.known, refused.value.hint) == (["hf-token"], "did you mean `hf-token`?")


def test_resource_that_is_none_is_refused_and_not_repeated(api: GoogleApi) -> None:
    outputs = StackOutputs(stack="dev", secrets={"a": SecretOutput(resource=CANARY.decode(), env="A")})

    with pytest.raises(InvalidContract) as refused:
        put_secret(outputs, "a", b"x", api)

    assert CANARY.decode() not in refused.value.render()


@pytest.mark.parametrize("trouble", ["none", "denied", "unavailable", "off", "empty"])
def test_no_value_is_in_a_log_an_error_or_a_path(
    google: GoogleServer, api: GoogleApi, caplog: pytest.LogCaptureFixture, trouble: str
) -> None:
    google.put_secret("dev-hf-token")
    if trouble == "denied":
        google.deny("*.addVersion", "secretmanager.versions.add")
    if trouble == "unavailable":
        google.fail("*.addVersion", 503, "UNAVAILABLE", "try later")
    if trouble == "off":
        google.disable_api("secretmanager")
    text = ""
    with caplog.at_level(logging.DEBUG):
        try:
            text += repr(put_secret(OUTPUTS, "hf-token", CANARY + (b"\0" if trouble == "empty" else b""), api))
        except RuntimeFailure as problem:
            text += problem.render() + repr(problem) + repr(problem.__dict__)
    text += caplog.text + "".join(request.path + str(request.headers) for request in google.log)

    assert text
    assert CANARY.decode() not in text
    assert fake.base64.b64encode(CANARY).decode() not in text


@given(st.binary(max_size=64))
def test_checksum_is_castagnolis(data: bytes) -> None:
    assert secrets.crc32c(data) == fake.crc32c(data)
