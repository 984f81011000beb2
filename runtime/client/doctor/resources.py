"""Looks at each resource of a stack with the identity and the network of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from runtime.clock import describe_skew
from runtime.errors import RuntimeFailure, StoreUnavailable, StoreUnsafe
from runtime.outputs import (
    ClusterOutput,
    KubernetesOutput,
    OtherQueueOutput,
    PubSubQueueOutput,
    QueueOutput,
    SecretOutput,
    SqliteQueueOutput,
    StackOutputs,
)

if TYPE_CHECKING:
    from runtime.records.base import RecordStore
    from runtime.stack.google_api import GoogleApi
from runtime.client.doctor.lines import Line, fail, failed, guard, ok, quote_words, warn

PROBE_PATIENCE: Final = timedelta(seconds=10)
TOOL_PATIENCE_S: Final = 10
WEB_PATIENCE_S: Final = 5
EXAMINED_S: Final = 5.0
"""How long a task file is looked through."""


def ask_tool(*words: str) -> str | None:
    """The first line that a command prints, None if it fails or takes long."""
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TOOL_PATIENCE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().partition("\n")[0] if done.returncode == 0 else None


def needs_google(outputs: StackOutputs) -> bool:
    pubsub = any(isinstance(each, PubSubQueueOutput) for each in outputs.queues.values())
    bucket = outputs.records is not None and outputs.records.url.startswith("gs:")
    return (
        (pubsub and not os.environ.get("PUBSUB_EMULATOR_HOST"))
        or (bucket and not os.environ.get("STORAGE_EMULATOR_HOST"))
        or bool(outputs.secrets or outputs.clusters)
        or any(google_repository(each.url) for regions in outputs.registries.values() for each in regions.values())
    )


def check_clock(skew: timedelta, whose: str) -> Line:
    text = describe_skew(skew, whose)
    if text is None:
        return ok("clock", f"agrees with {whose}")
    verdict = fail if abs(skew) > timedelta(minutes=5) else warn
    return verdict("clock", text, "set the clock: `timedatectl set-ntp true`, or what keeps time on this machine")


def unchecked(check: str) -> list[Line]:
    return [warn(check, "not checked: there is no way to Google from here", "mend `identity` first")]


def check_queue(name: str, output: QueueOutput, stack: str, google: GoogleApi | None) -> Sequence[Line]:
    check = f"queue {name}"
    if isinstance(output, SqliteQueueOutput):
        return [_sqlite(check, Path(output.path))]
    if isinstance(output, OtherQueueOutput):
        text = f"it is of kind `{output.kind}`, which this release does not know"
        return [warn(check, text, "pip install --upgrade research-runtime")]
    emulator = os.environ.get("PUBSUB_EMULATOR_HOST")
    if emulator:
        return [_emulated_queue(check, output, emulator)]
    return unchecked(check) if google is None else [guard(check, lambda: _pubsub(check, output, stack, google))]


def _sqlite(check: str, path: Path) -> Line:
    from runtime.records.embedded import examine_file

    if not path.exists() and not path.is_symlink():
        return ok(check, f"{path}, which comes into being on first use")
    try:
        whole = examine_file(path, patience_s=EXAMINED_S)
    except RuntimeFailure as problem:
        return failed(check, problem)
    if not os.access(path, os.R_OK | os.W_OK):
        return fail(check, f"`{path}` cannot be read and written", f"chown or chmod {path}")
    return ok(check, str(path) if whole else f"{path}, of which not all was looked at: it is large")


def _emulated_queue(check: str, output: PubSubQueueOutput, emulator: str) -> Line:
    missing = []
    for resource in (output.topic, output.subscription):
        status, text = _ask_web(f"http://{emulator}/v1/{resource}")
        if status is None:
            return fail(
                check, f"the emulator at {emulator} does not answer: {text}", "start it, or unset PUBSUB_EMULATOR_HOST"
            )
        if status == 404:
            missing.append(resource)
        elif status != 200:
            return fail(check, f"the emulator at {emulator} answered {status} for {resource}", "restart it")
    if missing:
        text = f"the emulator at {emulator} has no {' and no '.join(missing)} yet"
        return warn(check, text, "they are made on first use: submit something")
    return ok(check, f"publish and pull, on the emulator at {emulator}")


_DOES: Final = {"pubsub.topics.publish": "publish", "pubsub.subscriptions.consume": "pull"}


def _pubsub(check: str, output: PubSubQueueOutput, stack: str, google: GoogleApi) -> Line:
    """Submitters publish, workers do both and need the dead letters too."""
    able: dict[str, bool] = {}
    wanted = [
        ("topics", output.topic, "pubsub.topics.publish", ""),
        ("subscriptions", output.subscription, "pubsub.subscriptions.consume", ""),
        ("topics", output.dead_letter_topic, "pubsub.topics.publish", " dead letters"),
        ("subscriptions", output.dead_letter_subscription, "pubsub.subscriptions.consume", " dead letters"),
    ]
    for kind, resource, permission, more in wanted:
        if resource is None:
            continue
        may = permission in google.allowed("pubsub", f"v1/{resource}", (permission,))
        # Of what does not exist, Google says that nothing is allowed.
        if not may and (gone := _missing(google, f"v1/{resource}", kind, resource)):
            return fail(check, gone, f"run `pulumi up --stack {stack}`")
        able[_DOES[permission] + more] = may
    able_to = [what for what, may in able.items() if may]
    unable = [what for what, may in able.items() if not may]
    if not unable:
        return ok(check, quote_words(able_to))
    ask = f"ask an operator of stack `{stack}` to add you to `access`, or work as its worker identity"
    if "publish" in unable and "pull" in unable:
        return fail(check, f"this identity may not {' or '.join(unable)}", ask)
    text = f"may {quote_words(able_to)}; may not {' or '.join(unable)}"
    role = "enough to submit, not to work" if "publish" in able_to else "not enough to submit or to work"
    return warn(check, f"{text}: {role}", ask)


def _missing(google: GoogleApi, path: str, kind: str, resource: str) -> str | None:
    from runtime.stack.google_api import GoogleRefused

    try:
        gone = google.find("pubsub", path) is None
    except GoogleRefused as refused:
        if refused.status == 403 and not refused.disabled_api:
            return None
        raise
    return f"there is no {kind.removesuffix('s')} `{resource}`" if gone else None


def check_records(outputs: StackOutputs, google: GoogleApi | None) -> Sequence[Line]:
    check = "records"
    if outputs.records is None:
        if not outputs.queues:
            return []
        fix = f"add `records` to Pulumi.{outputs.stack}.yaml, then run `pulumi up --stack {outputs.stack}`"
        return [fail(check, "the stack exports no `records`, and its queues need them", fix)]
    url = outputs.records.url
    if url.startswith("sqlite:"):
        return [_sqlite(check, Path(url.removeprefix("sqlite:")))]
    if url.startswith("gs:") and not os.environ.get("STORAGE_EMULATOR_HOST"):
        if google is None:
            return unchecked(check)
        return [guard(check, lambda: _bucket(check, url, outputs.stack, google))]
    try:
        return _probe(check, url)
    except RuntimeFailure as problem:
        return [failed(check, problem)]


_OBJECTS: Final = {
    "storage.objects.get": "read",
    "storage.objects.list": "list",
    "storage.objects.create": "create",
    "storage.objects.delete": "replace",
}


def _bucket(check: str, url: str, stack: str, google: GoogleApi) -> Line:
    bucket = urlsplit(url).netloc
    may = google.allowed("storage", f"storage/v1/b/{bucket}", tuple(_OBJECTS))
    lacking = [word for permission, word in _OBJECTS.items() if permission not in may]
    ask = (
        f"ask an operator of stack `{stack}` to add you to `access`: it grants `roles/storage.objectUser` on the bucket"
    )
    if "read" in lacking or "list" in lacking:
        return fail(check, f"this identity may not {' or '.join(lacking)} in {url}", ask)
    if lacking:
        text = (
            f"{url} can be read; this identity may not {' or '.join(lacking)}: enough to look, not to submit or to work"
        )
        return warn(check, text, ask)
    if google.stands_in:
        return ok(check, f"{url}: read, list, create, replace")
    # The bucket's clock is Google's, of which `identity` has told.
    return _probe(check, url)[0]


def _probe(check: str, url: str) -> list[Line]:
    """Prove that the first of two writes wins, which is what every record relies on, and compare the clocks."""
    from runtime.records import open_records
    from runtime.records.blobs.bucket import BucketBlobs
    from runtime.records.store import BlobRecords

    if url.startswith(("gs:", "s3:")):
        store: RecordStore = BlobRecords(BucketBlobs(url, timeout=PROBE_PATIENCE, retry_for=PROBE_PATIENCE))
    else:
        store = open_records(url)
    try:
        store.check()
        skew = store.skew()
    except (StoreUnavailable, StoreUnsafe) as problem:
        return [failed(check, problem)]
    finally:
        store.close()
    lines = [ok(check, f"{url}: read and written, and the first write wins")]
    return lines if skew is None else [*lines, check_clock(skew, "the record store's")]


def google_repository(url: str) -> str | None:
    """`projects/P/locations/R/repositories/N` of an Artifact Registry url, None of any other."""
    host, _, path = url.removeprefix("https://").partition("/")
    location, found, _ = host.partition("-docker.pkg.dev")
    parts = path.split("/")
    if not found or len(parts) < 2:
        return None
    return f"projects/{parts[0]}/locations/{location}/repositories/{parts[1]}"


def check_registry(name: str, url: str, stack: str, google: GoogleApi | None) -> Sequence[Line]:
    check = f"registry {name}"
    repository = google_repository(url)
    if repository is None:
        return [_web_registry(check, url)]
    return (
        unchecked(check) if google is None else [guard(check, lambda: _images(check, url, repository, stack, google))]
    )


_IMAGES: Final = {
    "artifactregistry.repositories.downloadArtifacts": "pull",
    "artifactregistry.repositories.uploadArtifacts": "push",
}


def _images(check: str, url: str, repository: str, stack: str, google: GoogleApi) -> Line:
    may = google.allowed("artifactregistry", f"v1/{repository}", tuple(_IMAGES))
    able = [word for permission, word in _IMAGES.items() if permission in may]
    if not able and google.find("artifactregistry", f"v1/{repository}") is None:
        return fail(check, f"there is no repository `{repository}`", f"run `pulumi up --stack {stack}`")
    if "pull" not in able:
        ask = f"ask an operator of stack `{stack}` to add you to `access`"
        return warn(check, f"this identity may not pull from {url}", ask)
    return ok(check, f"{quote_words(able)}, {url}")


def _web_registry(check: str, url: str) -> Line:
    host = url.removeprefix("https://").removeprefix("http://").partition("/")[0]
    local = host.partition(":")[0] in ("localhost", "127.0.0.1")
    status, text = _ask_web(f"{'http' if local else 'https'}://{host}/v2/")
    if status in (200, 401):
        return ok(check, f"{host} answers")
    said = f"answered {status}" if status else f"does not answer: {text}"
    return warn(check, f"{host} {said}", "is it a registry, and does it run?")


def check_secret(name: str, secret: SecretOutput, stack: str, google: GoogleApi | None) -> Sequence[Line]:
    check = f"secret {name}"
    if google is None:
        return unchecked(check)
    from runtime.stack.secrets import look_at

    def look() -> Line:
        seen = look_at(name, secret, stack, google)
        if seen.problem is not None:
            # Most people may not look into a secret, and need not.
            verdict = warn if seen.versions is None and seen.readers is None and seen.may_read is None else fail
            verdict = warn if "may not see" in seen.problem else verdict
            return verdict(check, seen.problem, seen.next_step)
        mine = "this identity may read it" if seen.may_read else "this identity may not read it, and its readers may"
        return ok(check, f"version {seen.newest} for {seen.env}; {mine}")

    return [guard(check, look)]


def check_cluster(name: str, cluster: ClusterOutput, outputs: StackOutputs, google: GoogleApi | None) -> Sequence[Line]:
    check = f"cluster {name}"
    if google is None:
        return unchecked(check)
    from runtime.stack.google_api import GoogleRefused

    def look() -> Line:
        path = f"compute/v1/projects/{outputs.project}/zones/{cluster.zone}/instances/{cluster.head}"
        try:
            head = google.find("compute", path)
        except GoogleRefused as refused:
            if refused.status == 403 and not refused.disabled_api:
                return ok(check, f"this identity may not see head `{cluster.head}`; only its operators do")
            raise
        if head is None:
            return fail(check, f"there is no head `{cluster.head}`", f"run `pulumi up --stack {outputs.stack}`")
        status = str(head.get("status", "unknown")).lower()
        if status != "running":
            fix = f"gcloud compute instances start {cluster.head} --zone {cluster.zone}"
            return fail(check, f"head `{cluster.head}` is {status}", fix)
        return ok(check, f"head `{cluster.head}` runs")

    return [guard(check, look)]


def check_kubernetes(name: str, cluster: KubernetesOutput) -> Sequence[Line]:
    check = f"kubernetes {name}"
    if not shutil.which("kubectl"):
        return [warn(check, "there is no kubectl here; only who looks into the cluster needs it", "install kubectl")]
    contexts = _ask_lines("kubectl", "config", "get-contexts", "-o", "name")
    if cluster.context not in contexts:
        known = ", ".join(sorted(contexts)) or "none"
        fix = f"add context `{cluster.context}` to your kubeconfig, for {cluster.server}"
        return [fail(check, f"kubectl knows no context `{cluster.context}`; it knows {known}", fix)]
    return [_namespace(f"{check} {each}", cluster.context, each) for each in sorted(cluster.namespaces)]


def _namespace(check: str, context: str, namespace: str) -> Line:
    words = ("kubectl", "--context", context, "--namespace", namespace, "--request-timeout", "5s")
    answer = _ask_lines(*words, "auth", "can-i", "create", "jobs.batch", failing=True)
    if answer[-1:] == ["yes"]:
        return ok(check, "jobs can be launched")
    if answer[-1:] == ["no"]:
        fix = f"ask an operator to add you to `launchers` of namespace `{namespace}`"
        return fail(check, f"this identity may not launch jobs in namespace `{namespace}`", fix)
    return fail(check, "the cluster does not answer", f"try it by hand: kubectl --context {context} version")


def _ask_lines(*words: str, failing: bool = False) -> list[str]:
    """What a command prints, line by line; nothing if it fails, unless a `failing` one is to be heard."""
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TOOL_PATIENCE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.split("\n")[:-1] if failing or done.returncode == 0 else []


def _ask_web(url: str) -> tuple[int | None, str]:
    """Status of a GET, or None and why there is none."""
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(url, timeout=WEB_PATIENCE_S) as answer:
            return int(answer.status), ""
    except urllib.error.HTTPError as refused:
        refused.close()
        return refused.code, ""
    except (OSError, ValueError) as problem:
        return None, " ".join(str(getattr(problem, "reason", problem)).split())
