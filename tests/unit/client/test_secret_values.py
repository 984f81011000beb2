"""Values of a job's secrets: where each source is read, possible problems, and that no value is printed."""

from __future__ import annotations

import base64
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.client.jobs.secrets import read_values
from runtime.client.jobs.targets import make_context
from runtime.config import Project, Settings
from runtime.errors import InfrastructureFailure, MissingExtra, NotPossible, RequestRefused, UnknownName
from runtime.jobs.plan import Target
from runtime.jobs.spec import SecretRef
from runtime.launchers.kubernetes.launcher import KubernetesLauncher
from runtime.launchers.local.launcher import LocalLauncher
from runtime.outputs import MissingOutput, SecretOutput, StackOutputs, encode_outputs
from runtime.stack import google_api
from runtime.stack.google_api import GoogleRefused, GoogleUnreachable
from runtime.stack.secret_reader import OLDER_VERSIONS
from tests.copies_support import COMMAND, Copies
from tests.fakes.google import GoogleServer
from tests.jobs_support import Terminal, open_terminal
from tests.shim_support import wait_for

CANARY = "hf_canary_31337"
SECRETS = {
    "hf-token": SecretOutput(resource="projects/p/secrets/dev-hf-token", env="HF_TOKEN"),
    "wandb": SecretOutput(resource="projects/p/secrets/dev-wandb", env="WANDB_API_KEY"),
}
STACK = StackOutputs(stack="dev", secrets=SECRETS)
HPC = Target(name="hpc", kind="slurm", stack="dev")
TOKEN = SecretRef(name="HF_TOKEN", source="secret-manager://hf-token")

Read = Callable[..., dict[str, str]]


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch) -> Iterator[GoogleServer]:
    server = GoogleServer().start()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(google_api, "_PAUSES_S", ())
    yield server
    server.stop()
    assert server.refused == []


@pytest.fixture
def published(tmp_path: Path) -> Path:
    path = tmp_path / "dev.json"
    path.write_text(encode_outputs(STACK))
    return path


@pytest.fixture
def settings(tmp_path: Path, google: GoogleServer, published: Path) -> Settings:
    return Settings(
        project=Project(root=tmp_path),
        data_dir=tmp_path / "data",
        cache_dir=tmp_path / "cache",
        config_dir=tmp_path / "config",
        outputs=str(published),
        google_api=google.url,
    )


@pytest.fixture
def read(settings: Settings) -> Read:
    def call(*refs: SecretRef, target: Target = HPC, changed: Settings | None = None, **environ: str) -> dict[str, str]:
        return read_values(refs or [TOKEN], target, replace(make_context(changed or settings), environ=environ))

    return call


# from the stack


def test_secret_of_the_stack_is_read_in_its_newest_version_with_the_right_to_read_alone(
    google: GoogleServer, read: Read
) -> None:
    google.put_secret("dev-hf-token", b"old", CANARY.encode())

    assert read() == {"HF_TOKEN": CANARY}
    assert google.calls() == ["secretmanager.projects.secrets.versions.access"]


def test_secrets_of_all_sources_come_together(google: GoogleServer, read: Read, tmp_path: Path) -> None:
    google.put_secret("dev-hf-token", CANARY.encode())
    google.put_secret("dev-wandb", b"line one\r\nline two\n")
    (tmp_path / "key").write_bytes("schl\u00fcssel\r\nzwei\r\n".encode())

    found = read(
        TOKEN,
        SecretRef(name="A", source="env://MINE"),
        SecretRef(name="B", source=f"file://{tmp_path}/key"),
        SecretRef(name="C", source="secret-manager://wandb"),
        MINE="x y",
    )

    assert found == {
        "HF_TOKEN": CANARY,
        "A": "x y",
        "B": "schl\u00fcssel\r\nzwei",  # a final newline comes from an editor; all others belong to the value
        "C": "line one\r\nline two\n",
    }


@pytest.mark.parametrize("states", [("ENABLED", "DISABLED"), ("ENABLED", "DESTROYED", "DISABLED", "DISABLED")])
def test_version_that_is_not_enabled_is_passed_over(google: GoogleServer, read: Read, states: tuple[str, ...]) -> None:
    resource = google.put_secret("dev-hf-token", *[f"{CANARY}-{number}".encode() for number in range(len(states))])
    for version, state in zip(google.versions[resource], states, strict=True):
        version["state"] = state

    assert read() == {"HF_TOKEN": f"{CANARY}-0"}


