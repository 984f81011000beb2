"""`runtime secrets`: list, put, check; where values are read from, and that none is ever printed."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.cli.main import main
from runtime.outputs import SecretOutput, StackOutputs, encode_outputs
from tests.fakes.google import GoogleServer
from tests.output_support import differences, documented

CANARY = "hf_canary_31337"
STACK = StackOutputs(
    stack="dev",
    project="p",
    secrets={"hf-token": SecretOutput(resource="projects/p/secrets/dev-hf-token", env="HF_TOKEN")},
)
RESOURCE = "projects/p/secrets/dev-hf-token"
GOES = f"the value goes to `{RESOURCE}`\n"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch) -> Iterator[GoogleServer]:
    server = GoogleServer().start()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield server
    server.stop()
    assert server.refused == []


@pytest.fixture
def run(
    google: GoogleServer, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Run:
    (tmp_path / "dev.json").write_text(encode_outputs(STACK))
    monkeypatch.setenv("RUNTIME_OUTPUTS", str(tmp_path / "dev.json"))
    monkeypatch.chdir(tmp_path)

    def call(*args: str, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = main(["secrets", *args])
        captured = capsys.readouterr()
        assert CANARY not in captured.out + captured.err
        return code, captured.out, captured.err

    return call


def stored(google: GoogleServer) -> list[bytes]:
    return list(google.payloads.values())


@pytest.mark.parametrize(
    ("piped", "value"),
    [
        (f"{CANARY}\n", CANARY),
        (f"{CANARY}\r\n", CANARY),
        (CANARY, CANARY),
        (f"{CANARY}\n\n", f"{CANARY}\n"),
        (f" {CANARY} ", f" {CANARY} "),
        ("line one\nline two\n", "line one\nline two"),
    ],
)
def test_put_takes_standard_input_without_one_newline_at_its_end(
    google: GoogleServer, run: Run, piped: str, value: str
) -> None:
    google.put_secret("dev-hf-token")

    code, out, err = run("put", "hf-token", stdin=piped.encode())

    assert (code, out, err) == (0, "", f"{GOES}secret `hf-token` has version 1 now, for `HF_TOKEN`\n")
    assert stored(google) == [value.encode()]


@pytest.mark.parametrize("own", ["p", None], ids=["of another project", "of a stack without a project"])
def test_put_into_a_secret_of_another_project_is_refused_before_the_value_is_read(
    google: GoogleServer, run: Run, tmp_path: Path, own: str | None
) -> None:
    elsewhere = SecretOutput(resource="projects/other/secrets/hf-token", env="HF_TOKEN")
    stack = replace(STACK, project=own, secrets={"hf-token": elsewhere})
    (tmp_path / "dev.json").write_text(encode_outputs(stack))
    code, _, err = run("put", "hf-token", "--file", "a-file-that-is-not-there")

    assert code == 2
    assert "projects/other/secrets/hf-token" in err
    assert "runtime secrets put hf-token --project other" in err
    assert google.calls() == []
    assert run("put", "hf-token", "--project", "wrong", stdin=CANARY.encode())[0] == 2


def test_put_into_a_secret_of_another_project_that_is_named_prints_the_resource_and_adds_the_value(
    google: GoogleServer, run: Run, tmp_path: Path
) -> None:
    google.project = "other"
    google.put_secret("hf-token")
    elsewhere = SecretOutput(resource="projects/other/secrets/hf-token", env="HF_TOKEN")
    (tmp_path / "dev.json").write_text(encode_outputs(replace(STACK, secrets={"hf-token": elsewhere})))

    code, _, err = run("put", "hf-token", "--project", "other", stdin=CANARY.encode())

    assert (code, err.splitlines()[0]) == (0, "the value goes to `projects/other/secrets/hf-token`")
    assert stored(google) == [CANARY.encode()]


def test_put_into_a_secret_of_the_stack_is_refused_if_another_project_is_named(google: GoogleServer, run: Run) -> None:
    google.put_secret("dev-hf-token")

    code, _, err = run("put", "hf-token", "--project", "other", stdin=CANARY.encode())

    assert (code, google.calls()) == (2, [])
    assert "lies in the project `p`, not in `other`" in err


def test_put_takes_a_file_byte_by_byte_and_says_so(google: GoogleServer, run: Run, tmp_path: Path) -> None:
    google.put_secret("dev-hf-token")
    (tmp_path / "key.pem").write_bytes(b"-----BEGIN\n\xff\n")

    code, _, err = run("put", "hf-token", "--file", "key.pem")

    assert (code, stored(google)) == (0, [b"-----BEGIN\n\xff\n"])
    assert err.startswith(GOES + "the file ends with a newline, which is part of the value")


def test_put_as_json_tells_the_version(google: GoogleServer, run: Run) -> None:
    google.put_secret("dev-hf-token", b"1", b"2")

    code, out, err = run("put", "hf-token", "--disable-older", "-o", "json", stdin=CANARY.encode())

    assert (code, err) == (0, GOES)
    assert json.loads(out) == {
        "name": "hf-token",
        "env": "HF_TOKEN",
        "resource": RESOURCE,
        "version": "3",
        "disabled": ["1", "2"],
    }


@pytest.mark.parametrize(
    "args",
    [
        ("put", "hf-token", CANARY),
        ("put", "hf-token", f"--value={CANARY}"),
        ("put", "hf-token", "--value", CANARY),
        ("put", "hf-token", f"-----{CANARY}"),
    ],
)
def test_value_on_the_command_line_is_refused_and_not_repeated(
    google: GoogleServer, run: Run, args: tuple[str, ...]
) -> None:
    google.put_secret("dev-hf-token")

    code, out, err = run(*args)

    assert (code, out) == (2, "")
    assert "no value on the command line" in err
    assert stored(google) == []


@pytest.mark.parametrize("stdin", [b"", b"\n", b"   \n"])
def test_put_of_nothing_is_refused(google: GoogleServer, run: Run, stdin: bytes) -> None:
    google.put_secret("dev-hf-token")

    code, _, err = run("put", "hf-token", stdin=stdin)

    assert code == 2
    assert err.startswith(f"{GOES}error: the value of secret `hf-token` is empty\n")
    assert stored(google) == []


def test_put_of_an_unknown_name_is_refused_before_the_value_is_read(run: Run) -> None:
    code, _, err = run("put", "hf-tokn", stdin=CANARY.encode())

    assert code == 2
    assert err.startswith("error: no secret named `hf-tokn` in stack `dev`\n  known secrets: hf-token\n")


def test_put_of_an_unknown_name_is_refused_before_credentials_are_looked_for(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RUNTIME_GOOGLE_API")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))

    code, _, err = run("put", "hf-tokn", stdin=CANARY.encode())

    assert (code, err.splitlines()[0]) == (2, "error: no secret named `hf-tokn` in stack `dev`")


def test_put_of_a_file_that_is_not_there_is_refused(google: GoogleServer, run: Run) -> None:
    google.put_secret("dev-hf-token")

    code, _, err = run("put", "hf-token", "--file", "none.pem")

    assert code == 2
    assert "cannot read `none.pem`: no such file or directory" in err


def test_put_without_permission_says_who_can_help(google: GoogleServer, run: Run) -> None:
    google.put_secret("dev-hf-token")
    google.deny("*.addVersion", "secretmanager.versions.add")

    code, _, err = run("put", "hf-token", stdin=CANARY.encode())

    assert code == 3
    assert "hint: ask an operator for `roles/secretmanager.secretVersionAdder` on it" in err


def test_put_in_a_terminal_asks_and_shows_nothing(google: GoogleServer, run: Run, tmp_path: Path) -> None:
    """Uses a real terminal and a real process, to check the output and the process list."""
    google.put_secret("dev-hf-token")
    terminal, end = pty.openpty()
    # Asking for a hidden line needs the process's controlling terminal, not just a terminal as standard input.
    own = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.executable, sys.argv[1:])"
    command = [sys.executable, "-m", "runtime", "secrets", "put", "hf-token"]
    process = subprocess.Popen(
        [sys.executable, "-c", own, *command], stdin=end, stdout=end, stderr=end, start_new_session=True
    )
    os.close(end)
    shown = b""
    while b"value of `hf-token`: " not in shown:
        shown += os.read(terminal, 1024)
    command_line = Path(f"/proc/{process.pid}/cmdline").read_bytes()
    os.write(terminal, CANARY.encode() + b"\n")
    try:
        while chunk := os.read(terminal, 1024):
            shown += chunk
    except OSError:  # The terminal closes with its last process.
        pass
    code = process.wait()
    os.close(terminal)

    assert code == 0, shown
    assert CANARY.encode() not in shown + command_line
    assert b"has version 1 now" in shown
    assert stored(google) == [CANARY.encode()]


def test_put_with_tracebacks_shows_no_value(google: GoogleServer, run: Run, tmp_path: Path) -> None:
    google.put_secret("dev-hf-token")
    google.fail("*.addVersion", 500, "INTERNAL", "sorry")

    done = subprocess.run(
        [sys.executable, "-m", "runtime", "--debug", "secrets", "put", "hf-token"],
        input=CANARY.encode(),
        capture_output=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 3
    assert b"Traceback" in done.stderr
    assert CANARY.encode() not in done.stdout + done.stderr


def test_list_prints_where_each_lies_and_who_reads_it(google: GoogleServer, run: Run) -> None:
    google.put_secret("dev-hf-token", CANARY.encode(), readers=["serviceAccount:w@p"])

    assert run("list") == (
        0,
        f"hf-token\tHF_TOKEN\t{RESOURCE}\t1\t1\t2026-11-01T00:00:00.000Z\tserviceAccount:w@p\t-\n",
        "",
    )
    code, out, _ = run("list", "-o", "json")
    assert (code, json.loads(out)) == (
        0,
        [
            {
                "name": "hf-token",
                "env": "HF_TOKEN",
                "resource": RESOURCE,
                "versions": 1,
                "newest": "1",
                "created_at": "2026-11-01T00:00:00.000Z",
                "readers": ["serviceAccount:w@p"],
                "may_read": True,
                "problem": None,
                "next_step": None,
            }
        ],
    )


def test_check_is_0_where_all_is_in_order_and_1_where_something_lacks(google: GoogleServer, run: Run) -> None:
    resource = google.put_secret("dev-hf-token", CANARY.encode(), readers=["serviceAccount:w@p"])
    google.allowed[resource] = set()
    assert run("check") == (0, "hf-token\tok\t1\t1\tno\t-\t-\n", "1 of 1 in order\n")

    google.versions[resource][0]["state"] = "DISABLED"
    assert run("check") == (
        1,
        "hf-token\tlacking\t-\t1\tno\tall its versions are disabled\truntime secrets put hf-token --stack dev\n",
        "1 of 1 lacking\n",
    )
    code, out, err = run("check", "-o", "json")
    assert (code, err, json.loads(out)[0]["problem"]) == (1, "", "all its versions are disabled")


def test_stack_without_secrets_is_explained(run: Run, tmp_path: Path) -> None:
    (tmp_path / "dev.json").write_text(encode_outputs(replace(STACK, secrets={})))

    code, _, err = run("list")

    assert code == 2
    assert err == (
        "error: stack `dev` exports no `secrets`, and `runtime secrets` needs it\n"
        "hint: add `secrets` to Pulumi.dev.yaml, then run `pulumi up --stack dev`\n"
    )


def test_local_stack_has_no_secrets(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RUNTIME_OUTPUTS")

    code, _, err = run("check")

    assert code == 2
    assert "stack `local` exports no `secrets`" in err


@pytest.mark.parametrize(
    ("command", "alike"),
    [
        *((each, each) for each in documented() if each.startswith("runtime secrets ")),
        ("runtime secrets check -o json", "runtime secrets list -o json"),
    ],
)
def test_shape_is_as_the_page_shows_it(google: GoogleServer, run: Run, command: str, alike: str) -> None:
    google.put_secret("dev-hf-token", CANARY.encode(), readers=["serviceAccount:w@p"])

    code, out, _ = run(*command.split()[2:], stdin=CANARY.encode())

    assert code == 0
    assert differences(documented()[alike], json.loads(out)) == []
