#!/usr/bin/env python3
"""What a Ray head and its TPU nodes do by themselves: fetch their files, secrets and image, and follow changes.

This file is rendered into the machine's metadata as it is and runs there with the machine's own Python, so it uses the
standard library only, in the dialect of Python 3.8. It is told apart from other files by nothing else: the same text
runs on heads and nodes, and `settings.json` says which one this is. No value of a secret is ever printed, put on a
command line or written anywhere but into one file on a file system in memory, which root alone can read.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import random
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(os.environ.get("RUNTIME_RAY_ROOT", "/"))
METADATA = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
GOOGLE = os.environ.get("RUNTIME_GOOGLE_API", "")

SETTINGS = "etc/runtime-ray/settings.json"
PRIVATE_KEY = "etc/runtime-ray/ssh/id_ed25519"
NODE_ENVIRONMENT = "etc/runtime-ray/node.env"
ENVIRONMENT = "run/runtime-ray/environment"

MANIFEST_KEY = "ray-files"
AUTOSCALER_KEY = "ray-autoscaler"
# In two parts: this file lies inside the one in which the mark is replaced.
PUBLIC_KEY_MARK = "@@" + "HEAD_PUBLIC_KEY@@"

# For a member, which joins a cluster by itself; `runtime.clusters.members` writes it.
MEMBER_KEY = "ray-member"
# Ray reads the number of a slice's host from the same places.
# https://github.com/ray-project/ray/blob/ray-2.9.0/python/ray/_private/accelerators/tpu.py
WORKER_NUMBER_KEY = "agent-worker-number"
TPU_ENVIRONMENT_KEY = "tpu-env"

NODE_UNIT = "runtime-ray-node.service"
NODE_VARIABLES = ("RAY_HEAD_IP", "RAY_OVERRIDE_RESOURCES", "RAY_OVERRIDE_LABELS")
RAYLET_PORT = 6380

SHORTEST_WAIT_S = float(os.environ.get("RUNTIME_RAY_WAIT_S", "5"))
LONGEST_WAIT_S = 120.0
START_PATIENCE_S = 300.0
OLDER_VERSIONS = 20
# The shares of a host that pools offer as well: other tasks than Ray's, its object store and the system take the rest.
CPUS_SHARE = 0.5
MEMORY_SHARE = 0.6


class NotYet(Exception):
    """Something that this machine needs is not there; the text says what, and never a value."""


def say(text: str) -> None:
    sys.stdout.write(f"runtime-ray: {text}\n")
    sys.stdout.flush()


# the metadata server


def ask_metadata(path: str, *, timeout_s: float = 30.0) -> tuple[str, str]:
    """The text at `path` and its etag. Raises OSError."""
    request = urllib.request.Request(
        f"http://{METADATA}/computeMetadata/v1/{path}", headers={"Metadata-Flavor": "Google"}
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        return answer.read().decode(), answer.headers.get("ETag", "")


def read_attributes() -> dict[str, str]:
    text, _ = ask_metadata("instance/attributes/?recursive=true&alt=json")
    attributes: dict[str, str] = json.loads(text)
    return attributes


def report(key: str, value: str) -> None:
    """Publish a message in this machine's guest attributes. If they are off, it is only logged."""
    say(f"{key}: {value}")
    request = urllib.request.Request(
        f"http://{METADATA}/computeMetadata/v1/instance/guest-attributes/runtime/{key}",
        data=value.encode(),
        method="PUT",
        headers={"Metadata-Flavor": "Google"},
    )
    try:
        urllib.request.urlopen(request, timeout=10).close()
    except OSError as problem:
        say(f"no guest attribute `{key}`: {problem}")


def access_token() -> str:
    text, _ = ask_metadata("instance/service-accounts/default/token")
    token: str = json.loads(text)["access_token"]
    return token


# files


