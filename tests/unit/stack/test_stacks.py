"""The sources of a stack's outputs, their order, and the result of opening a stack."""

from __future__ import annotations

import http.server
import json
import logging
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from runtime.config import Settings, load_settings, remember_stack
from runtime.errors import InvalidContract, InvalidValue, NotPossible, StoreUnavailable, UnknownName
from runtime.outputs import (
    ContractAltered,
    HiddenValue,
    MissingOutput,
    OtherQueueOutput,
    PublishedCopy,
    PubSubQueueOutput,
    RecordsOutput,
    StackOutputs,
    contract_digest,
    encode_outputs,
    outputs_fields,
    published_fields,
)
from runtime.stack import find as stacks
from runtime.stack.find import (
    PulumiFailed,
    StackNotFound,
    find_published_url,
    find_stack,
    list_stacks,
    pull_stack,
    read_stack,
)
from runtime.stack.open import open_stack
from runtime.testing import sample_task

DEV = StackOutputs(stack="dev", region="us-west4")
PUBSUB = PubSubQueueOutput(topic="projects/p/topics/tasks", subscription="projects/p/subscriptions/tasks")


class FakePulumi:
    """An executable `pulumi` on the path with answers set by a test; it records the arguments of each call."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        script = folder / "pulumi"
        script.write_text(
            "#!/bin/sh\n"
            f'echo "$@" >> {folder}/calls\n'
            f'if [ "$2" = ls ]; then cat {folder}/ls; exit 0; fi\n'
            f"cat {folder}/stdout; cat {folder}/stderr >&2; exit $(cat {folder}/code)\n"
        )
        script.chmod(0o755)
        self.answer()

    def answer(self, stdout: str = "", stderr: str = "", code: int = 0, ls: str = "[]") -> None:
        for name, text in (("stdout", stdout), ("stderr", stderr), ("code", str(code)), ("ls", ls)):
            (self._folder / name).write_text(text)

    @property
    def calls(self) -> list[str]:
        return (self._folder / "calls").read_text().splitlines()


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Separate folders for the test, and no pulumi on the path."""
    monkeypatch.setenv("PATH", "/bin:/usr/bin")
    monkeypatch.setattr(stacks, "_has_pulumi", lambda: False)
    environ = {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "RUNTIME_DATA_DIR": str(tmp_path / "data"),
    }
    return load_settings(environ, tmp_path)


