"""What works here and what does not: each line a verdict and, where something is wrong, the fix.

Everything is tried with the identity, the network and the tools that this machine has now. One check that fails stops
none of the others, and nothing is changed but for the probe object that a record store keeps (docs/records.md).
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from runtime import __version__
from runtime.clock import describe_skew
from runtime.errors import InvalidContract, NotPossible, RuntimeFailure, StoreUnavailable, StoreUnsafe
from runtime.outputs import (
    ClusterOutput,
    KubernetesOutput,
    OtherQueueOutput,
    PubSubQueueOutput,
    QueueOutput,
    SecretOutput,
    SqliteQueueOutput,
    StackOutputs,
    contract_digest,
)
from runtime.stack.find import FoundStack, NothingThere, find_stack, is_location, read_stack
from runtime.units import format_duration, format_size
from runtime.values import dataclass

if TYPE_CHECKING:
    from runtime.config import Settings
    from runtime.records.base import RecordStore
    from runtime.stack.google_api import GoogleApi

LITTLE_SPACE: Final = 5 * 1024**3
TOO_LITTLE_SPACE: Final = 200 * 1024**2
STALE: Final = timedelta(days=1)
PROBE_PATIENCE: Final = timedelta(seconds=10)
TOOL_PATIENCE_S: Final = 10
WEB_PATIENCE_S: Final = 5
_AT_ONCE: Final = 16
EXAMINED_S: Final = 5.0
"""How long a task file is looked through."""


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    """Works, or is not needed by everybody."""
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One thing that was looked at."""

    check: str
    """`stack`, `queue default`, `records` …"""
    verdict: Verdict
    text: str
    fix: str | None = None
    """The next command or edit, where the verdict is not ok."""


Check = Callable[[], Sequence[Line]]


def examine(name: str | None, settings: Settings, *, now: datetime | None = None) -> Iterator[Line]:
    """Look at this machine, then at the stack `name`, by default the one in use. Lines come as they are known."""
    now = now or datetime.now(UTC)
    yield _ok("program", f"research-runtime {__version__}, Python {platform.python_version()}")
    yield _data_folder(settings.data_dir)
    try:
        found = find_stack(name, settings=settings)
    except RuntimeFailure as problem:
        yield _failed("stack", problem)
        return
    yield _stack(found, now)
    yield from _contract(found, settings, now)
    outputs = found.outputs
    google = None
    if _needs_google(outputs):
        google, lines = _open_google(settings)
        yield from lines
    try:
        yield from _in_parallel(_checks(outputs, google))
    finally:
        if google is not None:
            google.close()


def find_task_file(stack: str | None, settings: Settings) -> Path:
    """The file of a stack whose tasks lie in one."""
    outputs = find_stack(stack, settings=settings).outputs
    for queue in outputs.queues.values():
        if isinstance(queue, SqliteQueueOutput):
            return Path(queue.path)
    raise NotPossible(
        f"stack `{outputs.stack}` keeps its tasks in no file of this machine", hint="name the file with `--file`"
    )


def _checks(outputs: StackOutputs, google: GoogleApi | None) -> list[Check]:
    stack = outputs.stack
    checks: list[Check] = [partial(_queue, name, each, stack, google) for name, each in sorted(outputs.queues.items())]
    checks.append(partial(_records, outputs, google))
    for name, regions in sorted(outputs.registries.items()):
        checks += [partial(_registry, f"{name} {place}", each.url, stack, google) for place, each in regions.items()]
    checks += [partial(_secret, name, each, stack, google) for name, each in sorted(outputs.secrets.items())]
    checks += [partial(_cluster, name, each, outputs, google) for name, each in sorted(outputs.clusters.items())]
    checks += [partial(_kubernetes, name, each) for name, each in sorted(outputs.kubernetes.items())]
    if outputs.registries:
        checks.append(_container_tool)
    if stack != "local":
        checks.append(_pulumi)
    return checks


def _in_parallel(checks: Sequence[Check]) -> Iterator[Line]:
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="doctor") as pool:
        started: list[Future[Sequence[Line]]] = [pool.submit(check) for check in checks]
        for future in started:
            yield from future.result()


# this machine


