"""`python -m infra check`: its report on good stacks, and the message for each kind of wrong stack."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pulumi
import pytest
from pulumi_gcp import Provider, pubsub, serviceaccount, storage

from infra.check.check import (
    CheckFinding,
    Report,
    check_stack,
    find_collisions,
    find_rendered,
    find_shared_notes,
    leaks_in,
    report_on,
)
from infra.check.command import CheckFailed, render_report, render_summary, report_fields
from infra.check.command import main as check
from infra.check.recording import UNKNOWN, Recording, Registration, SecretValue, record
from infra.cli import COMMANDS, main
from infra.gcp.outputs import compute
from infra.gcp.prices import find_costs, monthly_total
from infra.settings.files import InvalidStackFile, find_project_folder, load_stack_config
from runtime.errors import RequestRefused, UnknownName
from tests.infra.conftest import ROOT, STACKS, Project, checked, recorded

LAB = "lab-1234"


def report_of(program: Callable[[], None]) -> Report:
    return report_on(record(program, compute=compute))


def broken(report: Report) -> set[tuple[str, str]]:
    return {(each.source, each.rule) for each in report.findings}


def test_check_by_a_python_without_the_packages_says_which_one_has_them() -> None:
    # -S leaves site-packages out, like the system's Python.
    words = [sys.executable, "-S", "-m", "infra", "check", "--all"]

    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: this Python has no package `pulumi`\n"
        f"  it is {sys.executable}; what this project needs is in its `.venv`\n"
        "hint: `make .venv/.ready` fills it once; then `.venv/bin/python -m infra check --all`\n"
    )


# checked-in stacks


def test_check_stack_finds_nothing_wrong(stack: str) -> None:
    report = checked(stack)
    assert report.findings == ()
    assert report.recording == recorded(stack)
    assert report.contract is not None


def test_check_all_prints_a_line_for_each_stack(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(["--all", "--folder", str(ROOT)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[: len(STACKS)]] == [[each, "ok"] for each in STACKS]


def test_check_output_of_stack_as_json_is_complete(stack: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(["--stack", stack, "-o", "json", "--folder", str(ROOT)]) == 0
    answer = json.loads(capsys.readouterr().out)
    (one,) = answer["stacks"]
    assert answer["schema"] == 1
    assert set(one) == {
        "stack", "ok", "findings", "notes", "resources", "protected", "monthly_usd", "costs", "grants", "left_grants",
        "left_to_host", "left_to_key_owner", "rendered", "contract",
    }  # fmt: skip
    assert [each["urn"] for each in one["resources"]] == [each.urn for each in recorded(stack).resources]
    assert one["contract"]["stack"] == stack


def test_render_report_of_stack_names_every_resource_under_its_component(stack: str) -> None:
    report = report_on(recorded(stack))
    text = render_report(report)
    tree = text.split("\nresources\n")[1].split("\n\n")[0].splitlines()
    assert len(tree) == len(report.resources)
    depths = {line.split()[0]: (len(line) - len(line.lstrip())) // 2 for line in tree}
    for each in report.resources:
        parent = next((one for one in report.resources if one.urn == each.parent), None)
        assert depths[each.name] == (depths[parent.name] + 1 if parent is not None else 1)


def test_render_report_of_dev_is_what_people_read(golden: Callable[[str, str], None]) -> None:
    golden("infra/check/dev.txt", render_report(checked("dev")))


def test_render_summary_is_a_line_a_stack(golden: Callable[[str, str], None]) -> None:
    golden("infra/check/summary.txt", render_summary([checked(each) for each in STACKS]))


def test_check_protected_stack_says_which_resources_refuse_to_go() -> None:
    report = checked("marin-us-west4")
    protected = {each.name for each in report.resources if each.protect}
    assert {"records-bucket", "main-head-vm"} <= protected
    section = render_report(report).split("protected: refuse to be destroyed\n")[1].split("\n\n")[0]
    assert {line.split()[0] for line in section.splitlines()} == protected


def test_check_image_of_zeros_is_a_note_and_no_finding() -> None:
    report = checked("marin-us-west4")
    assert "no image pinned yet: head `main` will wait for one" in report.notes


def test_check_pinned_image_has_no_note(project: Project) -> None:
    def pin(config: dict[str, Any]) -> None:
        head = config["heads"]["main"]
        head["image"] = head["image"].replace("0" * 64, "a" * 64)

    project.copy("marin-us-west4", pin)
    assert check_stack("marin-us-west4", folder=project.folder).notes == ()


@pytest.mark.parametrize(
    ("lake", "says"),
    [
        ({"writers": ["clusters"]}, None),
        ({"readers": ["clusters"], "existing": "lake"}, None),
        ({"writers": ["workers"]}, "`clusters` is not among the `readers` and `writers` of `buckets.lake`"),
        (None, "`buckets: {NAME: {existing: lake, readers: [clusters]}}` does"),
    ],
)
def test_check_bucket_of_a_variable_that_no_machine_may_read_is_noted(
    project: Project, lake: dict[str, Any] | None, says: str | None
) -> None:
    name = {"bucket": "lake"} if lake is not None and "existing" not in lake else {}

    def change(config: dict[str, Any]) -> None:
        config["heads"]["main"]["variables"] = {"DATA": "gs://lake/data"}
        config["buckets"] = {} if lake is None else {"lake": {**lake, **name}}

    project.copy("marin-us-west4", change)
    notes = [each for each in check_stack("marin-us-west4", folder=project.folder).notes if "gs://lake" in each]

    assert len(notes) == (says is not None)
    assert all(each.endswith(f"lets none of its machines read: {says}") for each in notes)


def test_check_queue_without_records_is_noted(project: Project) -> None:
    project.copy("dev", lambda config: config.pop("records"))
    assert check_stack("dev", folder=project.folder).notes == (
        "queues and no `records`: commands refuse a queue without a place for what became of its tasks",
    )


def test_check_stack_that_asks_for_nothing_is_noted(project: Project) -> None:
    project.write("dev", {"pulumi:disable-default-providers": ["*"]})
    report = check_stack("dev", folder=project.folder)
    assert (report.findings, report.resources[1:]) == ((), ())
    assert report.notes == ("nothing is asked for, and nothing would be made",)


@pytest.mark.parametrize("option", ["--render"])
def test_check_output_that_cannot_be_written_is_refused_with_its_place(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "taken"
    taken.write_text("")
    words = ["check", "--stack", "marin-us-west4", "--folder", str(ROOT), option, str(taken / "x" / "y")]

    assert main(words) == 2

    error = capsys.readouterr().err
    assert error.startswith(f"error: cannot write `{taken}/x")
    assert error.endswith(": not a directory\nhint: name another place\n")


@pytest.mark.parametrize("option", ["--show"])
def test_check_given_an_empty_name_takes_it_for_none(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--stack", "dev", "--folder", str(ROOT), option, ""]) == 2
    assert "``" in capsys.readouterr().err


def test_check_of_a_folder_that_is_a_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--all", "--folder", str(ROOT / "README.md")]) == 2
    assert capsys.readouterr().err.startswith(f"error: `{ROOT}/README.md` is no folder\nhint: ")


# wrong stack files, each with its exact message

WRONG: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "misspelt-key": ("dev", lambda config: config.update(quues=config.pop("queues"))),
    "misspelt-nested-key": ("dev", lambda config: config["queues"].update(default={"ack_deadlines": 60})),
    "wrong-type": ("dev", lambda config: config.update(queues=["default"])),
    "out-of-range": ("dev", lambda config: config["queues"].update(default={"ack_deadline_s": 5, "retention_s": 1})),
    "no-project": ("dev", lambda config: config.pop("project")),
    "unknown-region": ("dev", lambda config: config.update(region="us-west")),
    "accelerator-of-no-family": (
        "marin-us-west4",
        lambda config: config["heads"]["main"]["pools"]["v5e"].update(accelerator="v5e-1"),
    ),
    "minimum-above-maximum": (
        "marin-us-west4",
        lambda config: config["heads"]["main"]["pools"]["v5e"].update(min=2000),
    ),
    "subnet-too-small": ("marin-us-west4", lambda config: config["network"].update(cidr="10.64.16.0/24")),
    "image-without-digest": (
        "marin-us-west4",
        lambda config: config["heads"]["main"].update(image="us-west4-docker.pkg.dev/p-1/m/cluster:latest"),
    ),
    "secret-that-is-none": ("marin-us-west4", lambda config: config["heads"]["main"].update(environment=["hf-tokn"])),
    "typed-secret": ("dev", lambda config: config["secrets"]["hf-token"].update(env="hf_" + 30 * "a")),
    "value-of-a-secret": ("dev", lambda config: config["secrets"]["hf-token"].update(value="0123456789abcdef")),
    "encrypted-value": ("dev", lambda config: config.update(project={"secure": "v1:abc"})),
    "ambient-project": ("dev", lambda config: config.update({"gcp:project": "other"})),
    "default-providers-on": ("dev", lambda config: config.pop("pulumi:disable-default-providers")),
    "empty-part": ("dev", lambda config: config.update(records=None, alerts=None)),
    "bucket-in-no-place": ("dev", lambda config: config["records"].update(location="Mars")),
    "no-quantity": (
        "phoebe",
        lambda config: config["kubernetes"]["phoebe"]["namespaces"]["l2r"]["claims"]["l2r-persistent-claim"].update(
            size="20 GB"
        ),
    ),
}


@pytest.mark.parametrize("kind", sorted(WRONG))
def test_check_wrong_stack_gets_its_message_and_exit_code(
    kind: str, project: Project, golden: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    stack, spoil = WRONG[kind]
    project.copy(stack, spoil)
    assert main(["check", "--stack", stack, "--folder", str(project.folder)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    golden(f"infra/wrong/{kind}.txt", shown.err)


BAD_FILES = {
    "no-yaml": "config:\n  - a\n b: c\n",
    "key-that-is-null": "config:\n  research-runtime:queues:\n    null: {}\n",
    "key-that-is-true": "config:\n  research-runtime:queues:\n    true: {}\n",
    "key-that-is-a-number": "config:\n  research-runtime:queues:\n    1: {}\n",
    "twice-the-same-key": "config:\n  research-runtime:region: a\n  research-runtime:region: b\n",
    "a-list": "- a\n",
    "misspelt-config": "confg:\n  research-runtime:region: a\n",
    "config-is-a-text": "config: dev\n",
}


@pytest.mark.parametrize("kind", sorted(BAD_FILES))
def test_check_unreadable_file_gets_its_message(
    kind: str, project: Project, golden: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    project.write_text("dev", BAD_FILES[kind])
    assert main(["check", "--stack", "dev", "--folder", str(project.folder)]) == 2
    golden(f"infra/wrong/file-{kind}.txt", capsys.readouterr().err.replace(str(project.folder), "FOLDER"))


def test_check_all_with_one_wrong_stack_lists_the_good_ones_and_says_all_that_is_wrong(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project.copy("dev", lambda config: config.update(region="nowhere", zone="here"))
    project.copy("phoebe")
    assert main(["check", "--all", "--folder", str(project.folder)]) == 2
    shown = capsys.readouterr()
    assert [line.split()[:2] for line in shown.out.splitlines()] == [["dev", "wrong"], ["phoebe", "ok"]]
    assert "error: 1 of 2 stacks cannot be deployed" in shown.err
    assert "dev: `region`" in shown.err


def test_check_all_as_json_with_a_wrong_stack_is_still_json(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project.copy("dev", lambda config: config.update(region="nowhere"))
    assert main(["check", "--all", "-o", "json", "--folder", str(project.folder)]) == 2
    (one,) = json.loads(capsys.readouterr().out)["stacks"]
    assert (one["ok"], one["findings"][0]["where"]) == (False, "region")


# the command line


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["chek"], "no command named `chek`", "did you mean `check`?"),
        (["check", "--stack", "dve"], "no stack named `dve`", "did you mean `dev`?"),
        (["check", "--stak", "dev"], "unrecognized arguments: --stak dev", "--help` has every option"),
        (["check"], "which stack?", "`python -m infra check --stack dev`, or `--all`"),
        (["check", "--all", "--stack", "dev"], "not allowed with argument", "--help"),
        (["check", "--all", "--show", "x"], "are about one stack", "use `--stack`"),
        (["check", "--stack", "../dev"], "no stack named `../dev`", "did you mean `dev`?"),
        (["check", "--stack", "phoebe", "--show", "startup-script"], "no rendered file named `startup-script`", None),
    ],
)
def test_main_wrong_words_are_refused_with_a_hint(
    words: list[str],
    message: str,
    hint: str | None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(words) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    assert message in shown
    assert hint is None or hint in shown


def test_main_without_words_or_with_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"], ["help"]):
        assert main(words) == 0
        assert re.findall(r"^  ([\w-]+) ", capsys.readouterr().out, re.MULTILINE) == list(COMMANDS)


def test_check_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        check(["--help"])
    assert done.value.code == 0
    assert "examples:" in capsys.readouterr().out


def test_check_in_a_folder_without_project_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestRefused, match=r"no `Pulumi\.yaml` in"):
        check(["--all", "--folder", str(tmp_path)])


def test_check_in_the_folder_of_another_project_is_refused(tmp_path: Path) -> None:
    (tmp_path / "Pulumi.yaml").write_text("name: website\n")
    with pytest.raises(RequestRefused, match="is of another project: `website`"):
        check(["--all", "--folder", str(tmp_path)])


def test_check_in_a_folder_below_finds_the_project(project: Project) -> None:
    below = project.folder / "infra" / "components"
    below.mkdir(parents=True)
    assert find_project_folder(below) == project.folder


def test_check_without_stack_files_says_so(project: Project) -> None:
    for words in (["--all"], []):
        with pytest.raises(RequestRefused, match="no stack file in"):
            check([*words, "--folder", str(project.folder)])


def test_check_the_only_stack_needs_no_name(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    project.copy("phoebe")
    assert check(["--folder", str(project.folder)]) == 0
    assert capsys.readouterr().out.startswith("stack phoebe: ")


def test_check_show_prints_a_rendered_file_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    rendered = find_rendered(recorded("marin-us-west4"))
    assert check(["--stack", "marin-us-west4", "--show", "startup-script", "--folder", str(ROOT)]) == 0
    assert capsys.readouterr().out == rendered["main-head-vm/startup-script"]


def test_check_render_writes_every_rendered_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--stack", "marin-us-west4", "--render", str(tmp_path / "out"), "--folder", str(ROOT)]
    assert check(words) == 0
    files = {
        str(each.relative_to(tmp_path / "out")): each.read_text()
        for each in (tmp_path / "out").rglob("*")
        if each.is_file()
    }
    assert files == find_rendered(recorded("marin-us-west4"))
    assert files


def test_module_runs_as_a_command_and_stops_with_two() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "infra", "check", "--stack", "dve"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[0].startswith("error: no stack named `dve`")


def test_module_whose_reader_went_away_ends_quietly() -> None:
    done = subprocess.run(
        ["/bin/bash", "-o", "pipefail", "-c", f"{sys.executable} -m infra check --stack dev | head -1"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    assert done.stdout.startswith("stack dev: ")


# wrong programs


def _provider() -> pulumi.ResourceOptions:
    return pulumi.ResourceOptions(provider=Provider("google", project=LAB))


def _topic() -> None:
    pubsub.Topic("t", name="t-1", project=LAB)


def test_report_on_two_resources_that_are_one_thing_is_found() -> None:
    def program() -> None:
        opts = _provider()
        pubsub.Topic("a", name="t-1", project=LAB, opts=opts)
        pubsub.Topic("b", name="t-1", project=LAB, opts=opts)

    found = [each for each in report_of(program).findings if each.rule == "made-once"]
    assert [(each.where.rpartition("::")[2], each.message) for each in found] == [
        ("b", "is `projects/lab-1234/topics/t-1`, which `a` makes too")
    ]


def test_report_on_broken_policy_is_found() -> None:
    def program() -> None:
        serviceaccount.Key("k", service_account_id="a", opts=_provider())

    assert "policy" in {each.source for each in report_of(program).findings}


def test_report_on_program_without_contract_is_found() -> None:
    assert ("contract", "contract") in broken(report_of(lambda: None))


def test_report_on_contract_that_nobody_could_read_is_found() -> None:
    report = report_of(lambda: pulumi.export("contract", {"schema": 1, "stack": 7}))
    (found,) = [each for each in report.findings if each.rule == "contract"]
    assert "`stack` is a number" in found.message


@pytest.mark.parametrize(
    ("outputs", "paths"),
    [
        ({"contract": {"a": SecretValue("x")}}, ["contract.a"]),
        ({"api_token": "x"}, ["api_token"]),
        ({"a": {"private_key": "x"}}, ["a.private_key"]),
        ({"a": [{"Password": "x"}]}, ["a[0].Password"]),
        ({"a": "ghp_" + "a" * 36}, ["a"]),
        ({"a": "-----BEGIN PRIVATE KEY-----"}, ["a"]),
        ({"a": "hf_" + "A" * 30}, ["a"]),
        ({"secrets": {"hf-token": {"resource": "projects/p/secrets/hf-token", "env": "HF_TOKEN"}}}, []),
        ({"hf-token": "projects/p/secrets/hf-token"}, []),
        ({"hf-token": UNKNOWN}, []),
    ],
)
def test_leaks_in_outputs_are_found_and_references_are_not(outputs: dict[str, Any], paths: list[str]) -> None:
    assert [path for path, _ in leaks_in(outputs)] == paths


def test_report_on_secret_value_in_an_input_is_found_and_not_repeated() -> None:
    def program() -> None:
        pubsub.Topic("t", name="t-1", project=LAB, labels={"a": "hf_" + "A" * 30}, opts=_provider())

    report = report_of(program)
    assert ("policy", "no-secret-values") in broken(report)


def test_check_program_that_raises_is_a_finding_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken_build(settings: object) -> None:
        raise KeyError("oops")

    monkeypatch.setattr("infra.program.build", broken_build)
    report = check_stack("dev", folder=ROOT)
    assert report.recording is None
    assert [(each.source, each.rule, each.message) for each in report.findings] == [
        ("program", "program-runs", "KeyError: 'oops'")
    ]


def test_check_failure_of_the_runtime_kind_is_explained_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(settings: object) -> None:
        raise UnknownName("queue", "a", ["b"])

    monkeypatch.setattr("infra.program.build", refusing)
    (found,) = check_stack("dev", folder=ROOT).findings
    assert found.message == "no queue named `a`; known queues: b"


# conflicts between stacks


def _made(stack: str, *resources: Registration, contract: dict[str, Any] | None = None) -> Report:
    recording = Recording(stack=stack, resources=resources, outputs={"contract": contract or {}})
    return dataclasses.replace(report_on(recording), findings=())


def _bucket(name: str) -> Registration:
    type_ = "gcp:storage/bucket:Bucket"
    return Registration(urn=f"urn::{name}", type=type_, name=name, inputs={}, outputs={"id": name})


def test_find_collisions_same_bucket_in_two_stacks_is_found() -> None:
    (found,) = find_collisions([_made("a", _bucket("x")), _made("b", _bucket("x"))])
    assert (found.rule, found.where, found.message) == ("one-owner", "a and b", "both make bucket `x`")


def test_find_collisions_same_name_of_another_type_or_unknown_is_none() -> None:
    topic = Registration(urn="u", type="gcp:pubsub/topic:Topic", name="x", inputs={}, outputs={"id": "x"})
    unknown = dataclasses.replace(_bucket("x"), outputs={"id": UNKNOWN})
    assert find_collisions([_made("a", _bucket("x")), _made("b", topic, unknown)]) == []


def test_find_collisions_api_of_one_project_is_shared() -> None:
    api = Registration(
        urn="u", type="gcp:projects/service:Service", name="x", inputs={}, outputs={"id": "p/pubsub.googleapis.com"}
    )
    assert find_collisions([_made("a", api), _made("b", api)]) == []


def test_find_collisions_same_cluster_name_in_a_zone_is_found() -> None:
    def cluster(zone: str) -> dict[str, Any]:
        return {"project": "p", "clusters": {"main": {"cluster_name": "marin", "zone": zone}}}

    same = find_collisions([_made("a", contract=cluster("z-1")), _made("b", contract=cluster("z-1"))])
    assert [each.message for each in same] == ["both make ray cluster `p/z-1/marin`"]
    assert find_collisions([_made("a", contract=cluster("z-1")), _made("b", contract=cluster("z-2"))]) == []


def test_find_collisions_two_copies_of_a_stack_under_one_name_each_are_found_by_check(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project.copy("dev", lambda config: config["records"].update(bucket="lab-shared-records"))
    project.copy("dev", lambda config: config["records"].update(bucket="lab-shared-records"), to="dev2")
    assert main(["check", "--all", "--folder", str(project.folder)]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: these stacks together cannot be deployed: 1 problem\n")
    assert "one-owner: `dev and dev2` both make bucket `lab-shared-records`" in shown


def test_find_collisions_checked_in_stacks_have_none() -> None:
    reports = [checked(each) for each in STACKS]
    assert find_collisions(reports) == []
    assert find_shared_notes(reports) == []


def test_find_shared_notes_reference_that_no_stack_makes_is_said() -> None:
    report = checked("marin-us-west4")
    notes = find_shared_notes([report])
    assert not [note for note in notes if "subnetworks" in note]
    secret = "projects/hai-gcp-models/secrets/marin-us-central2-hf-token"
    assert f"marin-us-west4 refers to `{secret}`, which none of these stacks makes: it has to exist" in notes


def test_find_shared_notes_existing_subnet_is_said(project: Project) -> None:
    subnet = "projects/hai-gcp-models/regions/us-west4/subnetworks/lab"
    project.copy("marin-us-west4", lambda config: config.update(network={"subnet": subnet, "cidr": "10.64.16.0/20"}))
    notes = find_shared_notes([check_stack("marin-us-west4", folder=project.folder)])
    assert f"marin-us-west4 refers to `{subnet}`, which none of these stacks makes: it has to exist" in notes


def _lab(stack: str, project: Project, *, heads: bool = True, **access: Any) -> None:
    def change(config: dict[str, Any]) -> None:
        config["access"] = access
        del config["deployer"], config["buckets"]
        if not heads:
            del config["heads"]

    project.copy("marin-us-west4", change, to=stack)


def _notes_on_grants(project: Project, *stacks: str) -> list[str]:
    notes = find_shared_notes([check_stack(each, folder=project.folder) for each in stacks])
    return [note for note in notes if "refers to" not in note and "ranges" not in note]


def test_find_shared_notes_grants_that_two_stacks_make_are_counted(project: Project) -> None:
    _lab("a", project, operators=["group:ops@example.com"], researchers=["group:lab@example.com"])
    _lab("b", project, operators=["group:ops@example.com"], researchers=["group:other@example.com"])

    (note,) = _notes_on_grants(project, "a", "b")
    assert note == (
        "a, b make the same 4 grants: whichever is destroyed takes them from the others; "
        "set `access.project_grants: false` in all but one"
    )


def test_find_shared_notes_grants_left_to_a_stack_that_makes_them_are_silent(project: Project) -> None:
    _lab("a", project, operators=["group:ops@example.com", "group:lab@example.com"])
    # Administrators may log in too.
    _lab("b", project, researchers=["group:lab@example.com"], project_grants=False)

    assert _notes_on_grants(project, "a", "b") == []


def test_find_shared_notes_grants_left_to_others_that_none_makes_are_named(project: Project) -> None:
    _lab("owner", project, heads=False, operators=["group:ops@example.com"])
    _lab(
        "b",
        project,
        operators=["group:ops@example.com"],
        researchers=["group:lab@example.com"],
        project_grants=False,
    )

    left = "on project hai-gcp-models to another stack, and none of these grants"
    seeing, entering = "roles/monitoring.viewer, roles/logging.viewer", "roles/iap.tunnelResourceAccessor"
    assert _notes_on_grants(project, "owner", "b") == [
        f"b leaves what group:ops@example.com needs {left} {entering}, roles/compute.osAdminLogin",
        f"b leaves what group:lab@example.com needs {left} {seeing}, {entering}, roles/compute.osLogin",
    ]


def test_find_shared_notes_grants_of_another_project_do_not_count(project: Project) -> None:
    _lab("a", project, operators=["group:ops@example.com"], project_grants=False)
    project.copy("skylight", lambda config: config["access"].update(operators=["group:ops@example.com"]), to="b")

    (note,) = _notes_on_grants(project, "a", "b")
    assert note.startswith("a leaves what group:ops@example.com needs on project hai-gcp-models")


def test_check_of_a_stack_says_which_grants_it_leaves_to_another(project: Project) -> None:
    _lab("a", project, heads=False, researchers=["group:lab@example.com"], project_grants=False)

    report = check_stack("a", folder=project.folder)

    left = render_report(report).split("left to another stack of the project\n")[1].split("\n\n")[0].splitlines()
    assert left == [
        "  group:lab@example.com",
        "    roles/monitoring.viewer on project hai-gcp-models",
        "    roles/logging.viewer on project hai-gcp-models",
    ]
    assert [each["role"] for each in report_fields(report)["left_grants"]] == [
        "roles/monitoring.viewer",
        "roles/logging.viewer",
    ]


SHARED = {"subnet": "projects/net-host/regions/us-west4/subnetworks/shared", "cidr": "10.64.16.0/20"}


def test_check_of_a_subnet_of_another_project_lists_the_commands_for_its_owner(project: Project) -> None:
    project.copy("marin-us-west4", lambda config: config.update(network=SHARED))

    report = check_stack("marin-us-west4", folder=project.folder)
    text = render_report(report)

    assert report.findings == ()
    assert [each for each in report.resources if each.type.endswith("Firewall")] == []
    agent = "serviceAccount:service-NUMBER@gcp-sa-tpu.iam.gserviceaccount.com"
    ports = "tcp:22,tcp:52365,tcp:6383,tcp:44217,tcp:10001,tcp:44227,tcp:6379,tcp:8080,tcp:6380,tcp:6381,tcp:6382,tcp:10002-19999"
    rule = "gcloud compute firewall-rules create marin-us-west4-main"
    place = "--project net-host --network shared --direction INGRESS"
    tag = "--target-tags marin-us-west4-main"
    assert report.left_to_host == (
        "gcloud compute shared-vpc associated-projects add hai-gcp-models --host-project net-host",
        f"gcloud projects add-iam-policy-binding net-host --member {agent} --role roles/tpu.xpnAgent",
        (
            "gcloud compute networks subnets add-iam-policy-binding shared --project net-host --region us-west4"
            " --member serviceAccount:marin-pipeline-deployer@hai-gcp-models.iam.gserviceaccount.com --role roles/compute.networkUser"
        ),
        (
            f"{rule}-ssh {place} --source-ranges 35.235.240.0/20 {tag} --allow tcp:22"
            " --description 'SSH through the identity-aware proxy; cluster marin-us-west4-main'"
        ),
        (
            f"{rule}-cluster {place} --source-ranges 10.64.16.0/20 {tag} --allow {ports},icmp"
            " --description 'Ray between its machines; cluster marin-us-west4-main'"
        ),
    )
    section = text.split("\nleft to the owner of the network\n")[1].split("\n\n")[0].splitlines()
    assert [line.strip() for line in section] == list(report.left_to_host)
    assert report_fields(report)["left_to_host"] == list(report.left_to_host)


def test_check_of_a_subnet_of_the_own_project_or_without_heads_leaves_nothing_to_another(project: Project) -> None:
    own = SHARED["subnet"].replace("net-host", "hai-gcp-models")
    project.copy("marin-us-west4", lambda config: config.update(network=SHARED | {"subnet": own}), to="own")
    project.copy("marin-us-west4", lambda config: config.update(network=SHARED, heads={}, buckets={}), to="headless")

    reports = [check_stack(each, folder=project.folder) for each in ("own", "headless")]

    assert [each.left_to_host for each in reports] == [(), ()]
    assert len([each for each in reports[0].resources if each.type.endswith("Firewall")]) == 2


def test_check_of_a_subnet_of_another_project_names_the_accounts_that_run_up(project: Project) -> None:
    person = "run-up@hai-gcp-models.iam.gserviceaccount.com"
    pipeline = "marin-pipeline-deployer@hai-gcp-models.iam.gserviceaccount.com"
    project.copy("marin-us-central2", lambda config: config.update(network=_central()))
    by_a_person = {"network": _central(), "deployer": None, "impersonate": person}
    project.copy("marin-us-central2", lambda config: config.update(by_a_person), to="alone")

    for stack, runs_up in (("marin-us-central2", pipeline), ("alone", person)):
        report = check_stack(stack, folder=project.folder)
        assert report.findings == ()
        found = re.findall(r"--member (\S+) --role roles/compute.networkUser", "\n".join(report.left_to_host))
        assert found == [f"serviceAccount:{runs_up}"]


def _central() -> dict[str, str]:
    return SHARED | {"subnet": SHARED["subnet"].replace("us-west4", "us-central2")}


# reading stack files


def test_load_stack_config_passes_values_as_the_engine_does(tmp_path: Path) -> None:
    file = tmp_path / "Pulumi.x.yaml"
    file.write_text(
        "secretsprovider: gcpkms://k\nconfig:\n  region: r\n  research-runtime:protect: true\n  a:b: 3\n"
        '  a:c: {d: [1, x]}\n  a:e:\n  a:f: 1.5\n  a:g: "2026-01-02"\n'
    )
    assert load_stack_config(file).values == {
        "research-runtime:region": "r",
        "research-runtime:protect": "true",
        "a:b": "3",
        "a:c": '{"d":[1,"x"]}',
        "a:e": "",
        "a:f": "1.5",
        "a:g": "2026-01-02",
    }


def test_load_stack_config_folder_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "Pulumi.x.yaml").mkdir()
    with pytest.raises(InvalidStackFile):
        load_stack_config(tmp_path / "Pulumi.x.yaml")


# costs


def test_find_costs_head_is_its_machine_and_disk() -> None:
    costs = {
        (each.urn.rpartition("::")[2], each.basis): each.monthly_usd for each in find_costs(recorded("marin-us-west4"))
    }
    assert costs[("main-head-vm", "n2-standard-8, 730 h, us-west4, prices of 2025")] == 319.39
    assert costs[("main-head-vm", "boot disk, 200 GB pd-balanced, us-west4, prices of 2025")] == 22.0


@pytest.mark.parametrize(
    ("machine", "zone"), [("n9-standard-8", "us-west4-a"), ("n2-standard-8", "mars-1-a"), ("n2", "us-west4-a")]
)
def test_find_costs_unknown_machine_is_said_and_counts_nothing(machine: str, zone: str) -> None:
    disk = {"initializeParams": {"type": "pd-new", "size": 50}}
    inputs = {"machineType": machine, "zone": zone, "bootDisk": disk}
    vm = Registration(urn="u", type="gcp:compute/instance:Instance", name="x", inputs=inputs)
    costs = find_costs(Recording(stack="s", resources=(vm,), outputs={}))
    assert [each.monthly_usd for each in costs] == [None, None]
    assert all(each.basis.endswith("no price known") for each in costs)
    assert monthly_total(costs) == 0


def test_check_failed_counts_and_keeps_the_findings() -> None:
    finding = CheckFinding(source="policy", rule="r", where="w", message="m")
    failed = CheckFailed("stack `dev`", [finding], ["r: `w` m"])
    assert failed.exit_code == 2
    assert failed.findings == (finding,)
    assert failed.render() == (
        "error: stack `dev` cannot be deployed: 1 problem\n  r: `w` m\nhint: docs/check.md explains each check"
    )


def test_report_fields_of_a_bucket_show_unknown_inputs_as_text() -> None:
    def program() -> None:
        account = serviceaccount.Account("a", account_id="worker", project=LAB, opts=_provider())
        storage.BucketIAMMember(
            "g",
            bucket="b",
            role="roles/storage.objectUser",
            member=account.unique_id,
            opts=pulumi.ResourceOptions(parent=account),
        )

    fields = report_fields(report_of(program))
    (grant,) = [each for each in fields["resources"] if each["name"] == "g"]
    assert grant["inputs"]["member"] == "<known after up>"
    assert grant["physical_name"] is None


def test_project_of_a_domain_is_written_as_google_writes_it_in_addresses(project: Project) -> None:
    inside = {"train": {"quota": {"pods": "9"}, "workload_identity": True}}
    cluster = {"context": "c", "cluster_identifier": "c", "server": "https://c.example.com", "namespaces": inside}
    project.copy("dev", lambda config: config.update(project="example.com:lab", kubernetes={"gke": cluster}))

    report = check_stack("dev", folder=project.folder)

    assert report.findings == ()
    assert report.contract is not None
    assert report.contract["identities"]["worker"]["email"] == "dev-worker@lab.example.com.iam.gserviceaccount.com"
    (registry,) = report.contract["registries"]["images"].values()
    assert registry["url"] == "us-central1-docker.pkg.dev/example.com/lab/dev-images"
    assert "serviceAccount:example.com:lab.svc.id.goog[train/runtime-job]" in {each.member for each in report.grants}