@pytest.fixture
def pulumi(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePulumi:
    fake = FakePulumi(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    monkeypatch.setattr(stacks, "_has_pulumi", lambda: True)
    return fake


def write_contract(path: Path, outputs: StackOutputs = DEV) -> str:
    path.write_text(encode_outputs(outputs))
    return str(path)


def test_nothing_configured_is_the_local_stack(settings: Settings, tmp_path: Path) -> None:
    found = find_stack(settings=settings)

    assert (found.name, found.source) == ("local", "built-in")
    assert found.outputs.records == RecordsOutput(url=f"sqlite:{tmp_path}/data/local.db")


def test_named_stack_is_read_from_pulumi_without_asking_anyone(settings: Settings, pulumi: FakePulumi) -> None:
    pulumi.answer(encode_outputs(DEV))

    found = find_stack("dev", settings=settings)

    assert (found.outputs, found.source, found.cached) == (DEV, "pulumi", False)
    assert pulumi.calls == ["stack output contract --json --stack dev --non-interactive"]


def test_pulumi_goes_before_the_published_copy_and_that_before_the_cache(
    settings: Settings, pulumi: FakePulumi, tmp_path: Path
) -> None:
    published = write_contract(tmp_path / "c.json", replace(DEV, region="published"))
    both = replace(settings, outputs=published)
    pulumi.answer(encode_outputs(replace(DEV, region="pulumi")))

    assert find_stack("dev", settings=both).outputs.region == "pulumi"
    pulumi.answer(stderr="error: could not reach the backend", code=255)
    assert find_stack("dev", settings=both).outputs.region == "published"
    Path(published).unlink()
    last = find_stack("dev", settings=both)
    assert (last.outputs.region, last.cached) == ("published", True)


def test_published_copy_alone_is_the_stack(settings: Settings, tmp_path: Path) -> None:
    found = find_stack(settings=replace(settings, outputs=write_contract(tmp_path / "c.json")))

    assert (found.outputs, found.source) == (DEV, str(tmp_path / "c.json"))


def test_cache_is_said_with_its_age_and_the_reason(
    settings: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    configured = replace(settings, outputs=write_contract(tmp_path / "c.json"))
    found = find_stack(settings=configured)
    (tmp_path / "c.json").unlink()
    cache = tmp_path / "cache/research-runtime/stacks/dev.json"
    content = json.loads(cache.read_text())
    content["read_at"] = (found.read_at - timedelta(hours=2)).isoformat()
    cache.write_text(json.dumps(content))

    with caplog.at_level(logging.WARNING):
        again = find_stack(settings=configured)

    assert (again.outputs, again.cached) == (DEV, True)
    assert f"outputs of stack `dev` as read 2h ago from {tmp_path}/c.json" in caplog.text
    assert "no such file" in caplog.text


def test_published_copy_of_another_stack_is_not_taken(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(StackNotFound) as refused:
        find_stack("prod", settings=replace(settings, outputs=write_contract(tmp_path / "c.json")))

    assert f"RUNTIME_OUTPUTS: `{tmp_path}/c.json` holds stack `dev`" in refused.value.facts


def test_full_pulumi_name_finds_the_published_and_the_cached_copy(settings: Settings, tmp_path: Path) -> None:
    configured = replace(settings, outputs=write_contract(tmp_path / "c.json"))

    assert find_stack("org/infra/dev", settings=configured).outputs == DEV
    assert find_stack("org/infra/dev", settings=settings).cached


def test_stack_that_nobody_has_says_what_each_source_answered(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(StackNotFound) as refused:
        find_stack("dve", settings=settings)

    assert refused.value.facts == (
        "known stacks: local",
        "pulumi: not installed here",
        "RUNTIME_OUTPUTS: not set",
        f"cache: no copy in `{tmp_path}/cache/research-runtime/stacks`",
    )


PASSPHRASE = """\
error: getting stack configuration: get stack secrets manager: passphrase must be set with PULUMI_CONFIG_PASSPHRASE or
PULUMI_CONFIG_PASSPHRASE_FILE environment variables
"""


@pytest.mark.parametrize(
    ("stderr", "reason", "hint"),
    [
        (PASSPHRASE, "needs the stack's passphrase", "PULUMI_CONFIG_PASSPHRASE"),
        ("error: no stack named 'dev' found", "no stack named 'dev' found", "Pulumi.yaml"),
        (
            "error: no Pulumi.yaml project file found (searching upwards from /tmp). If you have not created a project",
            "no Pulumi.yaml project file found",
            "ORGANISATION/PROJECT/STACK",
        ),
        (
            "error: current stack does not have output property 'contract'",
            "exports no `contract`",
            "pulumi up --stack dev",
        ),
        (
            "error: PULUMI_ACCESS_TOKEN must be set for login during non-interactive CLI sessions",
            "not logged in",
            "login",
        ),
        ("warning: old\nerror: disk on fire\n", "disk on fire", "pulumi stack output --stack dev"),
        ("", "no reason given", "pulumi stack output --stack dev"),
    ],
)
def test_pulumis_refusal_is_explained(
    settings: Settings, pulumi: FakePulumi, stderr: str, reason: str, hint: str
) -> None:
    pulumi.answer(stderr=stderr, code=255)

    with pytest.raises(StackNotFound) as refused:
        find_stack("dev", settings=settings)

    assert reason in refused.value.tried[0]
    assert hint in (refused.value.hint or "")


def test_contract_that_cannot_be_used_is_refused_and_not_passed_over(
    settings: Settings, pulumi: FakePulumi, tmp_path: Path
) -> None:
    pulumi.answer('{"schema": 2, "stack": "dev"}')

    with pytest.raises(InvalidContract):
        find_stack("dev", settings=replace(settings, outputs=write_contract(tmp_path / "c.json")))


def test_damaged_cache_is_as_good_as_none(settings: Settings, tmp_path: Path) -> None:
    folder = tmp_path / "cache/research-runtime/stacks"
    folder.mkdir(parents=True)
    (folder / "dev.json").write_text('{"source": "x"')

    with pytest.raises(StackNotFound):
        find_stack("dev", settings=settings)


def test_pull_reads_the_source_and_not_the_cache(settings: Settings, tmp_path: Path) -> None:
    contract = write_contract(tmp_path / "c.json")
    pull_stack(contract, settings=settings)
    write_contract(tmp_path / "c.json", replace(DEV, region="new"))

    assert pull_stack("dev", settings=settings).outputs.region == "new"
    Path(contract).unlink()
    with pytest.raises(StoreUnavailable):
        pull_stack("dev", settings=settings)
    assert find_stack("dev", settings=settings).outputs.region == "new"


def test_pull_of_the_built_in_stack_is_refused(settings: Settings) -> None:
    with pytest.raises(NotPossible):
        pull_stack("local", settings=settings)


def test_list_has_every_source_and_marks_the_one_in_use(settings: Settings, pulumi: FakePulumi, tmp_path: Path) -> None:
    pulumi.answer(encode_outputs(DEV), ls='[{"name": "staging", "current": true}]')
    find_stack("dev", settings=settings)

    listed = list_stacks(settings=replace(settings, stack="dev"))

    assert [(stack.name, stack.source, stack.default) for stack in listed] == [
        ("local", "built-in", False),
        ("dev", "pulumi", True),
        ("staging", "pulumi", False),
    ]


def test_remembered_stack_is_used_where_none_is_named(settings: Settings, tmp_path: Path) -> None:
    pull_stack(write_contract(tmp_path / "c.json"), settings=settings)
    remember_stack("dev", settings)
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "XDG_CONFIG_HOME": str(tmp_path / "config")}

    assert find_stack(settings=load_settings(environ, tmp_path)).name == "dev"


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(tmp_path))

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_contract_is_read_from_the_web(settings: Settings, web: str, tmp_path: Path) -> None:
    write_contract(tmp_path / "c.json")

    assert find_stack(settings=replace(settings, outputs=f"{web}/c.json")).outputs == DEV
    with pytest.raises(StoreUnavailable):
        find_stack(settings=replace(settings, outputs=f"{web}/missing.json"))


@pytest.mark.parametrize("url", ["http://[bad", "http://", "http://a b/c.json", "http://\0/"])
def test_contract_at_an_address_that_is_none_is_unavailable(settings: Settings, url: str) -> None:
    with pytest.raises(StoreUnavailable, match="cannot read"):
        find_stack(settings=replace(settings, outputs=url))


def test_contract_from_a_server_that_speaks_something_else_is_unavailable(settings: Settings) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"220 mail.example.com ESMTP\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(StoreUnavailable, match="cannot read"):
            find_stack(settings=replace(settings, outputs=f"http://127.0.0.1:{server.getsockname()[1]}/c.json"))
        thread.join()


def test_contract_is_read_from_a_bucket(settings: Settings, moto_server: Any) -> None:
    import boto3

    client = boto3.client("s3")
    client.create_bucket(Bucket="lab")
    client.put_object(Bucket="lab", Key="contract/v1.json", Body=encode_outputs(DEV).encode())

    assert find_stack(settings=replace(settings, outputs="s3://lab/contract/v1.json")).outputs == DEV
    with pytest.raises(StoreUnavailable):
        find_stack(settings=replace(settings, outputs="s3://lab/contract/v9.json"))


@pytest.mark.parametrize("source", ["ftp://x/c.json", "gopher://c.json"])
def test_location_of_an_unknown_scheme_is_refused(settings: Settings, source: str) -> None:
    with pytest.raises(InvalidValue):
        find_stack(settings=replace(settings, outputs=source))


# published copies


def write_published(path: Path, outputs: StackOutputs = DEV) -> str:
    fields = outputs_fields(outputs)
    said = PublishedCopy(digest=contract_digest(fields), at=datetime.now(UTC) - timedelta(hours=3), commit="c" * 40)
    path.write_text(json.dumps(published_fields(fields, said)))
    return str(path)


def test_published_copy_stands_in_for_pulumi_that_cannot_answer_and_that_is_said(
    settings: Settings, pulumi: FakePulumi, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pulumi.answer(stderr=PASSPHRASE, code=255)
    published = write_published(tmp_path / "c.json")

    with caplog.at_level(logging.WARNING):
        found = find_stack("dev", settings=replace(settings, outputs=published))

    assert (found.outputs, found.source, found.cached) == (DEV, published, False)
    assert f"using the published copy of stack `dev` at {published}, published 3h ago" in caplog.text
    assert "pulumi needs the stack's passphrase" in caplog.text


def test_copy_that_the_stack_was_seen_to_have_stands_in_too(
    settings: Settings, pulumi: FakePulumi, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outputs = replace(DEV, published_url=str(tmp_path / "c.json"))
    pulumi.answer(encode_outputs(outputs))
    find_stack("dev", settings=settings)
    write_published(tmp_path / "c.json", replace(outputs, region="newer"))
    pulumi.answer(stderr="error: no stack named 'dev' found", code=255)

    with caplog.at_level(logging.WARNING):
        found = find_stack("dev", settings=settings)

    assert (found.outputs.region, found.source, found.cached) == ("newer", str(tmp_path / "c.json"), False)
    assert "no stack named 'dev' found" in caplog.text


def test_cache_stands_in_where_the_copy_is_not_there_either(
    settings: Settings, pulumi: FakePulumi, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pulumi.answer(encode_outputs(replace(DEV, published_url=str(tmp_path / "c.json"))))
    find_stack("dev", settings=settings)
    pulumi.answer(stderr="error: disk on fire", code=255)

    with caplog.at_level(logging.WARNING):
        found = find_stack("dev", settings=settings)

    assert (found.cached, found.source) == (True, "pulumi")
    assert "disk on fire" in caplog.text


def test_stack_that_pulumi_lists_and_cannot_tell_of_is_no_unknown_name(settings: Settings, pulumi: FakePulumi) -> None:
    no_contract = "error: current stack does not have output property 'contract'"
    pulumi.answer(stderr=no_contract, code=255, ls='[{"name": "dev"}]')

    with pytest.raises(PulumiFailed) as refused:
        find_stack("dev", settings=settings)

    assert (refused.value.reason, refused.value.hint) == (
        "the stack exports no `contract`",
        "run `pulumi up --stack dev`",
    )
    assert refused.value.facts[:2] == ("pulumi: the stack exports no `contract`", "RUNTIME_OUTPUTS: not set")


def test_copy_of_another_stack_at_the_known_address_is_not_taken(
    settings: Settings, pulumi: FakePulumi, tmp_path: Path
) -> None:
    pulumi.answer(encode_outputs(replace(DEV, published_url=str(tmp_path / "c.json"))))
    find_stack("dev", settings=settings)
    write_published(tmp_path / "c.json", replace(DEV, stack="prod"))
    pulumi.answer(stderr="error: disk on fire", code=255)

    assert find_stack("dev", settings=settings).cached


def test_altered_copy_is_an_error_and_never_passed_over(settings: Settings, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    configured = replace(settings, outputs=write_published(path))
    find_stack(settings=configured)
    path.write_text(path.read_text().replace("us-west4", "us-east1"))

    with pytest.raises(ContractAltered):
        find_stack(settings=configured)


def test_hidden_value_is_an_error_and_never_passed_over(settings: Settings, pulumi: FakePulumi, tmp_path: Path) -> None:
    pulumi.answer(json.dumps("[secret]"))

    with pytest.raises(HiddenValue):
        find_stack("dev", settings=replace(settings, outputs=write_published(tmp_path / "c.json")))


def test_what_the_cache_keeps_is_the_contract_as_it_was_read(settings: Settings, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    fields = {**outputs_fields(DEV), "novel": {"x": 1}}
    said = PublishedCopy(digest=contract_digest(fields), at=datetime.now(UTC))
    path.write_text(json.dumps(published_fields(fields, said)))
    found = pull_stack(str(path), settings=settings)
    path.unlink()

    cached = find_stack("dev", settings=settings)

    assert (cached.contract, cached.cached) == (fields, True)
    assert cached.published is not None
    assert cached.published.digest == said.digest
    assert found.contract == fields


def test_read_stack_takes_each_source_by_its_name(settings: Settings, pulumi: FakePulumi, tmp_path: Path) -> None:
    path = str(tmp_path / "c.json")
    pulumi.answer(encode_outputs(replace(DEV, region="pulumi", published_url=path)))
    find_stack("dev", settings=settings)
    write_published(tmp_path / "c.json", replace(DEV, region="published"))
    pulumi.answer(encode_outputs(replace(DEV, region="now", published_url=path)))

    regions = {
        source: read_stack(source, settings=settings).outputs.region
        for source in ("dev", path, "cache:dev", "published:dev", "local")
    }

    assert regions == {
        "dev": "now",
        path: "published",
        "cache:dev": "pulumi",
        "published:dev": "published",
        "local": None,
    }
    assert find_published_url("dev", settings=settings) == path


def test_read_stack_never_takes_a_copy_for_a_name(settings: Settings, tmp_path: Path) -> None:
    configured = replace(settings, outputs=write_contract(tmp_path / "c.json"))
    find_stack("dev", settings=configured)

    with pytest.raises(PulumiFailed):
        read_stack("dev", settings=configured)


def test_copy_whose_place_nobody_knows_is_refused(settings: Settings) -> None:
    with pytest.raises(NotPossible):
        read_stack("published:dev", settings=settings)
    with pytest.raises(UnknownName):
        read_stack("cache:dev", settings=settings)


def test_stack_without_queues_names_the_key_and_the_command(settings: Settings, tmp_path: Path) -> None:
    with open_stack(settings=contract_settings(settings, tmp_path, DEV)) as opened, pytest.raises(MissingOutput) as no:
        opened.queue()

    assert (no.value.key, no.value.hint) == (
        "queues",
        "add `queues` to Pulumi.dev.yaml, then run `pulumi up --stack dev`",
    )


# opening


def test_local_stack_takes_tasks_and_its_queue_shares_the_records(settings: Settings) -> None:
    with open_stack(settings=settings) as opened:
        opened.queue().put([sample_task()])

        assert opened.queue().records is opened.records
        assert opened.queue() is opened.queue("default")
        assert opened.records.holds_tasks
    with open_stack(settings=settings) as again:
        assert [task.id for task in again.queue().peek(10)] == [sample_task().id]


def test_queue_without_a_name_is_refused(settings: Settings) -> None:
    with pytest.raises(InvalidValue) as refused:
        open_stack(queue="", settings=settings)

    assert refused.value.field == "queue"


def test_local_stack_makes_a_queue_of_any_name(settings: Settings) -> None:
    with open_stack(settings=settings, queue="gpu") as opened:
        assert opened.queue().name == "gpu"


def test_queue_by_file_url_brings_its_own_records(settings: Settings, tmp_path: Path) -> None:
    with open_stack(settings=settings, queue=f"sqlite:{tmp_path}/other.db#gpu") as opened:
        assert opened.queue().name == "gpu"
        assert opened.records is opened.queue().records
        opened.queue().put([sample_task()])
    assert (tmp_path / "other.db").exists()
    assert not (tmp_path / "data" / "local.db").exists()


def contract_settings(settings: Settings, tmp_path: Path, outputs: StackOutputs) -> Settings:
    return replace(settings, outputs=write_contract(tmp_path / "c.json", outputs))


def test_queue_by_url_is_found_by_its_name_too(settings: Settings, tmp_path: Path) -> None:
    with open_stack(queue=f"sqlite:{tmp_path}/other.db#tiles", settings=settings) as opened:
        assert opened.queue("tiles") is opened.queue()
        assert opened.queue("default") is not opened.queue()


def test_pubsub_queue_settles_into_the_records_of_its_stack(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    outputs = replace(DEV, records=RecordsOutput(url=f"file:{tmp_path}/records"), queues={"default": PUBSUB})

    with open_stack(settings=contract_settings(settings, tmp_path, outputs)) as opened:
        queue = opened.queue()

        assert (queue.name, queue.traits.kind) == ("default", "pubsub")
        assert queue.records is opened.records
        assert opened.records.url == f"file:{tmp_path}/records"


def test_pubsub_queue_without_records_is_refused_with_the_command_that_mends_it(
    settings: Settings, tmp_path: Path
) -> None:
    configured = contract_settings(settings, tmp_path, replace(DEV, queues={"default": PUBSUB}))

    with open_stack(settings=configured) as opened, pytest.raises(NotPossible) as refused:
        opened.queue()

    assert "stack `dev` exports no `records`" in refused.value.message
    assert "pulumi up --stack dev" in (refused.value.hint or "")


def test_pubsub_queue_by_url_needs_a_place_for_records(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    url = "pubsub:projects/p/subscriptions/tasks?topic=tasks"

    with open_stack(settings=settings, queue=url) as opened, pytest.raises(NotPossible) as refused:
        opened.queue()
    assert "&records=" in (refused.value.hint or "")

    with open_stack(settings=settings, queue=f"{url}&records=file:{tmp_path}/records") as opened:
        assert opened.records is opened.queue().records
        assert opened.queue().name == "tasks"


@pytest.mark.parametrize(
    "url",
    [
        "pubsub:s",
        "pubsub:projects/p/subscriptions/tasks",
        "pubsub:projects/p/subscriptions/tasks?topic=tasks&x=1",
        "sqlite:",
    ],
)
def test_unreadable_queue_url_is_refused(settings: Settings, url: str) -> None:
    with open_stack(settings=settings, queue=url) as opened, pytest.raises(InvalidValue):
        opened.queue()


def test_parameters_of_a_sqlite_url_are_refused_and_nothing_is_made(settings: Settings, tmp_path: Path) -> None:
    url = f"sqlite:{tmp_path}/q1.db?records=file:{tmp_path}/records"

    with open_stack(settings=settings, queue=url) as opened, pytest.raises(InvalidValue) as refused:
        opened.queue()

    assert "no parameters" in (refused.value.hint or "")
    assert not list(tmp_path.glob("q1.db*"))


def test_unknown_queue_lists_those_of_the_stack(settings: Settings, tmp_path: Path) -> None:
    configured = contract_settings(settings, tmp_path, replace(DEV, queues={"default": PUBSUB}))

    with open_stack(settings=configured) as opened, pytest.raises(UnknownName) as refused:
        opened.queue("defualt")

    assert (refused.value.known, refused.value.hint) == (["default"], "did you mean `default`?")


def test_queue_of_an_unknown_kind_is_refused_when_it_is_opened(settings: Settings, tmp_path: Path) -> None:
    outputs = replace(DEV, queues={"default": OtherQueueOutput(kind="kafka")})

    with (
        open_stack(settings=contract_settings(settings, tmp_path, outputs)) as opened,
        pytest.raises(NotPossible, match="kafka"),
    ):
        opened.queue()