def _data_folder(folder: Path) -> Line:
    from runtime.records.embedded import refuse_network_filesystem

    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    fix = "set RUNTIME_DATA_DIR to a folder of yours on a local disk"
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        return _fail("data folder", f"`{place}` cannot be written to", fix)
    try:
        refuse_network_filesystem(folder / "local.db")
    except RuntimeFailure as problem:
        return _failed("data folder", problem)
    free = shutil.disk_usage(place).free
    text = f"{folder}, {format_size(free)} free"
    if free < TOO_LITTLE_SPACE:
        return _fail("data folder", text, f"make room, or {fix}")
    return _warn("data folder", text, f"make room, or {fix}") if free < LITTLE_SPACE else _ok("data folder", text)


def _container_tool() -> Sequence[Line]:
    for tool in ("docker", "podman", "buildah"):
        if shutil.which(tool):
            version = _ask_tool(tool, "--version")
            return [_ok("container tool", version or f"{tool}, which does not tell its version")]
    return [_warn("container tool", "none; only `runtime image build` needs one", "install docker, podman or buildah")]


def _pulumi() -> Sequence[Line]:
    if not shutil.which("pulumi"):
        return [_ok("pulumi", "not installed; only who changes the stack needs it")]
    version = _ask_tool("pulumi", "version")
    if version is None:
        return [_warn("pulumi", "it does not tell its version", "try it by hand: pulumi version")]
    return [_ok("pulumi", version)]


def _ask_tool(*words: str) -> str | None:
    """The first line that a command prints, None if it fails or takes long."""
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TOOL_PATIENCE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().partition("\n")[0] if done.returncode == 0 else None


# the stack


def _stack(found: FoundStack, now: datetime) -> Line:
    if found.source == "built-in":
        return _ok("stack", "local, which is built in: this machine alone")
    if found.cached:
        age = format_duration(now - found.read_at)
        text = f"{found.name}, as read {age} ago from {found.source}: the source does not answer"
        return _warn("stack", text, f"runtime stack pull {_pull_name(found)}")
    return _ok("stack", f"{found.name}, from {found.source}")


def _pull_name(found: FoundStack) -> str:
    return found.source if is_location(found.source) else found.name


def _contract(found: FoundStack, settings: Settings, now: datetime) -> Iterator[Line]:
    """Whether what was read, what is published and what is cached are one."""
    if found.source == "built-in":
        return
    digest = contract_digest(found.contract)
    if found.source == "pulumi" and found.outputs.published_url:
        yield _published(found, digest, settings, now)
    elif found.published is not None:
        commit = f", commit {found.published.commit[:12]}" if found.published.commit else ""
        yield _ok("contract", f"published {format_duration(now - found.published.at)} ago{commit}; its digest is right")
    else:
        yield _ok("contract", f"{digest[:19]}…, schema and types are right")


def _published(found: FoundStack, digest: str, settings: Settings, now: datetime) -> Line:
    url = found.outputs.published_url or ""
    publish = f"runtime stack publish --stack {found.name}"
    if found.cached:
        return _ok("contract", f"{digest[:19]}…, cached; not compared with {url}")
    try:
        copy = read_stack(url, settings=settings)
    except NothingThere:
        return _warn("contract", f"not published at {url}: machines without pulumi cannot read it", publish)
    except InvalidContract as problem:
        return _fail("contract", f"{problem.message} ({url})", publish)
    except RuntimeFailure as problem:
        return _warn("contract", f"its published copy cannot be read: {problem.message}", problem.hint)
    age = f", written {format_duration(now - copy.published.at)} ago" if copy.published else ""
    if contract_digest(copy.contract) == digest:
        return _ok("contract", f"the published copy says the same{age}")
    text = f"the published copy at {url} says something else{age}"
    return _warn("contract", text, f"{publish}; `runtime stack diff {url} {found.name}` shows the difference")


# google


def _needs_google(outputs: StackOutputs) -> bool:
    pubsub = any(isinstance(each, PubSubQueueOutput) for each in outputs.queues.values())
    bucket = outputs.records is not None and outputs.records.url.startswith("gs:")
    return (
        (pubsub and not os.environ.get("PUBSUB_EMULATOR_HOST"))
        or (bucket and not os.environ.get("STORAGE_EMULATOR_HOST"))
        or bool(outputs.secrets or outputs.clusters)
        or any(_google_repository(each.url) for regions in outputs.registries.values() for each in regions.values())
    )


