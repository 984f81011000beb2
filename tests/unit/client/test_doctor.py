"""The doctor's findings about this machine, the contract, and the permissions of an identity."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from runtime.client import doctor
from runtime.client.doctor import DoctorVerdict, Line, examine
from runtime.config import Settings, load_settings
from runtime.outputs import (
    ClusterOutput,
    IdentityOutput,
    KubernetesOutput,
    NamespaceOutput,
    OtherQueueOutput,
    PubSubQueueOutput,
    RecordsOutput,
    RegistryOutput,
    SecretOutput,
    StackOutputs,
    encode_outputs,
)
from runtime.queues.pubsub.client import ensure_topics
from runtime.queues.sqlite.queue import open_sqlite
from runtime.stack import find as stacks
from runtime.stack.find import read_stack
from runtime.stack.publish import Commit, plan_publication, publish
from tests.fakes.faults import FaultyServer, Request, Response
from tests.fakes.gcs import GcsServer
from tests.fakes.google import GoogleServer
from tests.services_support import PubsubEmulator

TOPIC, SUBSCRIPTION = "projects/p/topics/dev-default", "projects/p/subscriptions/dev-default"
DEAD_TOPIC, DEAD_SUBSCRIPTION = "projects/p/topics/dev-default-dead", "projects/p/subscriptions/dev-default-dead"
QUEUE = PubSubQueueOutput(
    topic=TOPIC, subscription=SUBSCRIPTION, dead_letter_topic=DEAD_TOPIC, dead_letter_subscription=DEAD_SUBSCRIPTION
)
REPOSITORY = "projects/p/locations/us-west4/repositories/dev-images"
CLUSTER = ClusterOutput(
    head="ray-dev-main-head",
    cluster_name="dev-main",
    zone="us-west4-a",
    internal_ip="10.0.0.2",
    image="i@sha256:0",
    worker_identity="w@p",
    config_sha256="ab",
)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr(stacks, "_has_pulumi", lambda: False)
    for name in ("PUBSUB_EMULATOR_HOST", "STORAGE_EMULATOR_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor.shutil, "which", lambda tool: None)
    for patience in ("TOOL_PATIENCE_S", "WEB_PATIENCE_S", "EXAMINED_S"):
        monkeypatch.setattr(doctor, patience, 240.0)
    monkeypatch.setattr(doctor, "PROBE_PATIENCE", timedelta(seconds=240))
    environ = {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "RUNTIME_DATA_DIR": str(tmp_path / "data"),
    }
    return load_settings(environ, tmp_path)


@pytest.fixture
def google() -> Iterator[GoogleServer]:
    server = GoogleServer().start()
    for resource in (TOPIC, SUBSCRIPTION, DEAD_TOPIC, DEAD_SUBSCRIPTION, REPOSITORY):
        server.put(resource, name=resource)
    server.put("b/lab", name="lab")
    server.put_secret("dev-hf-token", b"x", readers=["user:a"])
    server.put("projects/p/zones/us-west4-a/instances/ray-dev-main-head", name="ray-dev-main-head", status="RUNNING")
    yield server
    server.stop()
    assert server.refused == []


Examine = Callable[..., dict[str, Line]]


@pytest.fixture
def look(settings: Settings, google: GoogleServer, tmp_path: Path) -> Examine:
    def call(outputs: StackOutputs, **changes: Any) -> dict[str, Line]:
        path = tmp_path / "contract.json"
        path.write_text(encode_outputs(outputs))
        used = replace(settings, outputs=str(path), google_api=google.url)
        return {line.check: line for line in examine(None, replace(used, **changes))}

    return call


def verdicts(lines: dict[str, Line]) -> dict[str, str]:
    return {check: line.verdict.value for check, line in lines.items()}


FULL = StackOutputs(
    stack="dev",
    project="p",
    records=RecordsOutput(url="gs://lab"),
    queues={"default": QUEUE},
    registries={"images": {"us-west4": RegistryOutput(url="us-west4-docker.pkg.dev/p/dev-images")}},
    secrets={"hf-token": SecretOutput(resource="projects/p/secrets/dev-hf-token", env="HF_TOKEN")},
    clusters={"main": CLUSTER},
)


def test_nothing_configured_is_green_and_asks_nobody(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("socket.socket.connect", None)

    lines = list(examine(None, settings))

    assert [(line.check, line.verdict) for line in lines] == [
        (check, DoctorVerdict.OK) for check in ("program", "data folder", "stack", "queue default", "records")
    ]
    assert not (tmp_path / "data").exists()


def test_worker_of_a_full_stack_is_green(look: Examine, google: GoogleServer) -> None:
    lines = look(FULL)

    assert {check: (line.verdict.value, line.text) for check, line in lines.items() if check not in ("program", "data folder", "stack", "contract")} == {
        "identity": ("ok", "ada@example.org"),
        "clock": ("ok", "agrees with Google's"),
        "queue default": ("ok", "publish, pull, publish dead letters and pull dead letters"),
        "records": ("ok", "gs://lab: read, list, create, replace"),
        "registry images us-west4": ("ok", "pull and push, us-west4-docker.pkg.dev/p/dev-images"),
        "secret hf-token": ("ok", "version 1 for HF_TOKEN; this identity may read it"),
        "cluster main": ("ok", "head `ray-dev-main-head` runs"),
        "container tool": ("warn", "none; only `runtime image build` needs one"),
        "pulumi": ("ok", "not installed; only who changes the stack needs it"),
    }  # fmt: skip
    assert google.calls("*.access") == []


def test_submitter_may_publish_and_not_pull(look: Examine, google: GoogleServer) -> None:
    google.allowed = {SUBSCRIPTION: set(), DEAD_TOPIC: set(), DEAD_SUBSCRIPTION: set()}

    line = look(FULL)["queue default"]

    assert (line.verdict, line.text) == (
        DoctorVerdict.WARN,
        "may publish; may not pull or publish dead letters or pull dead letters: enough to submit, not to work",
    )
    assert "`access`" in (line.fix or "")


def test_identity_without_rights_on_a_queue_fails(look: Examine, google: GoogleServer) -> None:
    google.allowed = {name: set() for name in (TOPIC, SUBSCRIPTION, DEAD_TOPIC, DEAD_SUBSCRIPTION)}
    google.deny("pubsub.projects.topics.get", "pubsub.topics.get")
    google.deny("pubsub.projects.subscriptions.get", "pubsub.subscriptions.get")

    line = look(FULL)["queue default"]

    assert line.verdict is DoctorVerdict.FAIL
    assert line.text.startswith("this identity may not publish or pull")


def test_queue_that_is_gone_is_told_from_one_that_is_forbidden(look: Examine, google: GoogleServer) -> None:
    del google.resources[SUBSCRIPTION]

    line = look(FULL)["queue default"]

    assert (line.verdict, line.text, line.fix) == (
        DoctorVerdict.FAIL,
        f"there is no subscription `{SUBSCRIPTION}`",
        "run `pulumi up --stack dev`",
    )


@pytest.mark.parametrize(
    ("lacking", "verdict", "text"),
    [
        ({"storage.objects.create"}, "warn", "may not create: enough to look"),
        ({"storage.objects.get", "storage.objects.list"}, "fail", "may not read or list in gs://lab"),
    ],
)
def test_records_say_what_is_lacking(
    look: Examine, google: GoogleServer, lacking: set[str], verdict: str, text: str
) -> None:
    every = {f"storage.objects.{word}" for word in ("get", "list", "create", "delete")}
    google.allowed = {"b/lab": every - lacking}

    line = look(FULL)["records"]

    assert line.verdict == verdict
    assert text in line.text
    assert "roles/storage.objectUser" in (line.fix or "")


@pytest.mark.parametrize(
    ("check", "gone"),
    [
        ("records", "b/lab"),
        ("registry images us-west4", REPOSITORY),
        ("cluster main", "projects/p/zones/us-west4-a/instances/ray-dev-main-head"),
    ],
)
def test_what_is_gone_fails_and_stops_nothing_else(look: Examine, google: GoogleServer, check: str, gone: str) -> None:
    del google.resources[gone]

    lines = look(FULL)

    assert [name for name, line in lines.items() if line.verdict is DoctorVerdict.FAIL] == [check]
    assert lines[check].fix


def test_registry_that_may_not_be_pulled_from_is_a_warning(look: Examine, google: GoogleServer) -> None:
    google.allowed = {REPOSITORY: set()}

    assert look(FULL)["registry images us-west4"].verdict is DoctorVerdict.WARN


def test_secret_that_others_read_is_in_order(look: Examine, google: GoogleServer) -> None:
    google.allowed = {"projects/p/secrets/dev-hf-token": set()}
    google.deny("*.getIamPolicy", "secretmanager.secrets.getIamPolicy")

    line = look(FULL)["secret hf-token"]

    assert (line.verdict, line.text) == (
        DoctorVerdict.OK,
        "version 1 for HF_TOKEN; this identity may not read it, and its readers may",
    )


GIVEN = replace(FULL, secrets={"hf-token": replace(FULL.secrets["hf-token"], attempts="all")})
WORKER = {"worker": IdentityOutput(email="ada@example.org", use="serves queues")}


@pytest.mark.parametrize(
    ("identities", "verdict", "text"),
    [
        (WORKER, "fail", "workers' identity ada@example.org may not read it: they give back the tasks whose attempts get it"),
        ({}, "ok", "version 1 for HF_TOKEN; this identity may not read it, and its readers may"),
    ],
)  # fmt: skip
def test_secret_for_attempts_that_the_identity_of_workers_may_not_read_fails(
    look: Examine, google: GoogleServer, identities: dict[str, IdentityOutput], verdict: str, text: str
) -> None:
    google.allowed = {"projects/p/secrets/dev-hf-token": set()}

    line = look(replace(GIVEN, identities=identities))["secret hf-token"]

    assert (line.verdict.value, line.text) == (verdict, text)


def test_secret_for_attempts_needs_no_more_than_the_right_to_read_it(look: Examine, google: GoogleServer) -> None:
    google.allowed = {"projects/p/secrets/dev-hf-token": {"secretmanager.versions.access"}}
    google.deny("*.versions.list", "secretmanager.versions.list", on="dev-hf-token")

    line = look(replace(GIVEN, identities=WORKER))["secret hf-token"]

    assert (line.verdict.value, line.text) == ("ok", "this identity may read it, and attempts get it as HF_TOKEN")


def test_secret_whose_versions_are_hidden_is_a_warning_and_one_without_a_value_fails(
    look: Examine, google: GoogleServer
) -> None:
    google.deny("*.versions.list", "secretmanager.versions.list", on="dev-hf-token")
    assert look(FULL)["secret hf-token"].verdict is DoctorVerdict.WARN

    google._troubles.clear()
    google.put_secret("dev-hf-token", readers=["user:a"])
    line = look(FULL)["secret hf-token"]
    assert (line.verdict, line.text, line.fix) == (
        DoctorVerdict.FAIL,
        "it has no value yet",
        "runtime secrets put hf-token --stack dev",
    )


def test_api_that_is_off_fails_where_it_is_needed_and_says_what_to_run(look: Examine, google: GoogleServer) -> None:
    google.disable_api("pubsub", "Cloud Pub/Sub")

    line = look(FULL)["queue default"]

    assert line.verdict is DoctorVerdict.FAIL
    assert "has not been used in project" in line.text
    assert "pulumi up" in (line.fix or "")


@pytest.mark.parametrize(
    ("skew", "verdict"),
    [
        (timedelta(0), "ok"),
        (timedelta(minutes=2), "warn"),
        (timedelta(minutes=-2), "warn"),
        (timedelta(hours=1), "fail"),
    ],
)
def test_clock_is_compared_with_googles(look: Examine, google: GoogleServer, skew: timedelta, verdict: str) -> None:
    google.clock_offset = skew

    line = look(FULL)["clock"]

    assert line.verdict == verdict
    if skew:
        assert ("ahead of" if skew > timedelta(0) else "behind") in line.text


def test_head_that_is_stopped_fails_with_the_command_that_starts_it(look: Examine, google: GoogleServer) -> None:
    google.resources["projects/p/zones/us-west4-a/instances/ray-dev-main-head"]["status"] = "TERMINATED"

    line = look(FULL)["cluster main"]

    assert (line.verdict, line.text) == (DoctorVerdict.FAIL, "head `ray-dev-main-head` is terminated")
    assert line.fix == "gcloud compute instances start ray-dev-main-head --zone us-west4-a"


def test_head_that_is_operators_business_is_in_order(look: Examine, google: GoogleServer) -> None:
    google.deny("compute.instances.get", "compute.instances.get")

    assert look(FULL)["cluster main"].verdict is DoctorVerdict.OK


def test_without_network_it_says_so_once_and_the_rest_is_not_checked(look: Examine) -> None:
    gone = GoogleServer()
    gone._server.server_close()

    lines = look(FULL, google_api=gone.url)

    assert (lines["identity"].verdict, lines["identity"].fix) == (
        DoctorVerdict.FAIL,
        "check the network, then try again",
    )
    unchecked = [check for check, line in lines.items() if line.text.startswith("not checked")]
    assert unchecked == ["queue default", "records", "registry images us-west4", "secret hf-token", "cluster main"]
    assert {lines[check].verdict for check in unchecked} == {DoctorVerdict.WARN}


def test_without_credentials_it_says_how_to_get_some(
    look: Examine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "CLOUDSDK_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("runtime.records.blobs.bucket.METADATA", ("127.0.0.1", 9))

    line = look(FULL, google_api=None)["identity"]

    assert (line.verdict, line.fix) == (DoctorVerdict.FAIL, "gcloud auth application-default login")


def test_identity_that_may_not_ask_its_name_is_in_order(look: Examine, google: GoogleServer) -> None:
    google.fail("oauth2.userinfo.get", 403, "PERMISSION_DENIED", "insufficient scopes")

    lines = look(FULL)

    assert lines["identity"].text == "credentials that do not tell whose they are"
    assert lines["queue default"].verdict is DoctorVerdict.OK


def test_rejected_credentials_fail(look: Examine, google: GoogleServer) -> None:
    google.fail("oauth2.userinfo.get", 401, "UNAUTHENTICATED", "Request had invalid authentication credentials.")

    assert look(FULL)["identity"].verdict is DoctorVerdict.FAIL


# the contract


def test_stack_that_cannot_be_found_fails_with_what_each_source_said(settings: Settings) -> None:
    lines = {line.check: line for line in examine("dve", settings)}

    assert list(lines) == ["program", "data folder", "stack"]
    assert lines["stack"].verdict is DoctorVerdict.FAIL
    assert "pulumi: not installed here" in lines["stack"].text


class SourceOfPulumi:
    """Returns the test's text instead of calling the `pulumi` command."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.text = ""
        monkeypatch.setattr(stacks, "_has_pulumi", lambda: True)
        monkeypatch.setattr(stacks, "_run_pulumi", self.run)

    def run(self, *args: str) -> Any:
        import subprocess

        text = "[]" if args[:2] == ("stack", "ls") else self.text
        return subprocess.CompletedProcess(args, 0, text, "")


