"""What works here and what does not: each line a verdict and, where something is wrong, the fix.

Everything is tried with the identity, the network and the tools that this machine has now. One check that fails stops
none of the others, and nothing is changed but for the probe object that a record store keeps (docs/records.md).
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from runtime import __version__
from runtime.errors import InvalidContract, NotPossible, RuntimeFailure
from runtime.outputs import SqliteQueueOutput, StackOutputs, contract_digest
from runtime.stack.cache import FoundStack
from runtime.stack.find import NothingThere, find_stack, is_location, read_stack
from runtime.units import format_duration, format_size

if TYPE_CHECKING:
    from runtime.config import Settings
    from runtime.stack.google_api import GoogleApi
from runtime.client.doctor.lines import Line, fail, failed, ok, warn
from runtime.client.doctor.resources import (
    ask_tool,
    check_clock,
    check_cluster,
    check_kubernetes,
    check_queue,
    check_records,
    check_registry,
    check_secret,
    needs_google,
)

LITTLE_SPACE: Final = 5 * 1024**3
TOO_LITTLE_SPACE: Final = 200 * 1024**2
STALE: Final = timedelta(days=1)
_AT_ONCE: Final = 16


Check = Callable[[], Sequence[Line]]


def examine(name: str | None, settings: Settings, *, now: datetime | None = None) -> Iterator[Line]:
    """Look at this machine, then at the stack `name`, by default the one in use. Lines come as they are known."""
    now = now or datetime.now(UTC)
    yield ok("program", f"research-runtime {__version__}, Python {platform.python_version()}")
    yield _data_folder(settings.data_dir)
    try:
        found = find_stack(name, settings=settings)
    except RuntimeFailure as problem:
        yield failed("stack", problem)
        return
    yield _stack(found, now)
    yield from _contract(found, settings, now)
    outputs = found.outputs
    google = None
    if needs_google(outputs):
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
    checks: list[Check] = [
        partial(check_queue, name, each, stack, google) for name, each in sorted(outputs.queues.items())
    ]
    checks.append(partial(check_records, outputs, google))
    for name, regions in sorted(outputs.registries.items()):
        checks += [
            partial(check_registry, f"{name} {place}", each.url, stack, google) for place, each in regions.items()
        ]
    checks += [partial(check_secret, name, each, stack, google) for name, each in sorted(outputs.secrets.items())]
    checks += [partial(check_cluster, name, each, outputs, google) for name, each in sorted(outputs.clusters.items())]
    checks += [partial(check_kubernetes, name, each) for name, each in sorted(outputs.kubernetes.items())]
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


def _data_folder(folder: Path) -> Line:
    from runtime.records.embedded import refuse_network_filesystem

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


def _container_tool() -> Sequence[Line]:
    for tool in ("docker", "podman", "buildah"):
        if shutil.which(tool):
            version = ask_tool(tool, "--version")
            return [ok("container tool", version or f"{tool}, which does not tell its version")]
    return [warn("container tool", "none; only `runtime image build` needs one", "install docker, podman or buildah")]


def _pulumi() -> Sequence[Line]:
    if not shutil.which("pulumi"):
        return [ok("pulumi", "not installed; only who changes the stack needs it")]
    version = ask_tool("pulumi", "version")
    if version is None:
        return [warn("pulumi", "it does not tell its version", "try it by hand: pulumi version")]
    return [ok("pulumi", version)]


def _stack(found: FoundStack, now: datetime) -> Line:
    if found.source == "built-in":
        return ok("stack", "local, which is built in: this machine alone")
    if found.cached:
        age = format_duration(now - found.read_at)
        text = f"{found.name}, as read {age} ago from {found.source}: the source does not answer"
        return warn("stack", text, f"runtime stack pull {_pull_name(found)}")
    return ok("stack", f"{found.name}, from {found.source}")


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
        # Some kinds of credentials may not ask for their own name; what they may do is asked all the same.
        who = None
    except RuntimeFailure as problem:
        api.close()
        return None, [failed("identity", problem)]
    lines = [ok("identity", who or "credentials that do not tell whose they are")]
    if api.skew is not None:
        lines.append(check_clock(api.skew, "Google's"))
    return api, lines