def _open_google(settings: Settings) -> tuple[GoogleApi | None, list[Line]]:
    from runtime.stack.google_api import GoogleApi, GoogleRefused

    try:
        api = GoogleApi(server=settings.google_api, again=False)
    except RuntimeFailure as problem:
        return None, [_failed("identity", problem)]
    try:
        who = api.who()
    except GoogleRefused as refused:
        if refused.status == 401:
            api.close()
            return None, [_failed("identity", refused)]
        # Some kinds of credentials may not ask for their own name; what they may do is asked all the same.
        who = None
    except RuntimeFailure as problem:
        api.close()
        return None, [_failed("identity", problem)]
    lines = [_ok("identity", who or "credentials that do not tell whose they are")]
    if api.skew is not None:
        lines.append(_clock(api.skew, "Google's"))
    return api, lines


def _clock(skew: timedelta, whose: str) -> Line:
    text = describe_skew(skew, whose)
    if text is None:
        return _ok("clock", f"agrees with {whose}")
    verdict = _fail if abs(skew) > timedelta(minutes=5) else _warn
    return verdict("clock", text, "set the clock: `timedatectl set-ntp true`, or what keeps time on this machine")


def _unchecked(check: str) -> list[Line]:
    return [_warn(check, "not checked: there is no way to Google from here", "mend `identity` first")]


# queues


def _queue(name: str, output: QueueOutput, stack: str, google: GoogleApi | None) -> Sequence[Line]:
    check = f"queue {name}"
    if isinstance(output, SqliteQueueOutput):
        return [_sqlite(check, Path(output.path))]
    if isinstance(output, OtherQueueOutput):
        text = f"it is of kind `{output.kind}`, which this release does not know"
        return [_warn(check, text, "pip install --upgrade research-runtime")]
    emulator = os.environ.get("PUBSUB_EMULATOR_HOST")
    if emulator:
        return [_emulated_queue(check, output, emulator)]
    return _unchecked(check) if google is None else [_guard(check, lambda: _pubsub(check, output, stack, google))]


def _sqlite(check: str, path: Path) -> Line:
    from runtime.records.embedded import examine_file

    if not path.exists() and not path.is_symlink():
        return _ok(check, f"{path}, which comes into being on first use")
    try:
        whole = examine_file(path, patience_s=EXAMINED_S)
    except RuntimeFailure as problem:
        return _failed(check, problem)
    if not os.access(path, os.R_OK | os.W_OK):
        return _fail(check, f"`{path}` cannot be read and written", f"chown or chmod {path}")
    return _ok(check, str(path) if whole else f"{path}, of which not all was looked at: it is large")


def _emulated_queue(check: str, output: PubSubQueueOutput, emulator: str) -> Line:
    missing = []
    for resource in (output.topic, output.subscription):
        status, text = _ask_web(f"http://{emulator}/v1/{resource}")
        if status is None:
            return _fail(
                check, f"the emulator at {emulator} does not answer: {text}", "start it, or unset PUBSUB_EMULATOR_HOST"
            )
        if status == 404:
            missing.append(resource)
        elif status != 200:
            return _fail(check, f"the emulator at {emulator} answered {status} for {resource}", "restart it")
    if missing:
        text = f"the emulator at {emulator} has no {' and no '.join(missing)} yet"
        return _warn(check, text, "they are made on first use: submit something")
    return _ok(check, f"publish and pull, on the emulator at {emulator}")


_DOES: Final = {
    "pubsub.topics.publish": "publish",
    "pubsub.subscriptions.consume": "pull",
}


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
            return _fail(check, gone, f"run `pulumi up --stack {stack}`")
        able[_DOES[permission] + more] = may
    able_to = [what for what, may in able.items() if may]
    unable = [what for what, may in able.items() if not may]
    if not unable:
        return _ok(check, _words(able_to))
    ask = f"ask an operator of stack `{stack}` to add you to `access`, or work as its worker identity"
    if "publish" in unable and "pull" in unable:
        return _fail(check, f"this identity may not {' or '.join(unable)}", ask)
    text = f"may {_words(able_to)}; may not {' or '.join(unable)}"
    role = "enough to submit, not to work" if "publish" in able_to else "not enough to submit or to work"
    return _warn(check, f"{text}: {role}", ask)


