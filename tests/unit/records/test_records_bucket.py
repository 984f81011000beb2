"""Records in buckets of a failing service: each fault on a GCS fake, and on moto's S3 through a proxy."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from runtime.errors import InvalidValue, MissingExtra, RuntimeFailure, StoreUnavailable, StoreUnsafe
from runtime.records import open_records
from runtime.records.base import RecordExists
from runtime.records.blobs.bucket import BucketBlobs, _google_credentials
from runtime.records.store import BlobRecords
from runtime.tasks.model import TaskState
from runtime.testing import sample_task
from tests.conformance.records_cases import make_s3_bucket, sample_mark, sample_record
from tests.fakes.faults import Fault, FaultProxy, FaultyServer, Request, Response
from tests.fakes.gcs import GcsServer

if TYPE_CHECKING:
    from tests.services_support import MotoServer


@dataclass
class Bucket:
    server: FaultyServer
    url: str

    def blobs(self, *, timeout_s: float = 60, retry_for_s: float = 240) -> BucketBlobs:
        return BucketBlobs(self.url, timeout=timedelta(seconds=timeout_s), retry_for=timedelta(seconds=retry_for_s))

    def store(self, fault: Fault | None = None, *, retry_for_s: float = 240) -> BlobRecords:
        """Open a store; if the fault is a missing answer, its time-out is short."""
        hasty = fault is Fault.STORE_THEN_STALL
        store = BlobRecords(self.blobs(timeout_s=0.5 if hasty else 60, retry_for_s=retry_for_s))
        store.put_experiment("sample", queue=None)
        self.server.requests.clear()
        return store


@pytest.fixture
def gcs_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[GcsServer]:
    server = GcsServer().start()
    server.make_bucket("lab")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    yield server
    server.stop()


@pytest.fixture(params=["gcs", pytest.param("s3", marks=pytest.mark.service)])
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    if request.param == "gcs":
        server: FaultyServer = request.getfixturevalue("gcs_server")
        server.stall_s = 1.5
        yield Bucket(server, "gs://lab/prefix")
        return
    moto: MotoServer = request.getfixturevalue("moto_server")
    make_s3_bucket(moto, "lab")
    proxy = FaultProxy(moto.address).start()
    proxy.stall_s = 1.5
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    yield Bucket(proxy, "s3://lab/prefix")
    proxy.stop()


STORED = [Fault.STORE_THEN_503, Fault.STORE_THEN_DROP, Fault.STORE_THEN_STALL]
REFUSED = [Fault.REFUSE_503, Fault.REFUSE_429]


@pytest.mark.parametrize("fault", [*STORED, *REFUSED])
def test_commit_through_a_fault_wins_and_does_not_lose_to_itself(bucket: Bucket, fault: Fault) -> None:
    store = bucket.store(fault)
    record = sample_record(sample_task(), token="a1")
    bucket.server.fail_next("PUT", [fault])

    store.commit(record)

    assert bucket.server.faults_left == 0
    assert store.find_all(record.task_id) == [record]


@pytest.mark.parametrize("fault", [*STORED, *REFUSED])
def test_commit_through_a_fault_loses_to_an_earlier_record(bucket: Bucket, fault: Fault) -> None:
    store = bucket.store(fault)
    first = sample_record(sample_task(), token="a1")
    store.commit(first)
    bucket.server.fail_next("PUT", [fault])

    with pytest.raises(RecordExists) as refused:
        store.commit(sample_record(sample_task(), token="b2"))

    assert refused.value.record == first
    assert store.find(first.task_id, 1) == first


@pytest.mark.parametrize("fault", [Fault.STORE_THEN_503, Fault.STORE_THEN_DROP])
def test_commits_of_two_through_faults_at_once_have_one_winner(bucket: Bucket, fault: Fault) -> None:
    for round_number in range(5):
        stores = [bucket.store() for _ in range(4)]
        bucket.server.fail_next("PUT", [fault] * 3)
        barrier = threading.Barrier(len(stores))
        winners: list[str] = []

        def race(number: int, stores=stores, barrier=barrier, winners=winners, key=str(round_number)) -> None:  # type: ignore[no-untyped-def]
            barrier.wait()
            try:
                stores[number].commit(sample_record(sample_task(key), token=f"token-{number}"))
                winners.append(f"token-{number}")
            except RecordExists:
                pass

        threads = [threading.Thread(target=race, args=(number,)) for number in range(len(stores))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        found = stores[0].find(sample_task(str(round_number)).id, 1)
        assert found is not None
        assert winners == [found.token]


def test_commit_that_meets_a_write_under_way_tries_until_one_is_there(bucket: Bucket) -> None:
    store = bucket.store()
    record = sample_record(sample_task())
    bucket.server.fail_next("PUT", [Fault.CONFLICT_409, Fault.CONFLICT_409])

    store.commit(record)

    assert store.find(record.task_id, 1) == record


def test_create_that_s3_refuses_for_another_write_is_tried_again(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """409 while another write of the key is under way, which then fails."""
    blobs = bucket.blobs()
    library, refusals = blobs._obstore, iter([True])
    put = library.put

    def refuse_once(*args: Any, **named: Any) -> Any:
        if next(refusals, False):
            raise library.exceptions.AlreadyExistsError("409 Conflict")
        return put(*args, **named)

    monkeypatch.setattr(library, "put", refuse_once)

    assert (blobs.create("a/b", b"1"), blobs.get("a/b"), blobs.create("a/b", b"2")) == (True, b"1", False)


def test_commit_costs_one_conditional_request(bucket: Bucket) -> None:
    store = bucket.store()

    for n in range(10):
        store.commit(sample_record(sample_task(str(n))))

    assert dict(bucket.server.requests) == {"PUT": 10}


@pytest.mark.parametrize("kind", ["GET", "LIST"])
@pytest.mark.parametrize("fault", [Fault.REFUSE_503, Fault.REFUSE_429, Fault.STORE_THEN_DROP, Fault.STORE_THEN_STALL])
def test_reads_through_a_fault_are_tried_again(bucket: Bucket, kind: str, fault: Fault) -> None:
    store = bucket.store(fault)
    record = sample_record(sample_task())
    store.commit(record)
    bucket.server.fail_next(kind, [fault])

    assert store.find_all(record.task_id) == [record]
    assert bucket.server.faults_left == 0


@pytest.mark.parametrize("ranges", [True, False])
def test_download_that_is_cut_off_begins_again_or_goes_on_and_writes_each_byte_once(
    gcs_server: GcsServer, tmp_path: Path, ranges: bool
) -> None:
    blobs, data = BucketBlobs("gs://lab/p"), os.urandom(300_000)
    blobs.put("large", data)
    gcs_server.ranges = ranges
    gcs_server.fail_next("GET", [Fault.CUT_OFF])

    with (tmp_path / "large").open("wb") as file:
        blobs.download("large", file)

    assert (tmp_path / "large").read_bytes() == data
    assert gcs_server.requests["GET"] == (2 if ranges else 3)


def test_append_adds_numbered_objects_and_looks_for_earlier_ones_once(bucket: Bucket) -> None:
    first = bucket.blobs()
    for data in (b"a", b"b", b"c"):
        first.append("logs/t.log", data)
    listings = bucket.server.requests["LIST"]
    bucket.blobs().append("logs/t.log", b"d")
    first.append("logs/t.log", b"e")

    assert listings == 1
    assert list(first.list_keys("logs/")) == [f"logs/t.0000{number}.log" for number in range(5)]
    assert b"".join(first.stream("logs/t.log")) == b"abcde"


@pytest.mark.parametrize("fault", [*STORED, *REFUSED])
def test_other_writes_through_a_fault_hold_once(bucket: Bucket, fault: Fault) -> None:
    store = bucket.store(fault)
    task = sample_task()

    bucket.server.fail_next("PUT", [fault])
    part = store.put_part("sample", 0, ["a", "b"])
    bucket.server.fail_next("PUT", [fault])
    store.mark_sent(part)
    bucket.server.fail_next("PUT", [fault])
    store.mark(sample_mark(task))
    bucket.server.fail_next("PUT", [fault])
    store.put_counters("w-1", {"sample": {TaskState.SUCCEEDED: 1}})
    bucket.server.fail_next("PUT", [fault])
    url = store.append_log(task.id, "a1", b"one ")
    store.append_log(task.id, "a1", b"two")

    assert bucket.server.faults_left == 0
    assert [(found.count, found.sent) for found in store.parts("sample")] == [(2, True)]
    assert store.totals("sample").counts[TaskState.SUCCEEDED] == 1
    assert b"".join(store.read_log(url)) == b"one two"


def test_commit_while_the_service_is_down_fails_as_retryable_and_may_be_called_again(bucket: Bucket) -> None:
    store = bucket.store(retry_for_s=3)
    record = sample_record(sample_task())
    bucket.server.fail_next("PUT", [Fault.REFUSE_503] * 1000)
    with pytest.raises(StoreUnavailable) as down:
        store.commit(record)
    bucket.server.forget_faults()

    assert down.value.retryable
    assert down.value.exit_code == 3
    store.commit(record)
    assert store.find(record.task_id, 1) == record


def test_nobody_listening_fails_as_retryable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "127.0.0.1:9")

    with pytest.raises(StoreUnavailable) as down:
        BucketBlobs("gs://lab", retry_for=timedelta(seconds=0.2)).get("x")

    assert down.value.retryable
    assert "gs://lab/x" in down.value.facts[0]


def test_bucket_that_refuses_us_fails_for_good_with_the_command_that_helps(bucket: Bucket) -> None:
    store = bucket.store()
    calls: list[tuple[str, Callable[[], object]]] = [
        ("PUT", lambda: store.commit(sample_record(sample_task()))),
        ("GET", lambda: store.find(sample_task().id, 1)),
        ("LIST", lambda: list(store.records("sample"))),
    ]
    for kind, call in calls:
        bucket.server.fail_next(kind, [Fault.REFUSE_403])
        with pytest.raises(StoreUnavailable) as denied:
            call()
        assert not denied.value.retryable
        assert denied.value.message == "bucket `lab` refused us"
        assert denied.value.hint


class Answering(FaultyServer):
    """Gives every request the same status."""

    def __init__(self, status: int) -> None:
        super().__init__()
        self.status = status

    def answer(self, request: Request) -> Response:
        return Response(self.status, body=b"<Error><Code>Any</Code></Error>")


def test_failure_of_the_service_says_whether_the_same_call_may_succeed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Answering(0).start()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    blobs = BucketBlobs("gs://lab", retry_for=timedelta(0))
    retryable: dict[int, bool] = {}
    for server.status in (300, 400, 401, 403, 404, 408, 409, 425, 429, 451, 499, 500, 502, 503, 504):
        with pytest.raises(StoreUnavailable) as failed:
            blobs.put("x", b"")
        retryable[server.status] = failed.value.retryable
    server.stop()

    assert [status for status, again in retryable.items() if again] == [408, 409, 425, 429, 500, 502, 503, 504]


def test_missing_bucket_fails_for_good_on_every_call(bucket: Bucket) -> None:
    store = BlobRecords(BucketBlobs(bucket.url.replace("//lab", "//nowhere")))
    calls: list[Callable[[], object]] = [
        store.check,
        lambda: store.commit(sample_record(sample_task())),
        lambda: store.find(sample_task().id, 1),
        lambda: list(store.records("sample")),
        lambda: store.control("default"),
    ]
    for call in calls:
        with pytest.raises(StoreUnavailable) as missing:
            call()
        assert missing.value.message == "there is no bucket `nowhere`"
        assert not missing.value.retryable


def test_check_of_a_store_that_forgets_preconditions_refuses_it(gcs_server: GcsServer) -> None:
    gcs_server.conditional = False

    with pytest.raises(StoreUnsafe) as unsafe:
        open_records("gs://lab/unsafe").check()

    assert not unsafe.value.retryable


def test_list_of_a_prefix_inside_a_name_starts_there_and_stops_behind_it(bucket: Bucket) -> None:
    blobs = bucket.blobs()
    keys = sorted(["a/t-1.g1", "a/t-1.g2", "a/t-10.g1", "a/t-2.g1", "a/s", "ab/x", "a/t-1"])
    for key in keys:
        blobs.create(key, b"12")

    for prefix in ("a/t-1", "a/t-1.", "a/t-1.g", "a/t-", "a/", "a/z", "a/t-2.g1"):
        assert list(blobs.list_keys(prefix)) == [key for key in keys if key.startswith(prefix)]
        for after in keys:
            expected = [key for key in keys if key.startswith(prefix) and key > after]
            assert list(blobs.list_keys(prefix, after=after)) == expected
    assert [info.size for info in blobs.list_blobs("a/t-1.g1")] == [2]


def test_list_over_several_pages_misses_and_repeats_nothing(gcs_server: GcsServer) -> None:
    keys = [f"p/records/x/{n:05}" for n in range(3500)]
    gcs_server.fill("lab", [*keys, "p/records/w", "p/records/y", *(f"p/{n:05}" for n in range(1500))])
    blobs = BucketBlobs("gs://lab/p")

    assert [f"p/{key}" for key in blobs.list_keys("records/x/")] == keys
    assert gcs_server.requests["LIST"] == 4
    assert len(list(blobs.list_keys("records/x/03"))) == 500


def test_prefix_of_the_store_keeps_two_stores_in_one_bucket_apart(bucket: Bucket) -> None:
    first, second = BucketBlobs(bucket.url), BucketBlobs(f"{bucket.url}-2")
    first.create("a/x", b"1")

    assert second.get("a/x") is None
    assert list(second.list_keys("a/")) == []
    assert second.create("a/x", b"2")


@pytest.mark.parametrize("url", ["gs://", "s3:///x", "gs:bucket"])
def test_url_without_a_bucket_is_refused_with_the_shape_it_needs(url: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        open_records(url)

    assert "gs://BUCKET/PREFIX" in refused.value.allowed


@pytest.mark.parametrize(("url", "extra"), [("gs://lab", "gcp"), ("s3://lab", "ec2")])
def test_bucket_without_the_library_names_the_extra(monkeypatch: pytest.MonkeyPatch, url: str, extra: str) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)

    with pytest.raises(MissingExtra) as missing:
        open_records(url)

    assert missing.value.extra == extra


def test_errors_carry_no_credential(gcs_server: GcsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    gcs_server.fail_next("GET", [Fault.REFUSE_403])

    with pytest.raises(RuntimeFailure) as failed:
        BucketBlobs("gs://lab").get("x")

    assert "anonymous" not in failed.value.render()
    assert "Bearer" not in failed.value.render()


@pytest.mark.parametrize(
    ("content", "by_google_auth"),
    [
        ({"type": "service_account"}, False),
        ({"type": "authorized_user"}, False),
        ({"type": "external_account"}, True),
        ({"type": "impersonated_service_account"}, True),
    ],
)
def test_google_credentials_that_the_library_cannot_read_go_through_google_auth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: dict[str, str], by_google_auth: bool
) -> None:
    auth = pytest.importorskip("google.auth")
    file = tmp_path / "credentials.json"
    file.write_text(json.dumps(content))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))

    class Credentials:
        token = ""
        expiry = datetime(2026, 1, 1, tzinfo=UTC).replace(tzinfo=None)  # as the library gives it

        def refresh(self, _: object) -> None:
            self.token = "fresh"

    monkeypatch.setattr(auth, "default", lambda scopes: (Credentials(), None))

    options = _google_credentials()

    assert bool(options) is by_google_auth
    if by_google_auth:
        assert options["credential_provider"]() == {"token": "fresh", "expires_at": datetime(2026, 1, 1, tzinfo=UTC)}


def test_federated_credentials_whose_token_is_not_there_are_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("google.auth")
    file, token = tmp_path / "worker.json", tmp_path / "token"
    provider = "iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/clusters/providers/hpc"
    content = {
        "type": "external_account",
        "audience": f"//{provider}",
        "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
        "token_url": "https://sts.googleapis.com/v1/token",
        "credential_source": {"file": str(token)},
    }
    file.write_text(json.dumps(content))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    for name in ("GOOGLE_CLOUD_PROJECT", "GCLOUD_PROJECT"):
        monkeypatch.delenv(name, raising=False)

    with pytest.raises(StoreUnavailable) as failed:
        BucketBlobs("gs://lab")

    assert failed.value.message == f"credentials `{file}` cannot be used"
    assert failed.value.facts == (f"File '{token}' was not found.",)
    assert not failed.value.retryable


class Provider:
    """Gives credentials like the providers of `obstore.auth`, and fails a set number of times."""

    config: ClassVar = {"region": "eu-west-3"}

    def __init__(self, said: dict[str, Any], failures: int = 0) -> None:
        self.said, self.failures = said, failures

    def __call__(self) -> dict[str, Any]:
        self.failures -= 1
        if self.failures >= 0:
            raise RuntimeError("the session has ended: log in again")
        return self.said


def test_listing_that_cannot_go_around_a_name_says_which_and_what_to_do(
    gcs_server: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gcs_server.fill("lab", ["p/a//x", "p/a/y"])
    gcs_server.fail_next("LIST", [None, Fault.REFUSE_403])

    with pytest.raises(StoreUnavailable) as refused:
        list(BucketBlobs("gs://lab/p").list_keys("a/"))

    assert refused.value.render() == (
        "error: bucket `lab` cannot be listed around a name that is not ours\n"
        "  at `gs://lab/p/a/`\n"
        '  Encountered object with invalid path: Path "p/a//x" contained empty path segment\n'
        "  lab: 403 AccessDenied\n"
        "hint: remove that object"
    )
    assert not refused.value.retryable


@pytest.mark.parametrize(
    ("url", "command"), [("gs://lab", "gcloud auth application-default login"), ("s3://lab", "aws configure")]
)
def test_no_credentials_anywhere_is_said_at_once_with_the_command_to_log_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, command: str
) -> None:
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "STORAGE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("runtime.records.blobs.bucket.METADATA", ("127.0.0.1", 9))

    with pytest.raises(StoreUnavailable) as missing:
        open_records(url)

    assert missing.value.hint == f"`{command}`"
    assert not missing.value.retryable


@pytest.mark.parametrize(
    ("url", "variable"),
    [("gs://lab", ""), ("gs://lab", "GOOGLE_BEARER_TOKEN"), ("s3://lab", ""), ("s3://lab", "AWS_ACCESS_KEY_ID")],
)
def test_credentials_of_the_environment_or_of_the_machine_itself_are_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, variable: str
) -> None:
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "STORAGE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    if variable:
        monkeypatch.setenv(variable, "x")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    with socket.create_server(("127.0.0.1", 0)) as metadata:
        there = ("127.0.0.1", 9) if variable else metadata.getsockname()
        monkeypatch.setattr("runtime.records.blobs.bucket.METADATA", there)

        assert open_records(url).url == url


@pytest.mark.parametrize(
    ("url", "variable"), [("gs://lab", "GOOGLE_SERVICE_ACCOUNT_PATH"), ("s3://lab", "AWS_ACCESS_KEY_ID")]
)
def test_credentials_of_the_environment_that_are_half_there_are_named(
    monkeypatch: pytest.MonkeyPatch, url: str, variable: str
) -> None:
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "STORAGE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv(variable, "/nowhere")

    with pytest.raises(StoreUnavailable) as failed:
        open_records(url)

    assert failed.value.message == "bucket `lab` cannot be opened"
    assert not failed.value.retryable


def test_s3_bucket_of_another_region_fails_for_good_with_the_variable_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere(FaultyServer):
        def answer(self, request: Request) -> Response:
            return Response(301, body=b"<Error><Code>PermanentRedirect</Code></Error>")

    server = Elsewhere().start()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")

    with pytest.raises(StoreUnavailable) as failed:
        BucketBlobs("s3://lab").create("x", b"")
    server.stop()

    assert not failed.value.retryable
    assert failed.value.hint == "is `AWS_REGION` the bucket's region?"


AWS_PROFILE = """
import sys
from runtime.records import open_records
store = open_records("s3://lab/profile")
store.put_experiment("sample", queue=None)
print("boto3" in sys.modules)
"""


@pytest.mark.service
@pytest.mark.parametrize("profile", [True, False])
def test_s3_credentials_of_a_profile_are_read_where_the_environment_has_none(
    moto_server: MotoServer, tmp_path: Path, profile: bool
) -> None:
    make_s3_bucket(moto_server, "lab")
    environment = os.environ | moto_server.environment | {"HOME": str(tmp_path)}
    if profile:
        (tmp_path / ".aws").mkdir()
        (tmp_path / ".aws/credentials").write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
        del environment["AWS_ACCESS_KEY_ID"], environment["AWS_SECRET_ACCESS_KEY"]

    done = subprocess.run(
        [sys.executable, "-c", AWS_PROFILE], env=environment, capture_output=True, text=True, check=False
    )

    assert (done.stdout.strip(), done.stderr) == (str(profile), "")


# requests


def fill_with_a_large_experiment(server: GcsServer) -> None:
    """Store 30,000 submitted tasks, 29,400 records, 150 of them failures, and counters of 50 workers."""
    digest = sample_task().id[-8:]
    base = f"big/manifests/{digest}"
    server.fill("lab", (f"{base}/{n:05}-2000-{n:016x}.jsonl" for n in range(15)))
    server.fill("lab", (f"{base}/{n:05}-2000-{n:016x}.sent" for n in range(15)))
    ids = [f"t-{(n * 0x9E3779B97F4A7C15) % 2**64:016x}{digest}" for n in range(29_400)]
    # A record's length is its state: 4 bytes are a success, 5 a failure.
    server.fill("lab", (f"big/records/{digest}/{id[2]}/{id}.g1.json" for id in ids[150:]), b"1234")  # noqa: A001
    server.fill("lab", (f"big/records/{digest}/{id[2]}/{id}.g1.json" for id in ids[:150]), b"12345")  # noqa: A001
    server.fill("lab", (f"big/marks/{digest}/{id}.g1.failed.json" for id in ids[:150]))  # noqa: A001
    server.fill("lab", (f"big/counters/{digest}/w-{n:03}/1795248697390-s585-f3-c0-x0" for n in range(50)))
    server.fill("lab", ["big/experiments/{digest}-sample.json"], b"{}")


@pytest.mark.slow
def test_totals_of_30000_tasks_cost_few_requests_and_exact_ones_a_listing_per_1000(gcs_server: GcsServer) -> None:
    fill_with_a_large_experiment(gcs_server)
    list(BucketBlobs("gs://lab/big").list_keys("experiments/"))  # the fake sorts its names once
    store = open_records("gs://lab/big")
    gcs_server.requests.clear()

    totals = store.totals("sample")

    assert totals.counts == {TaskState.QUEUED: 600, TaskState.SUCCEEDED: 29_250, TaskState.FAILED: 150}
    assert set(gcs_server.requests) == {"LIST"}
    assert gcs_server.requests["LIST"] <= 10

    gcs_server.requests.clear()
    exact = store.totals("sample", exact=True)

    assert exact.counts == {TaskState.QUEUED: 600, TaskState.SUCCEEDED: 29_250, TaskState.FAILED: 150}
    assert exact.exact
    assert set(gcs_server.requests) == {"LIST"}
    # Each of the 16 prefixes may end with a partial page; one more request lists the manifest.
    assert gcs_server.requests["LIST"] <= 30 + 16 + 1


@pytest.mark.slow
def test_totals_of_120000_failures_do_not_list_their_marks(gcs_server: GcsServer) -> None:
    digest = sample_task().id[-8:]
    gcs_server.fill("lab", (f"all/marks/{digest}/t-{n:016x}{digest}.g1.failed.json" for n in range(120_000)))
    gcs_server.fill("lab", (f"all/manifests/{digest}/{n:05}-2000-{n:016x}.jsonl" for n in range(60)))
    gcs_server.fill("lab", [f"all/counters/{digest}/w-1/1795248697390-s0-f120000-c0-x0"])
    store = open_records("gs://lab/all")

    totals = store.totals("sample")

    assert totals.counts == {TaskState.QUEUED: 0, TaskState.FAILED: 120_000}
    assert gcs_server.requests.total() <= 100