@pytest.mark.parametrize("count", [1, 3, OLDER_VERSIONS + 5])
def test_secret_without_an_enabled_version_says_how_to_put_one(google: GoogleServer, read: Read, count: int) -> None:
    resource = google.put_secret("dev-hf-token", *[CANARY.encode()] * count)
    for version in google.versions[resource]:
        version["state"] = "DISABLED"

    with pytest.raises(NotPossible) as refused:
        read()

    assert refused.value.message == "cannot read secret `hf-token` of stack `dev`: it has no enabled version"
    assert refused.value.hint == "runtime secrets put hf-token --stack dev"
    assert len(google.calls()) == 1 + min(count - 1, OLDER_VERSIONS)


@pytest.mark.parametrize("there", [True, False])
def test_secret_without_a_value_or_that_does_not_exist_says_how_to_find_out(
    google: GoogleServer, read: Read, there: bool
) -> None:
    if there:
        google.put_secret("dev-hf-token")

    with pytest.raises(NotPossible) as refused:
        read()

    assert (refused.value.message, refused.value.hint) == (
        "cannot read secret `hf-token` of stack `dev`: it does not exist, or has no value",
        "`runtime secrets check --stack dev` says which; runtime secrets put hf-token --stack dev",
    )


@pytest.mark.parametrize("newest", ["ENABLED", "DISABLED"])
def test_secret_that_one_may_not_read_names_the_role(google: GoogleServer, read: Read, newest: str) -> None:
    resource = google.put_secret("dev-hf-token", CANARY.encode(), b"newer")
    google.versions[resource][1]["state"] = newest
    google.deny("*.access", "secretmanager.versions.access", on="" if newest == "ENABLED" else "versions/1")

    with pytest.raises(NotPossible) as refused:
        read()

    assert refused.value.message == "cannot read secret `hf-token` of stack `dev`: this identity may not"
    assert refused.value.hint == "ask an operator for `roles/secretmanager.secretAccessor` on it"


def test_secret_manager_that_is_not_enabled_says_so(google: GoogleServer, read: Read) -> None:
    google.put_secret("dev-hf-token", CANARY.encode())
    google.disable_api("secretmanager", "Secret Manager")

    with pytest.raises(NotPossible) as refused:
        read()

    assert (
        refused.value.message == "cannot read secret `hf-token` of stack `dev`: the Secret Manager API is not enabled"
    )
    assert refused.value.hint == "run `pulumi up --stack dev`"


def test_secret_manager_that_fails_is_an_infrastructure_failure(google: GoogleServer, read: Read) -> None:
    google.put_secret("dev-hf-token", CANARY.encode())
    google.fail("*.access", 503, "UNAVAILABLE", "try later")

    with pytest.raises(InfrastructureFailure) as failed:
        read()

    assert (failed.value.exit_code, failed.value.retryable) == (3, True)
    assert failed.value.message.startswith("cannot read secret `hf-token` of stack `dev`: google refused")
    assert isinstance(failed.value.__cause__, GoogleRefused)


def test_secret_manager_that_cannot_be_reached_is_an_infrastructure_failure(read: Read, settings: Settings) -> None:
    gone = GoogleServer()
    gone._server.server_close()

    with pytest.raises(GoogleUnreachable) as failed:
        read(changed=replace(settings, google_api=gone.url))

    assert (failed.value.exit_code, failed.value.hint) == (3, "check the network, then try again")