def _missing(google: GoogleApi, path: str, kind: str, resource: str) -> str | None:
    from runtime.stack.google_api import GoogleRefused

    try:
        gone = google.find("pubsub", path) is None
    except GoogleRefused as refused:
        if refused.status == 403 and not refused.disabled_api:
            return None
        raise
    return f"there is no {kind.removesuffix('s')} `{resource}`" if gone else None


# records


def _records(outputs: StackOutputs, google: GoogleApi | None) -> Sequence[Line]:
    check = "records"
    if outputs.records is None:
        if not outputs.queues:
            return []
        fix = f"add `records` to Pulumi.{outputs.stack}.yaml, then run `pulumi up --stack {outputs.stack}`"
        return [_fail(check, "the stack exports no `records`, and its queues need them", fix)]
    url = outputs.records.url
    if url.startswith("sqlite:"):
        return [_sqlite(check, Path(url.removeprefix("sqlite:")))]
    if url.startswith("gs:") and not os.environ.get("STORAGE_EMULATOR_HOST"):
        if google is None:
            return _unchecked(check)
        return [_guard(check, lambda: _bucket(check, url, outputs.stack, google))]
    try:
        return _probe(check, url)
    except RuntimeFailure as problem:
        return [_failed(check, problem)]


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
        return _fail(check, f"this identity may not {' or '.join(lacking)} in {url}", ask)
    if lacking:
        text = (
            f"{url} can be read; this identity may not {' or '.join(lacking)}: enough to look, not to submit or to work"
        )
        return _warn(check, text, ask)
    if google.stands_in:
        return _ok(check, f"{url}: read, list, create, replace")
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
        return [_failed(check, problem)]
    finally:
        store.close()
    lines = [_ok(check, f"{url}: read and written, and the first write wins")]
    return lines if skew is None else [*lines, _clock(skew, "the record store's")]


# registries, secrets, clusters


def _google_repository(url: str) -> str | None:
    """`projects/P/locations/R/repositories/N` of an Artifact Registry url, None of any other."""
    host, _, path = url.removeprefix("https://").partition("/")
    location, found, _ = host.partition("-docker.pkg.dev")
    parts = path.split("/")
    if not found or len(parts) < 2:
        return None
    return f"projects/{parts[0]}/locations/{location}/repositories/{parts[1]}"


def _registry(name: str, url: str, stack: str, google: GoogleApi | None) -> Sequence[Line]:
    check = f"registry {name}"
    repository = _google_repository(url)
    if repository is None:
        return [_web_registry(check, url)]
    return (
        _unchecked(check) if google is None else [_guard(check, lambda: _images(check, url, repository, stack, google))]
    )


_IMAGES: Final = {
    "artifactregistry.repositories.downloadArtifacts": "pull",
    "artifactregistry.repositories.uploadArtifacts": "push",
}


def _images(check: str, url: str, repository: str, stack: str, google: GoogleApi) -> Line:
    may = google.allowed("artifactregistry", f"v1/{repository}", tuple(_IMAGES))
    able = [word for permission, word in _IMAGES.items() if permission in may]
    if not able and google.find("artifactregistry", f"v1/{repository}") is None:
        return _fail(check, f"there is no repository `{repository}`", f"run `pulumi up --stack {stack}`")
    if "pull" not in able:
        ask = f"ask an operator of stack `{stack}` to add you to `access`"
        return _warn(check, f"this identity may not pull from {url}", ask)
    return _ok(check, f"{_words(able)}, {url}")


def _web_registry(check: str, url: str) -> Line:
    host = url.removeprefix("https://").removeprefix("http://").partition("/")[0]
    local = host.partition(":")[0] in ("localhost", "127.0.0.1")
    status, text = _ask_web(f"{'http' if local else 'https'}://{host}/v2/")
    if status in (200, 401):
        return _ok(check, f"{host} answers")
    said = f"answered {status}" if status else f"does not answer: {text}"
    return _warn(check, f"{host} {said}", "is it a registry, and does it run?")


