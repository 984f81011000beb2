"""The commands in docs/operations.md and docs/images.md exist, and `scripts/bootstrap` works as described there."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from infra.components.ci_identity import PROJECT_ROLES
from tests.commands_support import find_command_lines, find_problem

ROOT = Path(__file__).parents[2]
PAGES = ("operations.md", "images.md")


@pytest.mark.parametrize("page", PAGES)
def test_page_names_only_commands_that_exist(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()

    problems = [problem for words in find_command_lines(text) if (problem := find_problem(words))]

    assert problems == []


def test_commands_of_the_pages_are_found() -> None:
    """Guards the test above against finding no commands at all."""
    text = "\n".join((ROOT / "docs" / page).read_text() for page in PAGES)

    found = {" ".join(words[:3]) for words in find_command_lines(text)}

    assert {
        "scripts/bootstrap PROJECT REGION",
        "python -m infra",
        "runtime image push",
        "runtime secrets put",
        "runtime stack publish",
        "runtime cluster reap",
        "runtime doctor --stack",
    } <= found


@pytest.mark.parametrize(
    "text",
    [
        "Then `runtime image psuh`.",
        "```\nruntime secrets put NAME --disable-old\n```",
        "```\nFOO=1 runtime frobnicate    for fun\n```",
        "`scripts/bootstrp PROJECT`",
        "`python -m infra chek --all`",
        "`python -m infra check --al`",
        "`make operations`",
        "`runtime worker --onec`",
    ],
)
def test_command_that_does_not_exist_is_found(text: str) -> None:
    [words] = find_command_lines(text)

    assert find_problem(words) is not None


@pytest.mark.parametrize("page", PAGES)
def test_pages_that_a_page_points_to_exist(page: str) -> None:
    links = re.findall(r"\]\(([\w./-]+\.md)", (ROOT / "docs" / page).read_text())

    assert [link for link in links if not (ROOT / "docs" / link).is_file()] == []


def test_roles_by_which_the_deployer_could_widen_its_rights_are_named_on_the_page() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    section = text.partition("## What the deployer can reach")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(roles/[\w.]+)`", section)) - {"roles/editor", "roles/iam.denyAdmin"}

    deploys = {each.role for each in PROJECT_ROLES if each.deploys}
    harmless = ("serviceUsageAdmin", "networkAdmin", "securityAdmin", "alertPolicyEditor", "notificationChannelEditor")
    assert named == {role for role in deploys if not role.endswith(harmless)}


GCLOUD = """#!/usr/bin/env bash
# Keeps what was made as files; knows the few commands that scripts/bootstrap uses.
echo "$*" >>"$CALLS"
name="$1 $2 $3"; [ "$1" = projects ] && name="projects"
case "$*" in
    "projects describe "*) [ "$3" = "$KNOWN_PROJECT" ] || { echo "NOT_FOUND: no $3" >&2; exit 1; } ;;
    *" describe "*)
        [ -z "${HIDDEN:-}" ] || { echo "PERMISSION_DENIED: $HIDDEN" >&2; exit 1; }
        grep -qF "${*//describe/create}" <(sed 's/ --location.*//;s/ --project.*//' "$MADE") 2>/dev/null ||
            grep -qF "$2 $4" "$MADE" || { echo "ERROR: 404 not found" >&2; exit 1; } ;;
    *" create "*) echo "$2 $4 $*" >>"$MADE" ;;
esac
"""


@pytest.fixture
def gcloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a stand-in for gcloud with a memory on PATH; return the file with its calls."""
    program = tmp_path / "bin/gcloud"
    program.parent.mkdir()
    program.write_text(GCLOUD)
    program.chmod(0o755)
    (tmp_path / "made").touch()
    (tmp_path / "calls").touch()
    for name, value in {"CALLS": tmp_path / "calls", "MADE": tmp_path / "made", "KNOWN_PROJECT": "my-lab-dev"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "calls"


def bootstrap(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["scripts/bootstrap", *args], cwd=ROOT, capture_output=True, text=True, check=False)


def changes_of(calls: Path) -> list[str]:
    lines = [line.split() for line in calls.read_text().splitlines() if " describe " not in line]
    calls.write_text("")
    return [" ".join(line[:4]) for line in lines]


def test_bootstrap_makes_bucket_and_key_and_says_what_comes_next(gcloud: Path) -> None:
    done = bootstrap("my-lab-dev", "us-central1")

    assert (done.returncode, done.stderr) == (0, "")
    assert changes_of(gcloud) == [
        "services enable cloudkms.googleapis.com storage.googleapis.com",
        "storage buckets create gs://my-lab-dev-pulumi-state",
        "storage buckets update gs://my-lab-dev-pulumi-state",
        "kms keyrings create pulumi",
        "kms keys create state",
    ]
    assert "pulumi login gs://my-lab-dev-pulumi-state\n" in done.stdout
    key = "projects/my-lab-dev/locations/us-central1/keyRings/pulumi/cryptoKeys/state"
    assert f"pulumi stack init STACK --secrets-provider=gcpkms://{key}\n" in done.stdout


def test_bootstrap_again_makes_nothing_twice(gcloud: Path) -> None:
    bootstrap("my-lab-dev", "us-central1")
    changes_of(gcloud)

    done = bootstrap("my-lab-dev", "us-central1")

    assert done.returncode == 0
    assert [change for change in changes_of(gcloud) if "create" in change] == []


def test_bootstrap_dry_run_prints_and_changes_nothing(gcloud: Path) -> None:
    done = bootstrap("my-lab-dev", "us-central1", "--dry-run")

    assert done.returncode == 0
    assert "+ gcloud storage buckets create gs://my-lab-dev-pulumi-state" in done.stdout
    assert changes_of(gcloud) == []


def test_bootstrap_makes_nothing_where_it_cannot_see(gcloud: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIDDEN", "storage.buckets.get")

    done = bootstrap("my-lab-dev", "us-central1")

    assert done.returncode == 2
    assert (
        "error: cannot see what is there: PERMISSION_DENIED: storage.buckets.get\nhint: gcloud auth login"
        in done.stderr
    )
    assert [change for change in changes_of(gcloud) if "create" in change] == []


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ((), "error: a project and a region are needed\n"),
        (("my-lab-dev",), "error: a project and a region are needed\n"),
        (("My_Lab", "us-central1"), "error: `My_Lab` is no project id\n"),
        (("my-lab-dev", "us-central1-a"), "error: `us-central1-a` is no region\n"),
        (("my-lab-dev", "us-central1", "--dryrun"), "error: no option named `--dryrun`\n"),
        (("other-lab", "us-central1"), "error: there is no project `other-lab`, or you cannot see it\n"),
    ],
)
def test_bootstrap_explains_a_wrong_request(gcloud: Path, args: tuple[str, ...], problem: str) -> None:
    done = bootstrap(*args)

    assert done.returncode == 2
    assert done.stderr.startswith(problem)
    assert changes_of(gcloud) == []