def test_value_that_was_damaged_on_its_way_is_a_failure(
    google: GoogleServer, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    google.put_secret("dev-hf-token", CANARY.encode())
    monkeypatch.setattr("runtime.stack.secrets.crc32c", lambda value: 7)

    with pytest.raises(InfrastructureFailure, match="its checksum is another"):
        read()


def test_secret_that_the_stack_does_not_have_is_refused_before_any_value_is_read(
    google: GoogleServer, read: Read
) -> None:
    google.put_secret("dev-hf-token", CANARY.encode())

    with pytest.raises(UnknownName) as near:
        read(TOKEN, SecretRef(name="B", source="secret-manager://hf-tokne"))
    with pytest.raises(UnknownName) as far:
        read(SecretRef(name="B", source="secret-manager://projects/q/secrets/x"))

    assert (near.value.known, near.value.hint) == (["hf-token", "wandb"], "did you mean `hf-token`?")
    assert far.value.hint == "`runtime secrets list --stack dev` shows where each lies"
    assert google.calls() == []


def test_stack_is_the_targets_and_else_the_one_of_the_settings(
    google: GoogleServer, read: Read, settings: Settings, tmp_path: Path
) -> None:
    google.put_secret("dev-hf-token", CANARY.encode())
    google.put_secret("lab-hf-token", b"of the lab")
    lab = StackOutputs(
        stack="lab", secrets={"hf-token": SecretOutput(resource="projects/p/secrets/lab-hf-token", env="HF_TOKEN")}
    )
    (tmp_path / "lab.json").write_text(encode_outputs(lab))
    of_lab = replace(settings, outputs=str(tmp_path / "lab.json"))
    read(changed=of_lab, target=replace(HPC, stack="lab"))

    assert read(target=replace(HPC, stack=None)) == {"HF_TOKEN": CANARY}
    assert read(target=replace(HPC, stack="lab")) == {"HF_TOKEN": "of the lab"}  # the last value read


@pytest.mark.parametrize("stack", [None, "local"])
def test_no_stack_that_has_secrets_says_where_to_name_one(read: Read, settings: Settings, stack: str | None) -> None:
    with pytest.raises(NotPossible) as refused:
        read(target=replace(HPC, stack=stack), changed=replace(settings, outputs=None))

    assert refused.value.message == (
        "secret `HF_TOKEN` is to come from `secret-manager://hf-token`, and no stack is named that has it"
    )
    assert refused.value.facts == (f"target `hpc` names {'the built-in one' if stack else 'no stack'}",)
    assert refused.value.hint == 'set stack = "…" in [tool.runtime.targets.hpc], or RUNTIME_STACK'


def test_stack_without_secrets_names_the_key(read: Read, published: Path) -> None:
    published.write_text(encode_outputs(StackOutputs(stack="dev")))

    with pytest.raises(MissingOutput) as refused:
        read()

    assert refused.value.key == "secrets"


def test_google_libraries_that_are_not_installed_name_the_extra(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google.auth", None)

    with pytest.raises(MissingExtra) as refused:
        read()

    assert (refused.value.exit_code, refused.value.hint) == (2, "pip install 'research-runtime[gcp]'")


def test_launching_loads_no_library_of_google() -> None:
    program = "import sys, runtime.client.jobs.launch, runtime.client.jobs.secrets; print([n for n in sys.modules if 'google' in n])"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"


# from this machine


@pytest.mark.parametrize(
    ("source", "value", "problem"),
    [
        ("env", b"\xff" + CANARY.encode(), "is no UTF-8"),
        ("file", b"\xff" + CANARY.encode(), "is no UTF-8"),
        ("file", CANARY.encode() + b"\0", "holds a zero byte, which no variable can carry"),
        ("secret-manager", b"\xff" + CANARY.encode(), "is no UTF-8"),
        ("secret-manager", CANARY.encode() + b"\0", "holds a zero byte, which no variable can carry"),
    ],
)
def test_value_that_no_variable_can_carry_is_refused_and_not_said(
    google: GoogleServer, read: Read, tmp_path: Path, source: str, value: bytes, problem: str
) -> None:
    google.put_secret("dev-hf-token", value)
    (tmp_path / "key").write_bytes(value)
    rest = {"env": "MINE", "file": f"{tmp_path}/key", "secret-manager": "hf-token"}[source]

    with pytest.raises(NotPossible) as refused:
        read(SecretRef(name="TOKEN", source=f"{source}://{rest}"), MINE=os.fsdecode(value))

    assert refused.value.message == f"the value of secret `TOKEN` {problem}"
    assert refused.value.facts == (f"read from {source}://{rest}",)
    assert (refused.value.__cause__, refused.value.__context__) == (None, None)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("env://MISSING", "secret `A` is to come from the variable `MISSING`, which is not set here"),
        ("file:///no/such/key", "cannot read the secret `A` from `/no/such/key`: no such file or directory"),
        ("file:///", "cannot read the secret `A` from `/`: is a directory"),
        ("file:///dev/zero", "cannot read the secret `A` from `/dev/zero`: it is longer than 1,048,576 bytes"),
    ],
)
def test_source_that_has_no_value_is_refused_with_a_next_step(read: Read, source: str, message: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        read(SecretRef(name="A", source=source))

    assert refused.value.message == message
    assert refused.value.hint


# launched jobs


@pytest.fixture
def run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    google: GoogleServer,
    published: Path,
) -> Iterator[Terminal]:
    monkeypatch.setenv("RUNTIME_OUTPUTS", str(published))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    google.put_secret("dev-hf-token", CANARY.encode())
    with open_terminal(tmp_path, monkeypatch, capsys) as terminal:
        yield terminal


