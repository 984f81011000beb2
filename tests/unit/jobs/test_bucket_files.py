"""Files of a record root in a bucket: the promises of every place, and those of chunks and copies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.client.fetch import RemoteFile, fetch
from runtime.errors import InvalidValue, StoreUnavailable
from runtime.jobs.hosts.base import Files, FileToWrite
from runtime.jobs.hosts.bucket import BucketFiles, check_bucket, is_bucket
from runtime.jobs.plan import Target
from runtime.launchers.kubernetes.files import JobFiles
from runtime.snapshots.excludes import MARKER
from tests.fakes.faults import Fault
from tests.fakes.gcs import GcsServer
from tests.services_support import MotoServer
from tests.unit.jobs import test_hosts as folder

RUN = "jobs/j-1/runs/0/a0001"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> GcsServer:
    running = GcsServer().start()
    running.make_bucket("lab")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", running.url)
    return running


@pytest.fixture(params=["gs", pytest.param("s3", marks=pytest.mark.service)])
def files(request: pytest.FixtureRequest) -> Files:
    if request.param == "gs":
        request.getfixturevalue("server")
        return BucketFiles("gs://lab/some/prefix/")
    import boto3

    moto: MotoServer = request.getfixturevalue("moto_server")
    boto3.client("s3", endpoint_url=moto.url, region_name="us-east-1").create_bucket(Bucket="lab")
    return BucketFiles("s3://lab/some/prefix")


@pytest.fixture
def make_files(files: Files) -> Callable[[], Files]:
    return lambda: BucketFiles(files.root)


test_root_is_marked_on_first_use = folder.test_root_is_marked_on_first_use_and_known_by_that
test_root_that_is_not_the_known_one_is_refused = (
    folder.test_root_that_is_not_the_known_one_is_refused_and_nothing_is_made_there
)
test_file_is_created_once_and_read_back = folder.test_file_is_created_once_and_read_back
test_files_written_together = folder.test_files_written_together_are_replaced_or_stay_as_each_one_says
test_names_and_trees_are_listed = folder.test_names_and_trees_are_listed
test_nothing_is_changed_any_more = folder.test_nothing_is_changed_any_more_once_another_has_taken_the_lock_over
test_download_is_equal = folder.test_download_is_equal_to_what_lies_there
test_names_that_lead_outside_are_refused = folder.test_names_that_lead_outside_are_refused


def test_root_is_said_without_a_slash_at_its_end(files: Files) -> None:
    assert files.root.endswith("://lab/some/prefix")


def test_object_has_another_name_without_being_sent_again(files: Files) -> None:
    files.create("snapshots/a b.tar", b"code")

    assert files.link("snapshots/a b.tar", "jobs/j-1/snapshot.tar") is True
    assert files.link("snapshots/none", "jobs/j-1/other") is False

    assert files.read("jobs/j-1/snapshot.tar") == b"code"
    assert files.read("jobs/j-1/other") is None


def test_last_of_files_written_together_is_not_there_where_another_was_refused(server: GcsServer) -> None:
    files = BucketFiles("gs://lab/p")
    server.fail_next("PUT", [Fault.REFUSE_403])

    wanted = [FileToWrite(f"jobs/j/{name}", b"") for name in ("one", "two", "intent.json")]
    with pytest.raises(StoreUnavailable):
        files.write_many(wanted)
    assert files.read("jobs/j/intent.json") is None

    files.write_many(wanted)
    assert files.names("jobs/j") == ["intent.json", "one", "two"]


def test_secret_among_files_written_together_enters_no_bucket(server: GcsServer) -> None:
    files = JobFiles("gs://lab/p")

    files.write_many([FileToWrite("jobs/j/secrets/A", b"hush"), FileToWrite("jobs/j/intent.json", b"{}", once=True)])

    assert files.secrets_of("j") == {"A": b"hush"}
    assert BucketFiles("gs://lab").tree("p") == [("jobs/j/intent.json", 2)]


def test_chunks_of_a_log_are_one_log(files: Files) -> None:
    for number, text in enumerate((b"one\n", b"", b"two\n")):
        files.write(f"{RUN}/rank1.{number:05}.log", text)
    files.write(f"{RUN}/rank10.00000.log", b"ten\n")
    files.write("jobs/j-1/runs/0/output/a0001/rank1.00000.log", b"an output of that name")

    log = f"{RUN}/rank1.log"
    assert files.read(log) == b"one\ntwo\n"
    assert [files.read_from(log, offset, 3) for offset in (0, 2, 4, 7, 8)] == [b"one", b"e\nt", b"two", b"\n", b""]
    assert files.read_from(log, 1) == b"ne\ntwo\n"
    assert files.read_many([log, f"{RUN}/rank2.log"]) == {log: b"one\ntwo\n"}
    assert files.names(RUN, "rank") == ["rank1.log", "rank10.log"]
    assert files.tree("jobs/j-1") == [
        ("runs/0/a0001/rank1.log", 8),
        ("runs/0/a0001/rank10.log", 4),
        ("runs/0/output/a0001/rank1.00000.log", 22),
    ]


def test_file_of_this_machine_becomes_an_object(files: Files, tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"bytes")

    files.upload("jobs/j-1/reuse/data/x", tmp_path / "one")

    assert files.read("jobs/j-1/reuse/data/x") == b"bytes"


def test_logs_come_home_as_one_file_each_and_odd_names_as_they_are(files: Files, tmp_path: Path) -> None:
    files.write(f"{RUN}/rank0.00000.log", b"one\n")
    files.write(f"{RUN}/rank0.00001.log", b"two\n")
    files.write(f"{RUN}/a b/é#~%41", b"odd")

    listed = [RemoteFile(name=f"{RUN}/{name}", place=name, size_bytes=size) for name, size in files.tree(RUN)]
    done = list(fetch(files, listed, tmp_path / "home"))

    assert {Path(each.path).relative_to(tmp_path / "home").as_posix() for each in done} == {"a b/é#~%41", "rank0.log"}
    assert (tmp_path / "home/rank0.log").read_bytes() == b"one\ntwo\n"
    assert (tmp_path / "home/a b/é#~%41").read_bytes() == b"odd"


def test_removal_takes_all_below_and_no_neighbour(files: Files) -> None:
    for name in ("jobs/j-1/a", "jobs/j-1/b/c", "jobs/j-10/a", f"{RUN}/rank0.00000.log"):
        files.write(name, b"x")

    files.remove(f"{RUN}/rank0.log")
    assert [name for name, _ in files.tree("jobs")] == ["j-1/a", "j-1/b/c", "j-10/a"]
    files.remove("jobs/j-1")
    files.remove("jobs/j-1")

    assert [name for name, _ in files.tree("jobs")] == ["j-10/a"]


def test_creation_whose_answer_was_lost_is_our_own(server: GcsServer) -> None:
    files = BucketFiles("gs://lab/p")
    server.fail_next("PUT", [Fault.STORE_THEN_503])

    assert files.create("lock", b"mine, by its token") is True
    assert files.create("lock", b"another's") is False


def test_file_that_is_gone_while_it_is_fetched_leaves_nothing_half(server: GcsServer, tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="is gone"):
        list(fetch(BucketFiles("gs://lab/p"), [RemoteFile(name="none", place="x", size_bytes=1)], tmp_path / "home"))

    assert [each.name for each in (tmp_path / "home").iterdir()] == [MARKER]


@pytest.mark.parametrize("records", ["gs://", "gs:///x", "s3://a//b", "s3://a b/c", "https://a/b"])
def test_url_that_names_no_bucket_is_refused(records: str) -> None:
    with pytest.raises(InvalidValue, match=r"targets\.t\.records"):
        check_bucket(Target(name="t", kind="kubernetes", records=records))


@pytest.mark.parametrize(
    ("records", "bucket"), [("gs://a", True), ("s3://a/b", True), ("/a", False), ("claim://a/b", False), (None, False)]
)
def test_bucket_is_told_from_other_roots(records: str | None, bucket: bool) -> None:
    assert is_bucket(records) is bucket


@pytest.mark.parametrize(
    "fault", [Fault.REFUSE_503, Fault.STORE_THEN_DROP, Fault.CUT_OFF, Fault.RESET, Fault.REPEAT_PAGE, Fault.EMPTY_PAGE]
)
@pytest.mark.parametrize("strays", [(), ("jobs//x", "jobs/./y", "jobs/j-1/\x01")], ids=["", "among strays"])
@pytest.mark.daily(4)
def test_folders_and_trees_with_a_fault_on_any_page_are_listed_whole(
    server: GcsServer, fault: Fault, strays: tuple[str, ...]
) -> None:
    files = BucketFiles("gs://lab/p")
    ours = [f"jobs/j-{number}/{name}" for number in range(4) for name in ("a", "b/c")]
    server.fill("lab", (f"p/{name}" for name in (*ours, *strays)), b"123")
    server.page_size = 2

    for page in range(4):
        server.fail_next("LIST", [*[None] * page, fault])
        assert files.names("jobs") == ["j-0", "j-1", "j-2", "j-3"]
        server.forget_faults()
        server.fail_next("LIST", [*[None] * page, fault])
        assert files.tree("jobs") == [(name.removeprefix("jobs/"), 3) for name in ours]
        server.forget_faults()
