"""Google's JSON APIs: our requests, the failure for each answer, and that the fake refuses the same as Google."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from runtime.stack.google_api import GoogleApi, GoogleRefused, GoogleUnreachable
from tests.fakes.faults import FaultyServer, Request, Response
from tests.fakes.google import GoogleServer, Refusal, check_fields, crc32c, methods_of, read_document
from tests.services_support import replace_sleep


@pytest.fixture
def google() -> Iterator[GoogleServer]:
    server = GoogleServer().start()
    yield server
    server.stop()


@pytest.fixture
def api(google: GoogleServer, monkeypatch: pytest.MonkeyPatch) -> GoogleApi:
    replace_sleep(monkeypatch, lambda seconds: None)
    return GoogleApi(server=google.url)


TOPIC = "projects/p/topics/t"


def test_get_answers_what_is_there(google: GoogleServer, api: GoogleApi) -> None:
    google.put(TOPIC, name=TOPIC)

    assert api.get("pubsub", f"v1/{TOPIC}") == {"name": TOPIC}
    assert google.calls() == ["pubsub.projects.topics.get"]
    assert google.refused == []


def test_find_of_what_is_not_there_is_none_and_get_raises(api: GoogleApi) -> None:
    assert api.find("pubsub", f"v1/{TOPIC}") is None
    with pytest.raises(GoogleRefused) as refused:
        api.get("pubsub", f"v1/{TOPIC}")
    assert (refused.value.status, refused.value.reason, refused.value.retryable) == (404, "NOT_FOUND", False)


def test_pages_are_followed_to_the_last(google: GoogleServer, api: GoogleApi) -> None:
    secret = google.put_secret("s", *(bytes([number]) for number in range(1, 6)))

    versions = list(api.pages("secretmanager", f"v1/{secret}/versions", "versions"))

    assert [each["name"].rpartition("/")[2] for each in versions] == ["5", "4", "3", "2", "1"]
    assert len(google.calls("*.versions.list")) == 3


def test_pages_of_nothing_are_empty(google: GoogleServer, api: GoogleApi) -> None:
    assert list(api.pages("secretmanager", f"v1/{google.put_secret('s')}/versions", "versions")) == []


@pytest.mark.parametrize("status", [429, 500, 503])
def test_read_that_fails_in_passing_is_repeated(google: GoogleServer, api: GoogleApi, status: int) -> None:
    google.put(TOPIC, name=TOPIC)
    google.fail("pubsub.*", status, "UNAVAILABLE", "try later", times=2)

    assert api.get("pubsub", f"v1/{TOPIC}") == {"name": TOPIC}
    assert len(google.calls()) == 3


def test_read_that_keeps_failing_is_given_up(google: GoogleServer, api: GoogleApi) -> None:
    google.fail("pubsub.*", 503, "UNAVAILABLE", "The service is currently unavailable.")

    with pytest.raises(GoogleRefused) as refused:
        api.get("pubsub", f"v1/{TOPIC}")

    assert (refused.value.status, refused.value.retryable, len(google.calls())) == (503, True, 4)


def test_write_is_never_repeated(google: GoogleServer, api: GoogleApi) -> None:
    secret = google.put_secret("s")
    google.fail("*.addVersion", 503, "UNAVAILABLE", "try later", times=1)

    with pytest.raises(GoogleRefused):
        api.post("secretmanager", f"v1/{secret}:addVersion", {"payload": {"data": "eA=="}})

    assert len(google.calls()) == 1


def test_without_again_a_read_is_asked_once(google: GoogleServer) -> None:
    google.fail("pubsub.*", 503, "UNAVAILABLE", "try later")

    with pytest.raises(GoogleRefused):
        GoogleApi(server=google.url, again=False).get("pubsub", f"v1/{TOPIC}")

    assert len(google.calls()) == 1


def test_api_that_is_off_is_told_from_a_missing_permission(google: GoogleServer, api: GoogleApi) -> None:
    google.disable_api("pubsub", "Cloud Pub/Sub")
    google.deny("secretmanager.*", "secretmanager.secrets.get")

    with pytest.raises(GoogleRefused) as off:
        api.get("pubsub", f"v1/{TOPIC}")
    with pytest.raises(GoogleRefused) as denied:
        api.get("secretmanager", "v1/projects/p/secrets/s")

    assert (off.value.disabled_api, denied.value.disabled_api) == (True, False)
    assert "not enabled" in (off.value.hint or "")
    assert "runtime doctor" in (denied.value.hint or "")


def test_refusal_reads_as_one_sentence_with_its_facts(google: GoogleServer, api: GoogleApi) -> None:
    google.deny("pubsub.projects.topics.get", "pubsub.topics.get", on=TOPIC)

    with pytest.raises(GoogleRefused) as refused:
        api.get("pubsub", f"v1/{TOPIC}")

    url = f"{google.url}/pubsub.googleapis.com/v1/{TOPIC}"
    assert refused.value.render() == (
        f"error: google refused `GET {url}`: Permission 'pubsub.topics.get' denied on resource '//{TOPIC}' "
        "(or it may not exist)\n"
        "  answered 403 PERMISSION_DENIED\n"
        "hint: `runtime doctor` says what this identity may do"
    )


def test_allowed_is_what_this_identity_may_do(google: GoogleServer, api: GoogleApi) -> None:
    google.put(TOPIC, name=TOPIC)
    google.put("b/rec", name="rec")
    google.allowed = {"b/rec": {"storage.objects.get"}}

    assert api.allowed("pubsub", f"v1/{TOPIC}", ("pubsub.topics.publish",)) == {"pubsub.topics.publish"}
    asked = ("storage.objects.get", "storage.objects.create")
    assert api.allowed("storage", "storage/v1/b/rec", asked) == {"storage.objects.get"}
    assert api.allowed("pubsub", "v1/projects/p/topics/none", ("pubsub.topics.publish",)) == frozenset()
    assert google.refused == []


def test_who_is_the_user_or_the_account_that_is_acted_as(google: GoogleServer, api: GoogleApi) -> None:
    assert api.who() == "ada@example.org"
    assert GoogleApi(server=google.url, impersonate="deployer@p").who() == "deployer@p"


def test_skew_is_how_far_the_clock_is_ahead(google: GoogleServer, api: GoogleApi) -> None:
    google.clock_offset = timedelta(minutes=7)
    began = datetime.now(UTC)
    api.who()
    took = datetime.now(UTC) - began

    assert api.skew is not None
    # The answer's date is in whole seconds.
    assert timedelta(minutes=7) <= api.skew <= timedelta(minutes=7, seconds=1) + took


class LogInPage(FaultyServer):
    def answer(self, request: Request) -> Response:
        return Response(200, {"Content-Type": "text/html", "Date": "yesterday"}, b"<html>please log in</html>")


def test_page_of_a_proxy_is_no_answer(api: GoogleApi) -> None:
    page = LogInPage().start()
    try:
        with pytest.raises(GoogleUnreachable) as refused:
            GoogleApi(server=page.url).who()
    finally:
        page.stop()

    assert "no JSON" in refused.value.message
    assert "proxy" in (refused.value.hint or "")


def test_server_that_is_not_there_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = GoogleServer()
    gone._server.server_close()

    with pytest.raises(GoogleUnreachable) as refused:
        GoogleApi(server=gone.url, again=False).who()

    assert refused.value.retryable
    assert "the server cannot be reached" in refused.value.message


def test_machine_without_credentials_is_told_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "CLOUDSDK_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("runtime.records.blobs.bucket.METADATA", ("127.0.0.1", 9))

    with pytest.raises(GoogleUnreachable) as refused:
        GoogleApi()

    assert refused.value.message == "no Google credentials on this machine"
    assert refused.value.hint == "gcloud auth application-default login"


def test_credentials_that_cannot_be_read_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "key.json").write_text("{}")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))

    with pytest.raises(GoogleUnreachable) as refused:
        GoogleApi()

    assert "\n" not in refused.value.message
    assert not refused.value.retryable


# the fake refuses the same as Google


@pytest.mark.parametrize(
    ("verb", "path", "query", "body", "problem"),
    [
        ("get", f"v1/{TOPIC}s/x", {}, None, "no such method"),
        ("get", f"v2/{TOPIC}", {}, None, "no such method"),
        ("get", f"v1/{TOPIC}", {"colour": "blue"}, None, 'Unknown name "colour"'),
        ("post", f"v1/{TOPIC}:publish", {}, {"mesages": []}, 'Unknown name "mesages"'),
        ("post", f"v1/{TOPIC}:publish", {}, {"messages": [{"data": "not base64!"}]}, "Base64 decoding failed"),
        ("post", f"v1/{TOPIC}:publish", {}, {"messages": {}}, "is no list"),
        ("post", f"v1/{TOPIC}:publish", {}, {"messages": [{"data": 5}]}, "TYPE_STRING"),
        ("post", f"v1/{TOPIC}:testIamPermissions", {}, {"permissions": ["pubsub.topics.pubish"]}, "not valid for"),
        ("post", f"v1/{TOPIC}:publish", {}, {"messages": []}, "does not do `pubsub.projects.topics.publish`"),
    ],
)
def test_fake_refuses_what_google_does_not_describe(
    google: GoogleServer, api: GoogleApi, verb: str, path: str, query: Any, body: Any, problem: str
) -> None:
    google.put(TOPIC, name=TOPIC)

    with pytest.raises(GoogleRefused) as refused:
        api.get("pubsub", path, **query) if verb == "get" else api.post("pubsub", path, body, **query)

    assert problem in refused.value.message
    assert len(google.refused) == 1


@pytest.mark.parametrize(
    ("query", "body", "problem"),
    [
        ({"names": ["a", "b"], "key": ["1", "2"]}, None, "is not repeated"),
        ({"names": [f"projects/p/services/s{number}" for number in range(31)]}, None, "too many names"),
    ],
)
def test_fake_holds_to_limits_of_queries(
    google: GoogleServer, api: GoogleApi, query: Any, body: Any, problem: str
) -> None:
    with pytest.raises(GoogleRefused) as refused:
        api.get("serviceusage", "v1/projects/p/services:batchGet", **query)

    assert problem in refused.value.message


def test_fake_checks_its_own_answers(google: GoogleServer, api: GoogleApi) -> None:
    google.put(TOPIC, nmae=TOPIC)

    with pytest.raises(GoogleRefused) as refused:
        api.get("pubsub", f"v1/{TOPIC}")

    assert "Unknown name \"nmae\" at 'answer'" in refused.value.message


def test_fake_knows_every_method_of_its_documents() -> None:
    """A document that loads as empty would refuse nothing."""
    for host in ("pubsub", "storage", "compute", "iam", "secretmanager", "tpu", "orgpolicy", "serviceusage", "www"):
        assert methods_of(f"{host}.googleapis.com"), host
    assert methods_of("nothing.googleapis.com") == ()


def test_schema_check_takes_what_is_right_and_refuses_what_is_not() -> None:
    schemas = read_document("secretmanager.v1")["schemas"]
    schema = schemas["AddSecretVersionRequest"]
    check_fields({"payload": {"data": "eA==", "dataCrc32c": "12"}}, schema, schemas, "")

    for wrong in (
        {"payload": {"data": "eA==", "dataCrc32c": "x"}},
        {"payload": "eA=="},
        {"data": "eA=="},
        [],
    ):
        with pytest.raises(Refusal):
            check_fields(wrong, schema, schemas, "")


def test_fake_keeps_soft_deleted_and_foreign_names(google: GoogleServer, api: GoogleApi) -> None:
    google.foreign.add("b/theirs")
    google.deleted_buckets["gone"] = {"generation": "7", "hardDeleteTime": "2026-11-28T00:00:00Z"}

    with pytest.raises(GoogleRefused) as theirs:
        api.find("storage", "storage/v1/b/theirs")
    deleted = list(api.pages("storage", "storage/v1/b", "items", project="p", softDeleted="true"))

    assert theirs.value.status == 403
    assert [each["name"] for each in deleted] == ["gone"]
    assert list(api.pages("storage", "storage/v1/b", "items", project="p")) == []


def test_crc32c_is_castagnolis() -> None:
    assert crc32c(b"123456789") == 0xE3069283


def test_calls_from_several_threads_are_all_answered(google: GoogleServer, api: GoogleApi) -> None:
    google.put(TOPIC, name=TOPIC)
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(api.get("pubsub", f"v1/{TOPIC}"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert found == [{"name": TOPIC}] * 8


ACCOUNT = "dev-worker@p.iam.gserviceaccount.com"
MAKE_TOKEN = f"https://iamcredentials.googleapis.com/v1/projects/-/serviceAccounts/{ACCOUNT}:generateAccessToken"


@pytest.mark.parametrize(
    "content",
    [
        {
            "type": "impersonated_service_account",
            "source_credentials": {
                "type": "authorized_user",
                "client_id": "c",
                "client_secret": "c",
                "refresh_token": "c",
            },
        },
        {
            "type": "external_account",
            "audience": "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/clusters/providers/hpc",
            "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
            "token_url": "https://sts.googleapis.com/v1/token",
            "credential_source": {"file": "/run/runtime/token"},
        },
    ],
    ids=lambda content: content["type"],
)
def test_credentials_of_a_machine_outside_google_are_those_of_the_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: dict[str, Any]
) -> None:
    """docs/signing-in.md has how they are made. Nothing is asked of Google here."""
    file = tmp_path / "worker.json"
    file.write_text(json.dumps({**content, "service_account_impersonation_url": MAKE_TOKEN}))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "p")

    assert GoogleApi().who() == ACCOUNT