def write_file(path: str, text: str, mode: int = 0o644, *, folder_mode: int = 0o755) -> bool:
    """Put `text` at `path` below the root in one step. Returns whether anything changed."""
    target = ROOT / path
    if target.exists() and target.read_text() == text and target.stat().st_mode & 0o777 == mode:
        return False
    target.parent.mkdir(parents=True, exist_ok=True, mode=folder_mode)
    partial = target.with_name(target.name + ".partial")
    if partial.exists():
        partial.unlink()
    descriptor = os.open(str(partial), os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(file.fileno(), mode)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    # Ray reads its file every few seconds: it must find the old or the new one, whole.
    partial.replace(target)
    return True


def read_settings() -> dict[str, Any]:
    settings: dict[str, Any] = json.loads((ROOT / SETTINGS).read_text())
    return settings


def install_files(attributes: dict[str, str], *, live_only: bool = False) -> list[str]:
    """Write what the manifest lists; returns the keys whose files changed.

    With `live_only` what would need a restart is left as it is, and `find_stale` names it.
    """
    changed = []
    for entry in json.loads(attributes[MANIFEST_KEY]):
        if live_only and not entry["live"]:
            continue
        text = render_entry(entry["key"], attributes[entry["key"]])
        if write_file(entry["path"].lstrip("/"), text, int(entry["mode"], 8)):
            changed.append(entry["key"])
    return changed


def render_entry(key: str, text: str) -> str:
    if key != AUTOSCALER_KEY:
        return text
    return text.replace(PUBLIC_KEY_MARK, ensure_key())


def find_stale(attributes: dict[str, str]) -> list[str]:
    """Keys whose files here are older than the metadata and change nothing until a restart."""
    stale = []
    for entry in json.loads(attributes[MANIFEST_KEY]):
        path = ROOT / entry["path"].lstrip("/")
        if not entry["live"] and (not path.exists() or path.read_text() != attributes[entry["key"]]):
            stale.append(entry["key"])
    return stale


def ensure_key() -> str:
    """The public half of the key that this head logs in to its nodes with; the private one never leaves this machine."""
    private = ROOT / PRIVATE_KEY
    public = private.with_name(private.name + ".pub")
    if not private.exists() or not public.exists():
        private.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        for half in (private, public):
            if half.exists():
                half.unlink()
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "ray-head", "-f", str(private)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    return public.read_text().strip()


# secrets


def read_secret(resource: str, token: str) -> str:
    """The newest version that is enabled. Raises `NotYet` where there is none, or it may not be read."""
    name = resource.rsplit("/", 1)[-1]
    try:
        return access_version(f"{resource}/versions/latest", token)
    except urllib.error.HTTPError as problem:
        if problem.code == 404:
            raise NotYet(f"secret {name}: it has no version") from None
        if problem.code in (401, 403):
            raise NotYet(f"secret {name}: this machine may not read it") from None
        newest = re.search(r"/versions/(\d+)", error_message(problem)) if problem.code == 400 else None
        if newest is None:
            raise NotYet(f"secret {name}: answered {problem.code}") from None
    # `latest` is the newest one, enabled or not, and to list them takes a right that reading does not.
    first = int(newest.group(1)) - 1
    for version in range(first, max(0, first - OLDER_VERSIONS), -1):
        try:
            return access_version(f"{resource}/versions/{version}", token)
        except urllib.error.HTTPError:
            continue
    raise NotYet(f"secret {name}: it has no enabled version")


def error_message(problem: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(problem.read())["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""


def access_version(version: str, token: str) -> str:
    host = "secretmanager.googleapis.com"
    root = f"{GOOGLE.rstrip('/')}/{host}" if GOOGLE else f"https://{host}"
    request = urllib.request.Request(f"{root}/v1/{version}:access", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return base64.b64decode(json.load(answer)["payload"]["data"]).decode()


def write_environment() -> bool:
    """Fetch every secret and write the file of their values. Returns whether it changed.

    All or nothing: with one secret missing the file stays as it was. It is replaced in one step and root alone reads it,
    which is the user of the containers. Bash sources it before Ray starts; a program that wants the newest values reads
    it without a shell: in `shlex.split(text)` the words `export` and `NAME=value` alternate, and a value may have any
    character, line breaks among them. With no secrets it is empty.
    """
    secrets = read_settings()["secrets"]
    token = access_token() if secrets else ""
    lines = [f"export {each['env']}={shlex.quote(read_secret(each['resource'], token))}\n" for each in secrets]
    return write_file(ENVIRONMENT, "".join(lines), 0o600, folder_mode=0o700)


# the image


def find_image(image: str) -> bool:
    command = ["docker", "image", "inspect", image]
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode == 0


def pull_image() -> None:
    """Have the image of the settings here. Raises `NotYet`."""
    image = read_settings()["image"]
    if find_image(image):
        return
    host = image.partition("/")[0]
    # On a file system in memory, because docker writes the token that it is given into its folder.
    folder = ROOT / "run/runtime-ray/docker"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    environment = dict(os.environ, DOCKER_CONFIG=str(folder))
    try:
        if host.endswith("-docker.pkg.dev"):
            login = ["docker", "login", "--username", "oauth2accesstoken", "--password-stdin", f"https://{host}"]
            run_quietly(login, environment, stdin=access_token(), what=f"image {image}: cannot log in to {host}")
        run_quietly(["docker", "pull", image], environment, what=f"image {image}")
    finally:
        config = folder / "config.json"
        if config.exists():
            config.unlink()


def run_quietly(command: list[str], environment: dict[str, str], *, what: str, stdin: str = "") -> None:
    done = subprocess.run(
        command,
        env=environment,
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        last = done.stdout.strip().splitlines()[-1:] or [f"exit {done.returncode}"]
        raise NotYet(f"{what}: {last[0][:200]}")


# waiting


def wait_for(what: Callable[[], object], *, key: str = "waiting-for") -> None:
    """Try until it works, longer apart each time, and report what is missing whenever that changes."""
    pause, reported = SHORTEST_WAIT_S, ""
    while True:
        try:
            what()
        except (NotYet, OSError, ValueError, KeyError) as problem:
            missing = str(problem) or type(problem).__name__
        else:
            if reported:
                report(key, "nothing")
            return
        if missing != reported:
            report("state", "waiting")
            report(key, missing)
            reported = missing
        time.sleep(pause + random.uniform(0, pause / 4))
        pause = min(pause * 2, LONGEST_WAIT_S)


def prepare() -> None:
    """Wait until secrets and image are here; both may be put there long after the machine."""
    wait_for(write_environment)
    wait_for(pull_image)


# commands


def systemctl(*arguments: str) -> None:
    subprocess.run(["systemctl", *arguments], check=True)


def command_install(_: argparse.Namespace) -> None:
    attributes = read_attributes()
    changed = install_files(attributes)
    if any(key.endswith(("-service", "-timer")) for key in changed):
        systemctl("daemon-reload")
    report("restart-needed", "no")
    if AUTOSCALER_KEY in attributes:
        report("config-sha256", digest(attributes[AUTOSCALER_KEY]))
        # `runtime cluster add` gives it to members, as Ray gives it to its nodes.
        report("ssh-key", ensure_key())


def command_wait(_: argparse.Namespace) -> None:
    prepare()


def command_ready(_: argparse.Namespace) -> None:
    report("waiting-for", "nothing")
    report("state", "ready")


def command_secrets(_: argparse.Namespace) -> None:
    """One round: what cannot be fetched now keeps its old value."""
    try:
        changed = write_environment()
    except (NotYet, OSError) as problem:
        report("rotation", f"kept the old values: {problem}")
        raise SystemExit(1) from None
    report("rotation", "new values" if changed else "unchanged")


def command_watch(arguments: argparse.Namespace) -> None:
    """Follow the metadata: what may change while Ray runs is applied at once, the rest is named."""
    etag, rounds = "", 0
    while arguments.rounds is None or rounds < arguments.rounds:
        rounds += 1
        query = {"recursive": "true", "alt": "json"}
        if etag:
            query.update(wait_for_change="true", last_etag=etag, timeout_sec="300")
        try:
            text, etag = ask_metadata(f"instance/attributes/?{urllib.parse.urlencode(query)}", timeout_s=330)
            follow(json.loads(text))
        except (OSError, ValueError, KeyError, subprocess.CalledProcessError) as problem:
            say(f"cannot follow the metadata: {problem!r}")
            etag = ""
            time.sleep(SHORTEST_WAIT_S)


def follow(attributes: dict[str, str]) -> None:
    changed = install_files(attributes, live_only=True)
    for key in changed:
        say(f"applied {key}")
    if AUTOSCALER_KEY in changed:
        report("config-sha256", digest(attributes[AUTOSCALER_KEY]))
    stale = ", ".join(find_stale(attributes)) or "no"
    marker = "run/runtime-ray/restart-needed"
    if write_file(marker, stale, folder_mode=0o700):
        report("restart-needed", stale)
    start_timers(attributes)


def start_timers(attributes: dict[str, str]) -> None:
    """Start the timers that may begin while Ray runs; one that runs already goes on."""
    live = [entry for entry in json.loads(attributes[MANIFEST_KEY]) if entry["live"]]
    timers = [entry["path"].rsplit("/", 1)[-1] for entry in live if entry["key"].endswith("-timer")]
    if timers:
        systemctl("daemon-reload")
        systemctl("start", *timers)


def command_start_node(_: argparse.Namespace) -> None:
    """What the head runs on a node over SSH: start Ray there, again where it runs already, and wait until it listens."""
    values = {name: os.environ[name] for name in NODE_VARIABLES if os.environ.get(name)}
    if "RAY_HEAD_IP" not in values:
        raise SystemExit("runtime-ray: RAY_HEAD_IP is not set; the head sets it when it starts a node")
    start_node(values, again=True)


def command_join(_: argparse.Namespace) -> None:
    """Start Ray on a member, which no head starts; on other nodes, do nothing."""
    attributes = read_attributes()
    if MEMBER_KEY not in attributes:
        return
    found: list[dict[str, str]] = []
    # Google writes the number of a host after the host has started.
    wait_for(lambda: found.append(member_variables(read_attributes())))
    start_node(found[-1], again=False)


def member_variables(attributes: dict[str, str]) -> dict[str, str]:
    """The variables that Ray's autoscaler would set on this host. Raises `NotYet` while Google has not said which it is."""
    member = json.loads(attributes[MEMBER_KEY])
    number = worker_number(attributes)
    if number is None and member["hosts"] > 1:
        raise NotYet("number of this host in its slice")
    resources: dict[str, float] = {
        "CPU": max(1, int((os.cpu_count() or 1) * CPUS_SHARE)),
        "memory": int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * MEMORY_SHARE),
        **member["resources"],
    }
    if number in (None, 0):
        resources["TPU-{}-head".format(member["type"])] = 1
    return {
        "RAY_HEAD_IP": member["head"],
        "RAY_OVERRIDE_RESOURCES": json.dumps(resources, sort_keys=True),
        "RAY_OVERRIDE_LABELS": json.dumps(member["labels"], sort_keys=True),
    }


def worker_number(attributes: dict[str, str]) -> int | None:
    written = re.search(r"^WORKER_ID: *'?(\d+)'?", attributes.get(TPU_ENVIRONMENT_KEY, ""), re.MULTILINE)
    for text in (os.environ.get("TPU_WORKER_ID"), attributes.get(WORKER_NUMBER_KEY), written and written.group(1)):
        if text and text.strip().isdecimal():
            return int(text)
    return None


def start_node(values: dict[str, str], *, again: bool) -> None:
    """Start Ray with these variables; a Ray that runs with them already is started `again` or left alone."""
    lines = [f"{name}={quote_for_systemd(value)}\n" for name, value in values.items()]
    changed = write_file(NODE_ENVIRONMENT, "".join(lines), 0o600)
    prepare()
    try:
        systemctl("restart" if changed or again else "start", NODE_UNIT)
    except subprocess.CalledProcessError:
        raise SystemExit(f"runtime-ray: {NODE_UNIT} does not start; `journalctl -u {NODE_UNIT}` says why") from None
    deadline = time.monotonic() + START_PATIENCE_S
    while not listens(RAYLET_PORT):
        if time.monotonic() > deadline:
            raise SystemExit(f"runtime-ray: Ray does not listen on port {RAYLET_PORT}; `docker logs ray` says why")
        time.sleep(1)
    report("state", "ready")


def quote_for_systemd(value: str) -> str:
    """Text for an EnvironmentFile, in which double quotes take backslashes."""
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$").replace("`", "\\`") + '"'


def listens(port: int, host: str | None = None) -> bool:
    try:
        socket.create_connection((host or "127.0.0.1", port), timeout=2).close()
    except OSError:
        return False
    return True


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


COMMANDS = {
    "install": command_install,
    "wait": command_wait,
    "ready": command_ready,
    "secrets": command_secrets,
    "watch": command_watch,
    "start-node": command_start_node,
    "join": command_join,
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="machine.py")
    parser.add_argument("command", choices=sorted(COMMANDS))
    parser.add_argument("--rounds", type=int, help="of `watch`: end after so many answers")
    parsed = parser.parse_args(arguments)
    os.umask(0o077)
    COMMANDS[parsed.command](parsed)


if __name__ == "__main__":
    main(sys.argv[1:])
