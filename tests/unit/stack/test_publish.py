"""Publishing a contract: the plan, the result, and comparisons of contracts."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import InvalidValue, NotPossible, StoreUnavailable
from runtime.outputs import (
    ContractAltered,
    MissingOutput,
    PubSubQueueOutput,
    RecordsOutput,
    StackOutputs,
    contract_digest,
    outputs_fields,
    parse_outputs,
)
from runtime.stack.find import FoundStack, read_stack
from runtime.stack.publish import Change, ChangeKind, Commit, Effect, compare, find_commit, plan_publication, publish
from tests.fakes.faults import Fault
from tests.fakes.gcs import GcsServer

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
OLD, NEW = Commit("a" * 40, NOW - timedelta(days=2)), Commit("b" * 40, NOW - timedelta(days=1))
DEV = StackOutputs(
    stack="dev",
    records=RecordsOutput(url="gs://lab"),
    queues={
        "default": PubSubQueueOutput(topic="projects/p/topics/tasks", subscription="projects/p/subscriptions/tasks")
    },
    published_url="gs://lab/contract/v1.json",
)


def found(outputs: StackOutputs = DEV, **more: Any) -> FoundStack:
    fields = {**outputs_fields(outputs), **more}
    return FoundStack(outputs=parse_outputs(fields), source="pulumi", read_at=NOW, fields=fields)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[GcsServer]:
    server = GcsServer().start()
    server.make_bucket("lab")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield server
    server.stop()


def test_published_copy_is_the_contract_with_digest_commit_and_time(bucket: GcsServer) -> None:
    plan = plan_publication(found(), now=NOW, commit=NEW)
    publish(plan)

    stored = bucket.buckets["lab"]["contract/v1.json"].data
    value = json.loads(stored)
    bare = {key: item for key, item in value.items() if key != "published"}
    canonical = json.dumps(bare, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert plan.effect is Effect.CREATES
    assert value["published"] == {
        "digest": f"sha256:{hashlib.sha256(canonical.encode()).hexdigest()}",
        "commit": NEW.id,
        "committed_at": "2026-11-20T12:00:00.000Z",
        "at": "2026-11-21T12:00:00.000Z",
    }
    assert stored == (json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False) + "\n").encode()
    assert parse_outputs(json.loads(stored)) == DEV
    read = read_stack("gs://lab/contract/v1.json")
    assert (read.outputs, read.published) == (DEV, plan.published)


def test_keys_of_a_later_release_are_published_too(tmp_path: Path) -> None:
    path = tmp_path / "c.json"

    publish(plan_publication(found(novel={"x": 1.0}), now=NOW, to=str(path)))

    assert json.loads(path.read_text())["novel"] == {"x": 1}


def test_the_same_contract_again_repeats(tmp_path: Path) -> None:
    path = str(tmp_path / "c.json")
    publish(plan_publication(found(), now=NOW, to=path, commit=OLD))

    again = plan_publication(found(), now=NOW, to=path, commit=NEW)

    assert (again.effect, again.changes, again.needs_consent) == (Effect.REPEATS, (), False)
    assert again.previous is not None
    assert again.previous.commit == OLD.id


def test_later_commit_updates_and_says_what_changes(tmp_path: Path) -> None:
    path = str(tmp_path / "c.json")
    publish(plan_publication(found(), now=NOW, to=path, commit=OLD))

    plan = plan_publication(found(replace(DEV, region="us-west4")), now=NOW, to=path, commit=NEW)

    assert (plan.effect, plan.needs_consent) == (Effect.UPDATES, False)
    assert plan.changes == (Change(path="region", kind=ChangeKind.ADDED, new="us-west4"),)


def test_earlier_commit_needs_consent_and_says_why(tmp_path: Path) -> None:
    path = str(tmp_path / "c.json")
    publish(plan_publication(found(replace(DEV, region="us-west4")), now=NOW, to=path, commit=NEW))

    plan = plan_publication(found(), now=NOW, to=path, commit=OLD)

    assert (plan.effect, plan.needs_consent) == (Effect.REVERTS, True)
    assert plan.changes == (Change(path="region", kind=ChangeKind.REMOVED, old="us-west4"),)
    assert plan.why == (
        f"what lies there was made from commit {NEW.id} of 2026-11-20 12:00 UTC, "
        f"this one from {OLD.id} of 2026-11-19 12:00 UTC"
    )


def git(folder: Path, *args: str) -> str:
    environ = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null", "PATH": "/usr/bin:/bin"}
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *args], check=True, capture_output=True, text=True, env=environ
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q")
    for name in ("one", "two"):
        (folder / "file").write_text(name)
        git(folder, "add", "file")
        git(folder, "commit", "-qm", name)
    return folder


def test_order_of_commits_is_the_histories_where_it_is_known(tmp_path: Path, repository: Path) -> None:
    """Two commits within a second of each other, as a rebase makes them."""
    first, second = find_commit(repository, "HEAD~1"), find_commit(repository)
    path = str(tmp_path / "c.json")
    publish(plan_publication(found(), now=NOW, to=path, commit=second))
    changed = found(replace(DEV, region="r"))

    back = plan_publication(changed, now=NOW, to=path, commit=first, folder=repository)
    forth = plan_publication(changed, now=NOW, to=path, commit=second, folder=repository)

    assert (back.effect, forth.effect) == (Effect.REVERTS, Effect.UPDATES)
    assert "comes after" in (back.why or "")


def test_commit_is_what_is_checked_out_and_says_when_the_tree_differs(repository: Path, tmp_path: Path) -> None:
    head = git(repository, "rev-parse", "HEAD")
    clean = find_commit(repository)
    (repository / "file").write_text("three")

    dirty = find_commit(repository)

    assert clean is not None
    assert (clean.id, clean.at is not None) == (head, True)
    assert dirty == Commit(f"{head}+dirty", clean.at)
    assert find_commit(repository, head[:8]) == Commit(head, clean.at)
    assert find_commit(repository, "0" * 40) == Commit("0" * 40, None)
    assert find_commit(tmp_path / "nowhere") is None


def test_empty_commit_is_not_taken_for_the_head(repository: Path) -> None:
    (repository / "file").write_text("three")

    assert find_commit(repository, "") == Commit("", None)


def test_commit_that_looks_like_an_option_is_none(repository: Path) -> None:
    assert find_commit(repository, "--output=/tmp/x") == Commit("--output=/tmp/x", None)


def test_copy_of_another_stack_is_never_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "c.json")
    publish(plan_publication(found(replace(DEV, stack="prod")), now=NOW, to=path))

    with pytest.raises(NotPossible) as refused:
        plan_publication(found(), now=NOW, to=path)

    assert "holds the contract of stack `prod`" in refused.value.message


def test_copy_of_a_later_schema_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"schema": 2, "stack": "dev"}')

    with pytest.raises(NotPossible) as refused:
        plan_publication(found(), now=NOW, to=str(tmp_path / "c.json"))

    assert "schema 2" in refused.value.message


@pytest.mark.parametrize("content", ["", "nonsense", "[1]"])
def test_what_is_no_contract_is_replaced_with_consent_only(tmp_path: Path, content: str) -> None:
    (tmp_path / "c.json").write_text(content)

    plan = plan_publication(found(), now=NOW, to=str(tmp_path / "c.json"))

    assert (plan.effect, plan.needs_consent, bool(plan.why)) == (Effect.MENDS, True, True)


def test_altered_copy_is_replaced_with_consent_only(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    publish(plan_publication(found(), now=NOW, to=str(path)))
    path.write_text(path.read_text().replace("topics/t", "topics/evil"))

    plan = plan_publication(found(), now=NOW, to=str(path))

    assert (plan.effect, plan.needs_consent) == (Effect.MENDS, True)
    assert [change.path for change in plan.changes] == ["queues.default.topic"]
    with pytest.raises(ContractAltered):
        read_stack(str(path))


def test_bare_copy_of_the_same_stack_is_updated(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(json.dumps(outputs_fields(DEV)))

    assert plan_publication(found(), now=NOW, to=str(tmp_path / "c.json")).effect is Effect.UPDATES


def test_without_an_address_the_missing_key_is_named() -> None:
    with pytest.raises(MissingOutput) as missing:
        plan_publication(found(replace(DEV, published_url=None)), now=NOW)

    assert (missing.value.key, missing.value.hint) == (
        "published_url",
        "add `records` to Pulumi.dev.yaml, then run `pulumi up --stack dev`",
    )


@pytest.mark.parametrize("to", ["https://lab/c.json", "ftp://lab/c.json", "name"])
def test_address_that_cannot_be_written_is_refused(to: str) -> None:
    with pytest.raises(InvalidValue):
        plan_publication(found(), now=NOW, to=to)


def test_bucket_that_refuses_is_an_error_and_nothing_is_said_to_be_written(bucket: GcsServer) -> None:
    plan = plan_publication(found(), now=NOW)
    bucket.fail_next("PUT", [Fault.REFUSE_403])

    with pytest.raises(StoreUnavailable):
        publish(plan)
    assert bucket.buckets["lab"] == {}


def test_bucket_that_is_not_there_is_told(bucket: GcsServer) -> None:
    with pytest.raises(StoreUnavailable) as refused:
        plan_publication(found(), now=NOW, to="gs://other/contract/v1.json")

    assert "no bucket `other`" in refused.value.message


def test_file_is_replaced_whole_and_a_folder_comes_into_being(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "c.json"
    publish(plan_publication(found(), now=NOW, to=f"file:{path}"))
    publish(plan_publication(found(), now=NOW, to=str(path)))

    assert [each.name for each in path.parent.iterdir()] == ["c.json"]


def test_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(StoreUnavailable) as refused:
        publish(replace(plan_publication(found(), now=NOW, to=str(tmp_path / "c.json")), url=f"{tmp_path}/file/c.json"))

    assert "cannot write" in refused.value.message


# comparing


def test_compare_names_each_leaf() -> None:
    old = {"a": 1, "b": {"c": [1, 2], "d": {}}, "gone": None}
    new = {"a": 1.0, "b": {"c": [1, 3, 4], "d": {"e": True}}}

    assert list(compare(old, new)) == [
        Change(path="b.c[1]", kind=ChangeKind.CHANGED, old=2, new=3),
        Change(path="b.c[2]", kind=ChangeKind.ADDED, new=4),
        Change(path="b.d", kind=ChangeKind.REMOVED, old={}),
        Change(path="b.d.e", kind=ChangeKind.ADDED, new=True),
        Change(path="gone", kind=ChangeKind.REMOVED),
    ]


leaves = st.none() | st.booleans() | st.integers(-5, 5) | st.text("ab", max_size=2)
objects = st.dictionaries(
    st.sampled_from("abc"),
    st.recursive(leaves, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("xy"), inner)),
)


@given(objects, objects)
def test_compare_finds_nothing_exactly_where_contents_are_equal(old: dict[str, Any], new: dict[str, Any]) -> None:
    changes = list(compare(old, new))

    assert (changes == []) == (contract_digest(old) == contract_digest(new))
    assert [change.path for change in compare(new, old)] == [change.path for change in changes]


@given(objects)
def test_digest_is_of_the_content_not_of_its_order_or_of_how_numbers_are_written(value: dict[str, Any]) -> None:
    def doubled(each: Any) -> Any:
        if isinstance(each, dict):
            return {key: doubled(item) for key, item in reversed(each.items())}
        if isinstance(each, list):
            return [doubled(item) for item in each]
        return float(each) if type(each) is int else each

    assert contract_digest(doubled(value)) == contract_digest(value)
    assert contract_digest({**value, "published": {"digest": "x"}}) == contract_digest(value)
    assert contract_digest({**value, "more": 1}) != contract_digest(value)
