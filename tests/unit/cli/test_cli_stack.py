"""`runtime stack`: list, show, pull, use, publish, diff."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.cli.main import main
from runtime.outputs import (
    IdentityOutput,
    PubSubQueueOutput,
    RecordsOutput,
    StackOutputs,
    encode_outputs,
    parse_outputs,
)
from runtime.stack import find as stacks
from tests.output_support import differences, documented

DEV = StackOutputs(
    stack="dev",
    region="us-west4",
    records=RecordsOutput(url="gs://p-records"),
    queues={
        "default": PubSubQueueOutput(topic="projects/p/topics/tasks", subscription="projects/p/subscriptions/tasks")
    },
)

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    for name in ("DATA", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stacks, "_has_pulumi", lambda: False)
    (tmp_path / "dev.json").write_text(encode_outputs(DEV))

    def call(*args: str) -> tuple[int, str, str]:
        code = main(["stack", *args])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_list_without_anything_has_the_built_in_stack(run: Run) -> None:
    assert run("list") == (0, "local\tbuilt-in\t-\tyes\n", "")
    code, out, _ = run("list", "-o", "json")
    assert (code, json.loads(out)) == (0, [{"name": "local", "source": "built-in", "default": True, "read_at": None}])


def test_pulled_stack_is_listed_shown_and_used(run: Run, tmp_path: Path) -> None:
    code, out, err = run("pull", "./dev.json")
    assert (code, out) == (0, "")
    assert "read stack `dev` from ./dev.json" in err

    code, out, err = run("use", "dev")
    assert (code, out) == (0, "")
    assert "commands now use stack `dev`" in err

    _, out, _ = run("list", "-o", "json")
    assert [(each["name"], each["default"]) for each in json.loads(out)] == [("local", False), ("dev", True)]
    code, out, _ = run("show")
    assert code == 0
    assert [line.split(maxsplit=1) for line in out.splitlines() if not line.startswith("from")] == [
        ["stack", "dev"],
        ["region", "us-west4"],
        ["records", "gs://p-records"],
        ["queue", "default: pubsub, projects/p/subscriptions/tasks"],
    ]


def test_show_names_the_accounts_of_the_stack(run: Run, tmp_path: Path) -> None:
    worker = IdentityOutput(email="dev-worker@p.iam.gserviceaccount.com", use="serves queues")
    (tmp_path / "dev.json").write_text(encode_outputs(replace(DEV, identities={"worker": worker})))
    run("pull", "./dev.json")

    _, out, _ = run("show", "dev")

    assert "identity    worker: dev-worker@p.iam.gserviceaccount.com, serves queues" in out.splitlines()


def test_pull_without_a_source_reads_the_stack_in_use(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNTIME_OUTPUTS", "./dev.json")

    code, _, err = run("pull")

    assert (code, err.partition(";")[0]) == (0, "read stack `dev` from ./dev.json")


def test_pull_and_show_take_the_stack_as_other_commands_do(run: Run) -> None:
    run("pull", "./dev.json")

    pulled = run("pull", "--stack", "dev")
    shown = run("show", "--stack", "dev", "-o", "json")

    # The earlier source is remembered.
    assert (pulled[0], pulled[2].partition(";")[0]) == (0, "read stack `dev` from ./dev.json")
    assert (shown[0], json.loads(shown[1])["stack"]) == (0, "dev")


def test_pull_with_nothing_configured_says_that_there_is_nothing_to_read(run: Run) -> None:
    code, _, err = run("pull")

    assert (code, "stack `local` is built in" in err) == (2, True)


def test_show_as_json_is_the_contract(run: Run) -> None:
    run("pull", "./dev.json")

    code, out, _ = run("show", "dev", "-o", "json")

    assert code == 0
    assert parse_outputs(json.loads(out)) == DEV


def test_use_says_where_another_goes_first(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNTIME_STACK", "other")

    code, _, err = run("use", "local")

    assert code == 0
    assert "RUNTIME_STACK" in err


def test_stack_that_cannot_be_read_is_not_made_the_default(run: Run, tmp_path: Path) -> None:
    code, _, err = run("use", "dve")

    assert code == 2
    assert err.startswith("error: no stack named `dve`\n  known stacks: local\n")
    assert not (tmp_path / "CONFIG").exists()


def test_contract_of_another_major_is_explained(run: Run, tmp_path: Path) -> None:
    (tmp_path / "dev.json").write_text('{"schema": 2, "stack": "dev"}')

    code, _, err = run("pull", "./dev.json")

    assert code == 2
    assert err == (
        "error: stack `dev` exports a contract that this release cannot read\n  found schema 2, need 1\n"
        "hint: pip install --upgrade research-runtime\n"
    )


# publish and diff


def contract(folder: Path, name: str, **changes: object) -> str:
    (folder / name).write_text(encode_outputs(replace(DEV, **changes)))  # type: ignore[arg-type]
    return f"./{name}"


def test_publish_writes_what_a_machine_without_pulumi_reads(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = run("publish", "--stack", "./dev.json", "--to", "./shared/v1.json", "--commit", "4f1c2d0")

    assert (code, out) == (0, "")
    assert err.startswith("wrote the contract of stack `dev` to ./shared/v1.json (sha256:")
    monkeypatch.setenv("RUNTIME_OUTPUTS", str(tmp_path / "shared/v1.json"))
    code, out, _ = run("show")
    assert code == 0
    assert re.search(r"^as of {7}(now|\d+s ago), commit 4f1c2d0$", out, re.MULTILINE)


def test_publish_says_what_changes_and_dry_run_writes_nothing(run: Run, tmp_path: Path) -> None:
    run("publish", "--stack", "./dev.json", "--to", "./v1.json")
    before = (tmp_path / "v1.json").read_text()
    changed = contract(tmp_path, "new.json", region="us-east1")

    code, out, err = run("publish", "--stack", changed, "--to", "./v1.json", "--dry-run")

    assert (code, out) == (0, "")
    lines = err.splitlines()
    assert lines[0] == "  changed region: us-west4 → us-east1"
    assert lines[1].startswith("would write the contract of stack `dev` to ./v1.json")
    assert (tmp_path / "v1.json").read_text() == before


def test_publish_again_says_that_nothing_changes(run: Run) -> None:
    run("publish", "--stack", "./dev.json", "--to", "./v1.json")

    _, _, err = run("publish", "--stack", "./dev.json", "--to", "./v1.json")

    assert "which says the same as before" in err


def test_publish_over_something_unreadable_asks_and_yes_goes_on(run: Run, tmp_path: Path) -> None:
    (tmp_path / "v1.json").write_text("nonsense")

    code, _, err = run("publish", "--stack", "./dev.json", "--to", "./v1.json")
    assert code == 2
    assert "replace the contract at ./v1.json: nobody is there to answer" in err
    assert (tmp_path / "v1.json").read_text() == "nonsense"

    code, _, _ = run("publish", "--stack", "./dev.json", "--to", "./v1.json", "--yes")
    assert code == 0
    assert parse_outputs(json.loads((tmp_path / "v1.json").read_text())) == DEV


def test_publish_as_json_tells_what_was_done(run: Run) -> None:
    code, out, _ = run("publish", "--stack", "./dev.json", "--to", "./v1.json", "--commit", "4f1c2d0", "-o", "json")

    printed = json.loads(out)
    assert code == 0
    assert {key: printed[key] for key in ("stack", "url", "written", "effect", "commit", "previous")} == {
        "stack": "dev",
        "url": "./v1.json",
        "written": True,
        "effect": "creates",
        "commit": "4f1c2d0",
        "previous": None,
    }
    assert printed["digest"].startswith("sha256:")


def test_publish_of_the_built_in_stack_is_refused(run: Run) -> None:
    code, _, err = run("publish")

    assert code == 2
    assert "the built-in stack is not published" in err


def test_publish_takes_pulumis_word_only(run: Run) -> None:
    run("pull", "./dev.json")

    code, _, err = run("publish", "--stack", "dev", "--to", "./v1.json")

    assert code == 2
    assert "the `pulumi` command is not installed here" in err


def test_diff_exits_with_0_where_contracts_are_the_same_and_1_where_they_differ(run: Run, tmp_path: Path) -> None:
    changed = contract(tmp_path, "new.json", region="us-east1", zone="us-east1-a")
    run("publish", "--stack", "./dev.json", "--to", "./v1.json")

    assert run("diff", "./dev.json", "./v1.json") == (0, "", "the two contracts are the same\n")
    assert run("diff", "./dev.json", changed) == (
        1,
        "changed\tregion\tus-west4\tus-east1\nadded\tzone\t-\tus-east1-a\n",
        "2 differences\n",
    )


def test_diff_as_json_is_an_array(run: Run, tmp_path: Path) -> None:
    changed = contract(tmp_path, "new.json", region="us-east1")

    code, out, err = run("diff", "./dev.json", changed, "-o", "json")

    assert (code, err) == (1, "")
    assert json.loads(out) == [{"path": "region", "kind": "changed", "old": "us-west4", "new": "us-east1"}]
    assert run("diff", "./dev.json", "./dev.json", "-o", "json") == (0, "[]\n", "")


def test_diff_with_the_stack_in_use_and_the_cache(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("pull", "./dev.json")
    monkeypatch.setenv("RUNTIME_OUTPUTS", contract(tmp_path, "new.json", region="us-east1"))

    code, out, _ = run("diff", "cache:dev")

    assert (code, out) == (1, "changed\tregion\tus-west4\tus-east1\n")


def test_diff_of_what_is_not_there_is_an_error(run: Run) -> None:
    code, out, err = run("diff", "./none.json", "./dev.json")

    assert (code, out) == (3, "")
    assert err == (
        "error: cannot read `none.json`: no such file or directory\n"
        "hint: check the path, here or in RUNTIME_OUTPUTS; `runtime stack list` shows what can be named\n"
    )


# access by programs


@pytest.mark.parametrize("command", [each for each in documented() if each.startswith("runtime stack ")])
def test_shape_is_as_the_page_shows_it(run: Run, tmp_path: Path, command: str) -> None:
    before = contract(tmp_path, "before.json", region="us-east1")
    run("publish", "--stack", before, "--to", "./v1.json", "--commit", "4f1c2d0")
    run("pull", "./dev.json")

    code, out, _ = run(*command.split()[2:])

    assert code == (1 if "diff" in command else 0)
    assert differences(documented()[command], json.loads(out)) == []


def test_use_prints_what_pull_does(run: Run) -> None:
    run("pull", "./dev.json")

    _, out, _ = run("use", "dev", "-o", "json")

    assert differences(documented()["runtime stack pull ./dev.json -o json"], json.loads(out)) == []