WORDS = ("--on", "local", "--secret", "HF_TOKEN=secret-manager://hf-token")


def holding(folder: Path) -> list[Path]:
    """List the files that contain the value, plain or in Secret Manager's encoding."""
    found = []
    for path in (Path(place, name) for place, _, names in os.walk(folder) for name in names):
        try:
            content = path.read_bytes() if path.is_file() else b""
        except FileNotFoundError:  # an ended job is being cleaned up
            continue
        if CANARY.encode() in content or base64.b64encode(CANARY.encode()) in content:
            found.append(path)
    return found


def test_command_sees_the_secret_and_nothing_of_it_is_left_or_said(
    run: Terminal, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = 'until [ -e "$0" ]; do sleep 0.05; done; echo "${#HF_TOKEN} of ${HF_TOKEN%_*}"'
    command = ("--", "sh", "-c", script, str(tmp_path / "go"))
    with caplog.at_level(logging.DEBUG):
        said = [run("launch", *WORDS, *more, *command) for more in (("--dry-run",), ("--dry-run", "-o", "json"), ())]
    job = said[-1].out.strip()
    during = [(str(path.relative_to(run.folder(job))), path.stat().st_mode & 0o777) for path in holding(tmp_path)]
    (tmp_path / "go").touch()
    run.wait(job, "succeeded")
    wait_for(lambda: not (run.folder(job) / "secrets").exists(), "the end of the secret")
    said += [run("status", job, "-o", "json"), run("explain", job), run("logs", job)]

    assert [each.code for each in said] == [0] * len(said)
    assert said[-1].out == f"{len(CANARY)} of hf_canary\n"
    assert during == [("secrets/HF_TOKEN", 0o600)]
    assert holding(tmp_path) == []
    assert CANARY not in "".join(each.out + each.err for each in said) + caplog.text


def test_search_for_the_value_finds_it(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(f"x{CANARY}")
    (tmp_path / "b").write_bytes(base64.b64encode(CANARY.encode()))
    (tmp_path / "c").write_text("x")

    assert sorted(path.name for path in holding(tmp_path)) == ["a", "b"]


def test_dry_run_refuses_a_secret_that_the_target_cannot_read(run: Terminal) -> None:
    words = ("--on", "local", "--secret", "HF_TOKEN=kubernetes://login/token", "--dry-run", "--", "true")

    said = run("launch", *words)

    assert (said.code, said.out) == (2, "")
    assert said.err.splitlines() == [
        "error: target `local` cannot bring secret `HF_TOKEN`: it knows no sources that begin with `kubernetes://`",
        "  known there: env://, file://, secret-manager://",
        "hint: `runtime targets show local` says what each does",
    ]


def test_scheme_that_is_misspelt_names_the_nearest_and_not_what_follows_it(run: Terminal) -> None:
    said = run("launch", "--on", "local", "--secret", f"HF_TOKEN=secrets-manager://{CANARY}", "--", "true")

    assert (said.code, said.out) == (2, "")
    assert said.err.splitlines()[-1] == "hint: did you mean `secret-manager://`?"
    assert CANARY not in said.err
    assert not run.data.exists()


def test_value_in_place_of_a_source_is_refused_and_not_repeated(run: Terminal) -> None:
    said = run("launch", "--on", "local", "--secret", f"HF_TOKEN={CANARY}", "--", "true")

    assert (said.code, said.out) == (2, "")
    assert "expected SCHEME://REST" in said.err
    assert CANARY not in said.err


def test_dry_run_says_how_each_secret_travels(run: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    (run.tree / "runtime.toml").write_text(
        '[targets.lab]\nkind = "kubernetes"\nnamespace = "lab"\nrecords = "claim://data/runtime"\n'
    )
    monkeypatch.setenv("MINE", CANARY)
    words = ("--secret", "HF_TOKEN=kubernetes://login/token", "--secret", "OTHER=env://MINE", "--image", "debian:12")
    words = ("launch", "--on", "lab", *words, "--set", "code.mode=image", "--dry-run")

    said = run(*words, "--", "true")
    (plan,) = run(*words, "-o", "json", "--", "true").json

    of_cluster, common = (KubernetesLauncher.secret_schemes[name].how for name in ("kubernetes", "env"))
    assert said.out.split("# who reads each secret\n")[1].splitlines() == [
        f"HF_TOKEN                 backend  kubernetes://login/token: {of_cluster}",
        f"OTHER                    launch   env://MINE: {common}",
    ]
    assert [(each["name"], each["read_by"]) for each in plan["secrets"]] == [
        ("HF_TOKEN", "backend"),
        ("OTHER", "launch"),
    ]
    assert CANARY not in said.out + said.err


def test_dry_run_asks_neither_the_stack_nor_google(run: Terminal, google: GoogleServer, published: Path) -> None:
    published.unlink()

    said = run("launch", *WORDS, "--dry-run", "--", "true")

    assert said.code == 0
    assert google.log == []


def test_retry_of_a_job_reads_the_secret_again(run: Terminal, google: GoogleServer) -> None:
    job = run.finish('echo "$HF_TOKEN" | cut -c 4-9; exit 3', *WORDS[2:])
    wait_for(lambda: not (run.folder(job) / "secrets").exists(), "the end of the secret")
    google.put_secret("dev-hf-token", b"hf_rotated")

    assert run("retry", job).code == 0

    wait_for(lambda: len(run("status", job, "-o", "json").json["attempts"]) == 2, "the second attempt")
    run.wait(job)
    assert run("logs", job).out == "canary\nrotate\n"


@pytest.mark.parametrize("point", ["locked", "written", "submitted", "launched"])
def test_launch_killed_at_any_step_and_repeated_has_the_secret(
    run: Terminal, copies: Copies, tmp_path: Path, point: str
) -> None:
    words = ["launch", *WORDS, "--", "sh", "-c", "echo ${#HF_TOKEN}"]
    killed = copies.run(COMMAND, words, {**os.environ, "RUNTIME_FAULTS": f"launch.{point}=kill"})
    again = copies.run(COMMAND, words)

    assert killed.returncode == -signal.SIGKILL
    assert again.returncode == 0, again.stderr
    job = again.stdout.strip()
    run.wait(job, "succeeded")
    assert run("logs", job).out == f"{len(CANARY)}\n"
    wait_for(lambda: holding(tmp_path) == [], "the end of the secret")


@pytest.mark.parametrize(("trouble", "code"), [("denied", 2), ("damaged", 3), ("down", 3), ("binary", 2)])
def test_launch_whose_secret_cannot_be_read_starts_nothing_and_says_no_value(
    run: Terminal, copies: Copies, google: GoogleServer, tmp_path: Path, trouble: str, code: int
) -> None:
    if trouble == "denied":
        google.deny("*.access", "secretmanager.versions.access")
    if trouble == "down":
        google.fail("*.access", 500, "INTERNAL", "sorry")
    if trouble == "binary":
        google.put_secret("dev-hf-token", b"\xff" + CANARY.encode())
    program = "import sys; from runtime.cli.main import main; import runtime.stack.google_api; runtime.stack.google_api._PAUSES_S = (); "
    if trouble == "damaged":
        program += "import runtime.stack.secrets; runtime.stack.secrets.crc32c = lambda value: 7; "

    program += "sys.exit(main(sys.argv[1:]))"
    done = copies.run(program, ["--debug", "launch", *WORDS, "--", "true"])

    assert done.returncode == code, done.stderr
    assert "Traceback" in done.stderr
    assert CANARY not in done.stdout + done.stderr
    assert holding(tmp_path) == []
    assert list(run.data.rglob("native")) == []


def test_launch_that_the_backend_refuses_leaves_no_value(
    run: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Path] = []

    def refuse(*_: object) -> str:
        seen.extend(holding(tmp_path))
        raise NotPossible("no such partition")

    monkeypatch.setattr(LocalLauncher, "submit", refuse)

    said = run("launch", *WORDS, "--", "true")

    assert (said.code, [path.name for path in seen]) == (2, ["HF_TOKEN"])
    assert holding(tmp_path) == []


def test_project_files_stack_is_the_targets(
    run: Terminal, google: GoogleServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("stack", "pull", os.environ["RUNTIME_OUTPUTS"])
    monkeypatch.delenv("RUNTIME_OUTPUTS")
    (run.tree / "runtime.toml").write_text('[targets.here]\nkind = "local"\nstack = "dev"\n')

    without = run("launch", *WORDS, "--", "true")
    said = run("launch", "--on", "here", *WORDS[2:], "--", "sh", "-c", "echo ${#HF_TOKEN}")

    assert (without.code, said.code) == (2, 0), said.err
    run.wait(said.out.strip(), "succeeded")
    assert run("logs", said.out.strip()).out == f"{len(CANARY)}\n"
