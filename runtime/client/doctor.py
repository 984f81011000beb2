"""What works here and what does not: each line a verdict and, if something is wrong, the fix.

Everything is tried with the identity, the network and the tools that this machine has now. One check that fails stops
none of the others, and nothing is changed but for the probe object that a record store keeps (docs/records.md).
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from runtime import __version__
from runtime.clock import describe_skew
from runtime.errors import InvalidContract, MissingExtra, NotPossible, RuntimeFailure
from runtime.outputs import (
    ClusterOutput,
    KubernetesOutput,
    OtherQueueOutput,
    PubSubQueueOutput,
    SecretOutput,
    SqliteQueueOutput,
    StackOutputs,
    contract_digest,
)
from runtime.stack.find import FoundStack, NothingThere, find_stack, is_location, read_stack
from runtime.system import system
from runtime.units import format_duration, format_size

if TYPE_CHECKING:
    from runtime.config import Settings
    from runtime.records.base import RecordStore
    from runtime.stack.google_api import GoogleApi

LITTLE_SPACE: Final = 5 * 1024**3
TOO_LITTLE_SPACE: Final = 200 * 1024**2
PROBE_PATIENCE: Final = timedelta(seconds=10)
TOOL_PATIENCE_S: Final = 10
WEB_PATIENCE_S: Final = 5
EXAMINED_S: Final = 5.0
_AT_ONCE: Final = 16


class DoctorVerdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    """Works, or is not needed by everybody."""
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    check: str
    """`stack`, `queue default`, `records` …"""
    verdict: DoctorVerdict
    text: str
    fix: str | None = None
    """The next command or edit, unless the verdict is ok."""


Check = tuple[str, Callable[[], Line | Sequence[Line]]]
"""The name of a check, and the look that answers it."""


def ok(check: str, text: str) -> Line:
    return Line(check=check, verdict=DoctorVerdict.OK, text=text)


def warn(check: str, text: str, fix: str | None) -> Line:
    return Line(check=check, verdict=DoctorVerdict.WARN, text=text, fix=fix)


def fail(check: str, text: str, fix: str | None) -> Line:
    return Line(check=check, verdict=DoctorVerdict.FAIL, text=text, fix=fix)


def failed(check: str, problem: RuntimeFailure) -> Line:
    facts = f" ({'; '.join(problem.facts)})" if problem.facts else ""
    return fail(check, problem.message + facts, problem.hint or "run it again")


def examine(name: str | None, settings: Settings, *, now: datetime | None = None) -> Iterator[Line]:
    """Look at this machine, then at the stack `name`, by default the one in use. Lines come as they are known."""
    now = now or system.now()
    yield ok("program", f"research-runtime {__version__}, Python {platform.python_version()}")
    yield _data_folder(settings.data_dir)
    yield from _targets(settings)
    try:
        found = find_stack(name, settings=settings)
    except RuntimeFailure as problem:
        yield failed("stack", problem)
        return
    yield _stack(found, now)
    yield from _contract(found, settings, now)
    google = None
    if _needs_google(found.outputs):
        google, lines = _open_google(settings)
        yield from lines
    try:
        with system.pool(_AT_ONCE, name="doctor") as pool:
            for answer in pool.map(_look, _list_checks(found.outputs, google)):
                yield from [answer] if isinstance(answer, Line) else answer
    finally:
        if google is not None:
            google.close()


def _look(check: Check) -> Line | Sequence[Line]:
    name, look = check
    try:
        return look()
    except RuntimeFailure as problem:
        return failed(name, problem)


def find_task_file(stack: str | None, settings: Settings) -> Path:
    """The task file of a stack on this machine. Raises `NotPossible` if its tasks lie elsewhere."""
    outputs = find_stack(stack, settings=settings).outputs
    for queue in outputs.queues.values():
        if isinstance(queue, SqliteQueueOutput):
            return Path(queue.path)
    raise NotPossible(
        f"stack `{outputs.stack}` keeps its tasks in no file of this machine", hint="name the file with `--file`"
    )


def _list_checks(outputs: StackOutputs, google: GoogleApi | None) -> list[Check]:
    stack, checks = outputs.stack, list[Check]()

    def ask(check: str, look: Callable[..., Line | Sequence[Line]], *facts: object) -> None:
        checks.append((check, partial(look, check, *facts)))

    unchecked = "not checked: there is no way to Google from here", "mend `identity` first"

    def ask_google(check: str, look: Callable[..., Line], *facts: object) -> None:
        ask(check, look, *facts, google) if google is not None else ask(check, warn, *unchecked)

    for name, queue in sorted(outputs.queues.items()):
        emulator = os.environ.get("PUBSUB_EMULATOR_HOST")
        if isinstance(queue, SqliteQueueOutput):
            ask(f"queue {name}", _sqlite, Path(queue.path))
        elif isinstance(queue, OtherQueueOutput):
            text = f"it is of kind `{queue.kind}`, which this release does not know"
            ask(f"queue {name}", warn, text, "pip install --upgrade research-runtime")
        elif emulator:
            ask(f"queue {name}", _emulated_queue, queue, emulator)
        else:
            ask_google(f"queue {name}", _pubsub, queue, stack)
    url = outputs.records.url if outputs.records else None
    if url is None:
        if outputs.queues:
            fix = f"add `records` to Pulumi.{stack}.yaml, then run `pulumi up --stack {stack}`"
            ask("records", fail, "the stack exports no `records`, and its queues need them", fix)
    elif url.startswith("sqlite:"):
        ask("records", _sqlite, Path(url.removeprefix("sqlite:")))
    elif url.startswith("gs:") and not os.environ.get("STORAGE_EMULATOR_HOST"):
        ask_google("records", _bucket, url, stack)
    else:
        ask("records", _probe, url)
    for name, regions in sorted(outputs.registries.items()):
        for place, registry in regions.items():
            check, repository = f"registry {name} {place}", _google_repository(registry.url)
            if repository is None:
                ask(check, _web_registry, registry.url)
            else:
                ask_google(check, _images, registry.url, repository, stack)
    for name, secret in sorted(outputs.secrets.items()):
        ask_google(f"secret {name}", _secret, name, secret, outputs)
    for name, cluster in sorted(outputs.clusters.items()):
        ask_google(f"cluster {name}", _cluster, cluster, outputs)
    for name, kubernetes in sorted(outputs.kubernetes.items()):
        ask(f"kubernetes {name}", _kubernetes, kubernetes)
    if outputs.registries:
        ask("container tool", _container_tool)
    if stack != "local":
        ask("pulumi", _pulumi)
    return checks


def _targets(settings: Settings) -> Iterator[Line]:
    """The targets that files name, and where; nothing if none does."""
    if not settings.project.targets and not os.path.lexists(settings.user_file):
        return
    from runtime.client.jobs.targets import find_target, read_definitions

    try:
        definitions = {name: each for name, each in read_definitions(settings).items() if each.file}
    except RuntimeFailure as problem:
        yield failed("targets", problem)
        return
    for name in definitions:
        try:
            find_target(name, settings)
        except MissingExtra as problem:
            yield warn(f"target {name}", problem.message, problem.hint)  # another machine may use it
        except RuntimeFailure as problem:
            yield failed(f"target {name}", problem)
    files = dict.fromkeys(each.file for each in definitions.values())
    named = [
        f"{', '.join(name for name, each in definitions.items() if each.file == file)} of {file}" for file in files
    ]
    hidden = [name for name, each in definitions.items() if each.hides]
    unseen = f"; {', '.join(hidden)} of {settings.user_file} hidden by the project's" if hidden else ""
    yield ok("targets", ("; ".join(named) or "none but local") + unseen)


def _data_folder(folder: Path) -> Line:
    from runtime.records.sqlite_file import refuse_network_filesystem

    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    fix = "set RUNTIME_DATA_DIR to a folder of yours on a local disk"
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        return fail("data folder", f"`{place}` cannot be written to", fix)
    try:
        refuse_network_filesystem(folder / "local.db")
    except RuntimeFailure as problem:
        return failed("data folder", problem)
    free = shutil.disk_usage(place).free
    text = f"{folder}, {format_size(free)} free"
    if free < TOO_LITTLE_SPACE:
        return fail("data folder", text, f"make room, or {fix}")
    return warn("data folder", text, f"make room, or {fix}") if free < LITTLE_SPACE else ok("data folder", text)


def _container_tool(check: str) -> Line:
    for tool in ("docker", "podman", "buildah"):
        if shutil.which(tool):
            version = _ask_tool(tool, "--version")
            return ok(check, version[0] if version else f"{tool}, which does not tell its version")
    return warn(check, "none; only `runtime image build` needs one", "install docker, podman or buildah")


def _pulumi(check: str) -> Line:
    if not shutil.which("pulumi"):
        return ok(check, "not installed; only who changes the stack needs it")
    version = _ask_tool("pulumi", "version")
    if not version:
        return warn(check, "it does not tell its version", "try it by hand: pulumi version")
    return ok(check, version[0])


def _stack(found: FoundStack, now: datetime) -> Line:
    if found.source == "built-in":
        return ok("stack", "local, which is built in: this machine alone")
    if found.cached:
        age = format_duration(now - found.read_at)
        text = f"{found.name}, as read {age} ago from {found.source}: the source does not answer"
        return warn("stack", text, f"runtime stack pull {found.source if is_location(found.source) else found.name}")
    return ok("stack", f"{found.name}, from {found.source}")


def _contract(found: FoundStack, settings: Settings, now: datetime) -> Iterator[Line]:
    """Compare the contract that was read with the published copy."""
    if found.source == "built-in":
        return
    digest = contract_digest(found.contract)
    if found.source == "pulumi" and found.outputs.published_url:
        yield _published(found, digest, settings, now)
    elif found.published is not None:
        commit = f", commit {found.published.commit[:12]}" if found.published.commit else ""
        yield ok("contract", f"published {format_duration(now - found.published.at)} ago{commit}; its digest is right")
    else:
        yield ok("contract", f"{digest[:19]}…, schema and types are right")


def _published(found: FoundStack, digest: str, settings: Settings, now: datetime) -> Line:
    url = found.outputs.published_url or ""
    publish = f"runtime stack publish --stack {found.name}"
    if found.cached:
        return ok("contract", f"{digest[:19]}…, cached; not compared with {url}")
    try:
        copy = read_stack(url, settings=settings)
    except NothingThere:
        return warn("contract", f"not published at {url}: machines without pulumi cannot read it", publish)
    except InvalidContract as problem:
        return fail("contract", f"{problem.message} ({url})", publish)
    except RuntimeFailure as problem:
        return warn("contract", f"its published copy cannot be read: {problem.message}", problem.hint)
    age = f", written {format_duration(now - copy.published.at)} ago" if copy.published else ""
    if contract_digest(copy.contract) == digest:
        return ok("contract", f"the published copy says the same{age}")
    text = f"the published copy at {url} says something else{age}"
    return warn("contract", text, f"{publish}; `runtime stack diff {url} {found.name}` shows the difference")


def _open_google(settings: Settings) -> tuple[GoogleApi | None, list[Line]]:
    from runtime.stack.google_api import GoogleApi, GoogleRefused

    try:
        api = GoogleApi(server=settings.google_api, again=False)
    except RuntimeFailure as problem:
        return None, [failed("identity", problem)]
    try:
        who = api.who()
    except GoogleRefused as refused:
        if refused.status == 401:
            api.close()
            return None, [failed("identity", refused)]
        # Some kinds of credentials may not ask for their own name; their permissions are asked for all the same.
        who = None
    except RuntimeFailure as problem:
        api.close()
        return None, [failed("identity", problem)]
    lines = [ok("identity", who or "credentials that do not tell whose they are")]
    if api.skew is not None:
        lines.append(_clock(api.skew, "Google's"))
    return api, lines


def _needs_google(outputs: StackOutputs) -> bool:
    pubsub = any(isinstance(each, PubSubQueueOutput) for each in outputs.queues.values())
    bucket = outputs.records is not None and outputs.records.url.startswith("gs:")
    return (
        (pubsub and not os.environ.get("PUBSUB_EMULATOR_HOST"))
        or (bucket and not os.environ.get("STORAGE_EMULATOR_HOST"))
        or bool(outputs.secrets or outputs.clusters)
        or any(_google_repository(each.url) for regions in outputs.registries.values() for each in regions.values())
    )


def _clock(skew: timedelta, whose: str) -> Line:
    text = describe_skew(skew, whose)
    if text is None:
        return ok("clock", f"agrees with {whose}")
    verdict = fail if abs(skew) > timedelta(minutes=5) else warn
    return verdict("clock", text, "set the clock: `timedatectl set-ntp true`, or what keeps time on this machine")


def _sqlite(check: str, path: Path) -> Line:
    from runtime.records.sqlite_file import examine_file

    if not path.exists() and not path.is_symlink():
        return ok(check, f"{path}, which comes into being on first use")
    whole = examine_file(path, patience_s=EXAMINED_S)
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
    """Check the permissions of submitters, who publish, and workers, who pull and need the dead letters too."""
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
        # For a resource that does not exist, Google allows nothing.
        if not may and (gone := _missing(google, f"v1/{resource}", kind, resource)):
            return fail(check, gone, f"run `pulumi up --stack {stack}`")
        able[_DOES[permission] + more] = may
    able_to = [what for what, may in able.items() if may]
    unable = [what for what, may in able.items() if not may]
    if not unable:
        return ok(check, _join(able_to))
    ask = f"ask an operator of stack `{stack}` to add you to `access`, or work as its worker identity"
    if "publish" in unable and "pull" in unable:
        return fail(check, f"this identity may not {' or '.join(unable)}", ask)
    text = f"may {_join(able_to)}; may not {' or '.join(unable)}"
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


_OBJECTS: Final = {
    "storage.objects.get": "read",
    "storage.objects.list": "list",
    "storage.objects.create": "create",
    "storage.objects.delete": "replace",
}


def _bucket(check: str, url: str, stack: str, google: GoogleApi) -> Line:
    may = google.allowed("storage", f"storage/v1/b/{urlsplit(url).netloc}", tuple(_OBJECTS))
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
    # The bucket's clock is Google's, which the check `identity` compared.
    return _probe(check, url)[0]


def _probe(check: str, url: str) -> list[Line]:
    """Prove that the first of two writes wins, as every record needs, and compare the clocks."""
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
    finally:
        store.close()
    lines = [ok(check, f"{url}: read and written, and the first write wins")]
    return lines if skew is None else [*lines, _clock(skew, "the record store's")]


def _google_repository(url: str) -> str | None:
    """Return `projects/P/locations/R/repositories/N` for an Artifact Registry url, None for any other."""
    host, _, path = url.removeprefix("https://").partition("/")
    location, found, _ = host.partition("-docker.pkg.dev")
    parts = path.split("/")
    if not found or len(parts) < 2:
        return None
    return f"projects/{parts[0]}/locations/{location}/repositories/{parts[1]}"


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
    return ok(check, f"{_join(able)}, {url}")


def _web_registry(check: str, url: str) -> Line:
    host = url.removeprefix("https://").removeprefix("http://").partition("/")[0]
    local = host.partition(":")[0] in ("localhost", "127.0.0.1")
    status, text = _ask_web(f"{'http' if local else 'https'}://{host}/v2/")
    if status in (200, 401):
        return ok(check, f"{host} answers")
    said = f"answered {status}" if status else f"does not answer: {text}"
    return warn(check, f"{host} {said}", "is it a registry, and does it run?")


def _secret(check: str, name: str, secret: SecretOutput, outputs: StackOutputs, google: GoogleApi) -> Line:
    from runtime.stack.secrets import look_at

    seen = look_at(name, secret, outputs.stack, google)
    if secret.attempts is not None and seen.may_read is not None:
        worker = outputs.identities.get("worker")
        if not seen.may_read and worker is not None and google.who() == worker.email:
            text = f"workers' identity {worker.email} may not read it: they give back the tasks whose attempts get it"
            return fail(check, text, f"run `pulumi up --stack {outputs.stack}`")
        if seen.may_read and seen.problem is not None and seen.versions is None and "may not see" in seen.problem:
            # The right that workers have, and need.
            return ok(check, f"this identity may read it, and attempts get it as {secret.env}")
    if seen.problem is not None:
        # Most people may not look into a secret, and need not.
        hidden = seen.versions is None and seen.readers is None and seen.may_read is None
        verdict = warn if hidden or "may not see" in seen.problem else fail
        return verdict(check, seen.problem, seen.next_step)
    mine = "this identity may read it" if seen.may_read else "this identity may not read it, and its readers may"
    return ok(check, f"version {seen.newest} for {seen.env}; {mine}")


def _cluster(check: str, cluster: ClusterOutput, outputs: StackOutputs, google: GoogleApi) -> Line:
    from runtime.stack.google_api import GoogleRefused

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


def _kubernetes(check: str, cluster: KubernetesOutput) -> Sequence[Line]:
    if not shutil.which("kubectl"):
        return [warn(check, "there is no kubectl here; only who looks into the cluster needs it", "install kubectl")]
    contexts = _ask_tool("kubectl", "config", "get-contexts", "-o", "name")
    if cluster.context not in contexts:
        known = ", ".join(sorted(contexts)) or "none"
        fix = f"add context `{cluster.context}` to your kubeconfig, for {cluster.server}"
        return [fail(check, f"kubectl knows no context `{cluster.context}`; it knows {known}", fix)]
    return [_namespace(f"{check} {each}", cluster.context, each) for each in sorted(cluster.namespaces)]


def _namespace(check: str, context: str, namespace: str) -> Line:
    words = ("kubectl", "--context", context, "--namespace", namespace, "--request-timeout", "5s")
    answer = _ask_tool(*words, "auth", "can-i", "create", "jobs.batch", failing=True)
    if answer[-1:] == ["yes"]:
        return ok(check, "jobs can be launched")
    if answer[-1:] == ["no"]:
        fix = f"ask an operator to add you to `launchers` of namespace `{namespace}`"
        return fail(check, f"this identity may not launch jobs in namespace `{namespace}`", fix)
    return fail(check, "the cluster does not answer", f"try it by hand: kubectl --context {context} version")


def _ask_tool(*words: str, failing: bool = False) -> list[str]:
    """The lines that a command prints; none if it takes long, or if it fails without `failing`."""
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TOOL_PATIENCE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if failing or done.returncode == 0 else []


def _join(words: Sequence[str]) -> str:
    return ", ".join(words[:-1]) + f" and {words[-1]}" if len(words) > 1 else "".join(words)


def _ask_web(url: str) -> tuple[int | None, str]:
    """Return the status of a GET, or None and the problem."""
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