def test_contract_is_compared_with_its_published_copy(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pulumi = SourceOfPulumi(monkeypatch)
    url = str(tmp_path / "v1.json")
    outputs = StackOutputs(stack="dev", published_url=url)
    pulumi.text = encode_outputs(outputs)

    def contract() -> Line:
        return next(line for line in examine("dev", settings) if line.check == "contract")

    unpublished = contract()
    plan = plan_publication(read_stack("dev"), now=datetime.now(UTC), commit=Commit("c" * 40, None))
    publish(plan)
    current = contract()
    pulumi.text = encode_outputs(replace(outputs, region="us-west4"))
    stale = contract()
    Path(url).write_text(Path(url).read_text().replace("dev", "dve"))
    altered = contract()

    assert [line.verdict.value for line in (unpublished, current, stale, altered)] == ["warn", "ok", "warn", "fail"]
    assert unpublished.fix == "runtime stack publish --stack dev"
    assert current.text.startswith("the published copy says the same")
    assert "says something else" in stale.text
    assert "runtime stack diff" in (stale.fix or "")


def test_published_copy_tells_its_age_and_commit(settings: Settings, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(encode_outputs(StackOutputs(stack="dev")))
    found = read_stack(str(path))
    at = datetime.now(UTC) - timedelta(hours=3)
    publish(plan_publication(found, now=at, to=str(path), commit=Commit("c" * 40, None)))

    lines = {line.check: line for line in examine(None, replace(settings, outputs=str(path)))}

    assert (lines["contract"].verdict, lines["contract"].text) == (
        DoctorVerdict.OK,
        "published 3h ago, commit cccccccccccc; its digest is right",
    )


def test_cached_contract_is_a_warning_with_the_command_that_reads_it_anew(settings: Settings, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(encode_outputs(StackOutputs(stack="dev")))
    used = replace(settings, outputs=str(path))
    list(examine(None, used))
    path.unlink()

    line = next(line for line in examine(None, used) if line.check == "stack")

    assert (line.verdict, line.fix) == (DoctorVerdict.WARN, f"runtime stack pull {path}")


# this machine, and real probes


def test_data_folder_that_cannot_be_made_fails(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    lines = {line.check: line for line in examine(None, replace(settings, data_dir=tmp_path / "file" / "data"))}

    assert lines["data folder"].verdict is DoctorVerdict.FAIL
    assert "RUNTIME_DATA_DIR" in (lines["data folder"].fix or "")


@pytest.mark.parametrize(("free", "verdict"), [(10**12, "ok"), (10**9, "warn"), (10**7, "fail")])
def test_free_space_is_judged(settings: Settings, monkeypatch: pytest.MonkeyPatch, free: int, verdict: str) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda place: type("Usage", (), {"free": free}))

    lines = {line.check: line for line in examine(None, settings)}

    assert lines["data folder"].verdict == verdict


def test_task_file_that_is_none_fails(settings: Settings) -> None:
    settings.data_dir.mkdir()
    (settings.data_dir / "local.db").write_bytes(b"not a database, whatever else it is" * 100)

    lines = {line.check: line for line in examine(None, settings)}

    assert lines["queue default"].verdict is DoctorVerdict.FAIL
    assert lines["records"].verdict is DoctorVerdict.FAIL


def test_task_file_that_is_there_is_read_only_looked_at(settings: Settings) -> None:
    settings.data_dir.mkdir()
    path = settings.data_dir / "local.db"
    queue, _ = open_sqlite(path)
    queue.pause()
    queue.close()
    before = path.read_bytes()

    lines = {line.check: line for line in examine(None, settings)}

    assert lines["queue default"].verdict is DoctorVerdict.OK
    assert path.read_bytes() == before


def test_task_file_with_a_damaged_page_fails_and_says_how_to_recover_it(settings: Settings) -> None:
    settings.data_dir.mkdir()
    path = settings.data_dir / "local.db"
    queue, _ = open_sqlite(path)
    queue.pause()
    queue.close()
    pages = bytearray(path.read_bytes())
    pages[3 * 4096 : 4 * 4096] = bytes(4096)
    path.write_bytes(pages)

    lines = {line.check: line for line in examine(None, settings)}

    assert lines["queue default"].verdict is DoctorVerdict.FAIL
    assert f"runtime doctor --recover --file {path}" in (lines["queue default"].fix or "")


def test_records_in_a_folder_are_proven(look: Examine, tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    outputs = StackOutputs(stack="dev", records=RecordsOutput(url=f"file:{tmp_path}/records"))

    assert look(outputs)["records"].verdict is DoctorVerdict.OK
    missing = StackOutputs(stack="dev", records=RecordsOutput(url=f"file:{tmp_path}/nowhere"))
    assert look(missing)["records"].verdict is DoctorVerdict.FAIL


def test_records_in_a_bucket_that_forgets_conditions_fail(look: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    gcs = GcsServer().start()
    gcs.make_bucket("safe")
    gcs.make_bucket("unsafe")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs.url)
    try:
        safe = look(StackOutputs(stack="dev", records=RecordsOutput(url="gs://safe")))["records"]
        gcs.conditional = False
        unsafe = look(StackOutputs(stack="dev", records=RecordsOutput(url="gs://unsafe")))["records"]
    finally:
        gcs.stop()

    assert (safe.verdict, unsafe.verdict) == (DoctorVerdict.OK, DoctorVerdict.FAIL)
    assert "does not keep the first of two writes" in unsafe.text


def test_queues_without_records_fail_and_say_what_to_add(look: Examine) -> None:
    line = look(replace(FULL, records=None))["records"]

    assert (line.verdict, line.fix) == (
        DoctorVerdict.FAIL,
        "add `records` to Pulumi.dev.yaml, then run `pulumi up --stack dev`",
    )


def test_queue_of_an_unknown_kind_is_a_warning(look: Examine) -> None:
    line = look(StackOutputs(stack="dev", queues={"default": OtherQueueOutput(kind="kafka")}))["queue default"]

    assert (line.verdict, line.fix) == (DoctorVerdict.WARN, "pip install --upgrade research-runtime")


class FakeEmulator(FaultyServer):
    def __init__(self, known: set[str]) -> None:
        super().__init__()
        self.known = known

    def answer(self, request: Request) -> Response:
        return Response(200 if request.path.removeprefix("/v1/") in self.known else 404, body=b"{}")


@pytest.mark.parametrize(
    ("known", "verdict"), [({TOPIC, SUBSCRIPTION}, "ok"), ({TOPIC}, "warn"), (set(), "warn"), (None, "fail")]
)
def test_queue_on_an_emulator_is_asked_for_there(
    look: Examine, monkeypatch: pytest.MonkeyPatch, known: set[str] | None, verdict: str
) -> None:
    emulator = FakeEmulator(known or set()).start()
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", emulator.url.removeprefix("http://"))
    if known is None:
        emulator.stop()
    try:
        line = look(replace(FULL, secrets={}, clusters={}, registries={}, records=None))["queue default"]
    finally:
        if known is not None:
            emulator.stop()

    assert line.verdict == verdict


def test_queue_on_the_real_emulator_is_seen(look: Examine, pubsub_emulator: PubsubEmulator) -> None:
    outputs = replace(FULL, secrets={}, clusters={}, registries={}, records=None)
    missing = look(outputs)["queue default"]

    ensure_topics(QUEUE)

    assert missing.verdict is DoctorVerdict.WARN
    assert look(outputs)["queue default"].text.startswith("publish and pull, on the emulator")


@pytest.mark.parametrize(("status", "verdict"), [(200, "ok"), (401, "ok"), (404, "warn")])
def test_registry_elsewhere_is_asked_whether_it_is_one(look: Examine, status: int, verdict: str) -> None:
    class Registry(FaultyServer):
        def answer(self, request: Request) -> Response:
            return Response(status if request.path == "/v2/" else 500)

    server = Registry().start()
    try:
        url = server.url.removeprefix("http://") + "/images"
        line = look(StackOutputs(stack="dev", registries={"images": {"here": RegistryOutput(url=url)}}))
    finally:
        server.stop()

    assert line["registry images here"].verdict == verdict


KUBECTL = """#!/bin/sh
case "$*" in
  *get-contexts*) echo nautilus; echo other ;;
  *can-i*-n*) exit 9 ;;
  *closed*can-i*) echo no; exit 1 ;;
  *silent*can-i*) echo "Unable to connect" >&2; exit 1 ;;
  *can-i*) echo yes ;;
esac
"""


def test_kubernetes_is_asked_by_its_context(look: Examine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "bin" / "kubectl"
    tool.parent.mkdir()
    tool.write_text(KUBECTL)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: str(tool) if name == "kubectl" else None)
    spaces = {name: NamespaceOutput(service_account="sa") for name in ("lab", "closed", "silent")}
    outputs = StackOutputs(
        stack="dev",
        kubernetes={
            "nautilus": KubernetesOutput(context="nautilus", server="https://k", namespaces=spaces),
            "mars": KubernetesOutput(context="mars", server="https://m"),
        },
    )

    lines = look(outputs)

    assert {check: line.verdict.value for check, line in lines.items() if check.startswith("kubernetes")} == {
        "kubernetes mars": "fail",
        "kubernetes nautilus closed": "fail",
        "kubernetes nautilus lab": "ok",
        "kubernetes nautilus silent": "fail",
    }
    assert "it knows nautilus, other" in lines["kubernetes mars"].text
    assert "`launchers`" in (lines["kubernetes nautilus closed"].fix or "")
    assert "does not answer" in lines["kubernetes nautilus silent"].text


def test_every_line_that_is_not_ok_has_a_fix(look: Examine, google: GoogleServer) -> None:
    google.resources.clear()
    google.versions.clear()

    lines = look(FULL)

    assert {
        check: line.fix for check, line in lines.items() if line.verdict is not DoctorVerdict.OK and not line.fix
    } == {}
    assert sum(line.verdict is DoctorVerdict.FAIL for line in lines.values()) == 5