def _secret(name: str, secret: SecretOutput, stack: str, google: GoogleApi | None) -> Sequence[Line]:
    check = f"secret {name}"
    if google is None:
        return _unchecked(check)
    from runtime.stack.secrets import look_at

    def look() -> Line:
        seen = look_at(name, secret, stack, google)
        if seen.problem is not None:
            # Most people may not look into a secret, and need not.
            verdict = _warn if seen.versions is None and seen.readers is None and seen.may_read is None else _fail
            verdict = _warn if "may not see" in seen.problem else verdict
            return verdict(check, seen.problem, seen.next_step)
        mine = "this identity may read it" if seen.may_read else "this identity may not read it, and its readers may"
        return _ok(check, f"version {seen.newest} for {seen.env}; {mine}")

    return [_guard(check, look)]


def _cluster(name: str, cluster: ClusterOutput, outputs: StackOutputs, google: GoogleApi | None) -> Sequence[Line]:
    check = f"cluster {name}"
    if google is None:
        return _unchecked(check)
    from runtime.stack.google_api import GoogleRefused

    def look() -> Line:
        path = f"compute/v1/projects/{outputs.project}/zones/{cluster.zone}/instances/{cluster.head}"
        try:
            head = google.find("compute", path)
        except GoogleRefused as refused:
            if refused.status == 403 and not refused.disabled_api:
                return _ok(check, f"this identity may not see head `{cluster.head}`; only its operators do")
            raise
        if head is None:
            return _fail(check, f"there is no head `{cluster.head}`", f"run `pulumi up --stack {outputs.stack}`")
        status = str(head.get("status", "unknown")).lower()
        if status != "running":
            fix = f"gcloud compute instances start {cluster.head} --zone {cluster.zone}"
            return _fail(check, f"head `{cluster.head}` is {status}", fix)
        return _ok(check, f"head `{cluster.head}` runs")

    return [_guard(check, look)]


def _kubernetes(name: str, cluster: KubernetesOutput) -> Sequence[Line]:
    check = f"kubernetes {name}"
    if not shutil.which("kubectl"):
        return [_warn(check, "there is no kubectl here; only who looks into the cluster needs it", "install kubectl")]
    contexts = _ask_lines("kubectl", "config", "get-contexts", "-o", "name")
    if cluster.context not in contexts:
        known = ", ".join(sorted(contexts)) or "none"
        fix = f"add context `{cluster.context}` to your kubeconfig, for {cluster.server}"
        return [_fail(check, f"kubectl knows no context `{cluster.context}`; it knows {known}", fix)]
    return [_namespace(f"{check} {each}", cluster.context, each) for each in sorted(cluster.namespaces)]


def _namespace(check: str, context: str, namespace: str) -> Line:
    words = ("kubectl", "--context", context, "--namespace", namespace, "--request-timeout", "5s")
    answer = _ask_lines(*words, "auth", "can-i", "create", "jobs.batch", failing=True)
    if answer[-1:] == ["yes"]:
        return _ok(check, "jobs can be launched")
    if answer[-1:] == ["no"]:
        fix = f"ask an operator to add you to `launchers` of namespace `{namespace}`"
        return _fail(check, f"this identity may not launch jobs in namespace `{namespace}`", fix)
    return _fail(check, "the cluster does not answer", f"try it by hand: kubectl --context {context} version")


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


# lines


def _guard(check: str, look: Callable[[], Line]) -> Line:
    try:
        return look()
    except RuntimeFailure as problem:
        return _failed(check, problem)


def _ok(check: str, text: str) -> Line:
    return Line(check=check, verdict=Verdict.OK, text=text)


def _warn(check: str, text: str, fix: str | None) -> Line:
    return Line(check=check, verdict=Verdict.WARN, text=text, fix=fix)


def _fail(check: str, text: str, fix: str | None) -> Line:
    return Line(check=check, verdict=Verdict.FAIL, text=text, fix=fix)


def _failed(check: str, problem: RuntimeFailure) -> Line:
    facts = f" ({'; '.join(problem.facts)})" if problem.facts else ""
    return _fail(check, problem.message + facts, problem.hint or "run it again")


def _words(words: Sequence[str]) -> str:
    return ", ".join(words[:-1]) + f" and {words[-1]}" if len(words) > 1 else "".join(words)
