"""Finds a stack's outputs and opens its queues and records.

Where outputs are looked for, in this order: the `pulumi` CLI where a stack is named and it is installed; a published
copy (`RUNTIME_OUTPUTS`, a path or URL); the cache of what was last read; and where nothing is configured, the built-in
stack `local`: one embedded file in the user's data folder. Where the `pulumi` CLI is there and cannot answer, the
published copy that the stack is known to have is read, and that is said.
"""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from runtime.config import Settings, load_settings
from runtime.errors import (
    InvalidContract,
    InvalidValue,
    NotPossible,
    RequestRefused,
    RuntimeFailure,
    StoreUnavailable,
    UnknownName,
)
from runtime.outputs import (
    OUTPUT_NAME,
    RecordsOutput,
    SqliteQueueOutput,
    StackOutputs,
    decode_fields,
)
from runtime.queues.base import DEFAULT_QUEUE
from runtime.units import format_duration
from runtime.values import dataclass

if TYPE_CHECKING:
    import subprocess

from runtime.stack.cache import CACHE_PREFIX, FoundStack, cache_folder, list_cached, parse_found, read_cache, remember

LOCAL: Final = "local"
PULUMI_PATIENCE_S: Final = 60
READ_PATIENCE: Final = timedelta(seconds=20)
"""For a published copy; the cache comes after it."""
PUBLISHED_PREFIX: Final = "published:"


class PulumiFailed(RequestRefused):
    """The `pulumi` CLI could not tell a stack's outputs; `reason` is one line."""

    def __init__(self, stack: str, reason: str, *, hint: str) -> None:
        self.stack, self.reason = stack, reason
        super().__init__(f"outputs of stack `{stack}` cannot be read: {reason}", hint=hint)


class StackNotFound(UnknownName):
    """No source has the stack; `tried` says what each one answered."""

    def __init__(self, name: str, known: list[str], tried: list[str], *, hint: str) -> None:
        super().__init__("stack", name, known, hint=hint)
        self.tried = tried
        self.facts = (*self.facts, *tried)


class NothingThere(StoreUnavailable):
    """The place was reached, and holds no contract."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedStack:
    name: str
    source: str
    default: bool
    """Commands that name no stack use it."""
    read_at: datetime | None = None


def local_outputs(settings: Settings) -> StackOutputs:
    """The built-in stack: queue and records in one file of the user's data folder."""
    path = str(settings.data_dir / "local.db")
    return StackOutputs(
        stack=LOCAL,
        records=RecordsOutput(url=f"sqlite:{path}"),
        queues={DEFAULT_QUEUE: SqliteQueueOutput(path=path)},
    )


def find_stack(name: str | None = None, *, settings: Settings | None = None) -> FoundStack:
    """Read the outputs of `name`, or of the configured stack, or of `local` where none is configured.

    What is read is kept in the cache; where only the cache answers, a warning says how old it is. Raises
    `StackNotFound` with what each source said, `InvalidContract` for a contract that cannot be used.
    """
    settings = settings or load_settings()
    name = name or settings.stack
    if name == LOCAL or (name is None and settings.outputs is None):
        return FoundStack(outputs=local_outputs(settings), source="built-in", read_at=datetime.now(UTC))
    if name is None:
        return _find_published(settings)
    return _find_named(name, settings)


def pull_stack(source: str, *, settings: Settings | None = None) -> FoundStack:
    """Read a stack from its source now, never from the cache, and keep it there. `source` is a name, path or URL."""
    settings = settings or load_settings()
    if is_location(source):
        return remember(_parse_published(source), settings)
    if source == LOCAL:
        raise NotPossible("stack `local` is built in: there is nothing to pull", hint="`runtime stack show local`")
    return _find_named(source, settings, allow_cache=False)


def read_stack(source: str, *, settings: Settings | None = None) -> FoundStack:
    """Read one source as it is and keep nothing.

    `source` is `local`, the name of a stack (what Pulumi says, never a copy), a path or URL, `cache:NAME`, or
    `published:NAME` for the copy that the stack is known to have. Raises what the source raises.
    """
    settings = settings or load_settings()
    if source == LOCAL:
        return find_stack(LOCAL, settings=settings)
    if source.startswith(CACHE_PREFIX):
        name = source.removeprefix(CACHE_PREFIX)
        cached = read_cache(name, settings)
        if cached is None:
            raise UnknownName("cached stack", name, [found.name for found in list_cached(settings)])
        return cached
    if source.startswith(PUBLISHED_PREFIX):
        return _parse_published(_published_of(source.removeprefix(PUBLISHED_PREFIX), settings))
    if is_location(source):
        return _parse_published(source)
    if not _has_pulumi():
        raise PulumiFailed(
            source, "the `pulumi` command is not installed here", hint="name a published copy: a path or URL"
        )
    return _read_pulumi(source)


def find_published_url(name: str | None = None, *, settings: Settings | None = None) -> str | None:
    """Where the published copy of the stack is known to lie, by `RUNTIME_OUTPUTS` or by what was last read; or None.

    Reads the cache only.
    """
    settings = settings or load_settings()
    name = name or settings.stack
    if settings.outputs is not None and name is None:
        return settings.outputs
    return _known_copy(read_cache(name, settings)) if name else None


def _published_of(name: str, settings: Settings) -> str:
    """The URL, from what Pulumi says where it can, else from what was last read."""
    url = None
    if _has_pulumi():
        try:
            url = _read_pulumi(name).outputs.published_url
        except PulumiFailed:
            pass
    url = url or find_published_url(name, settings=settings)
    if url is None:
        raise NotPossible(
            f"it is not known where stack `{name}` publishes its contract",
            hint="name the path or URL itself",
        )
    return url


def list_stacks(*, settings: Settings | None = None) -> list[ListedStack]:
    """Every stack that can be named here: the built-in one, Pulumi's, the published copy, and the cached ones."""
    settings = settings or load_settings()
    chosen = settings.stack
    found: dict[str, ListedStack] = {}

    def add(name: str, source: str, read_at: datetime | None = None) -> None:
        default = name == (chosen or (LOCAL if settings.outputs is None else None))
        if name not in found:
            found[name] = ListedStack(name=name, source=source, default=default, read_at=read_at)

    add(LOCAL, "built-in")
    for name in _pulumi_stacks():
        add(name, "pulumi")
    for cached in list_cached(settings):
        add(cached.name, cached.source, cached.read_at)
    if settings.outputs is not None:
        published = _try_published(settings.outputs)
        if isinstance(published, FoundStack):
            found.pop(published.name, None)
            default = chosen in (None, published.name)
            found[published.name] = ListedStack(
                name=published.name, source=published.source, default=default, read_at=published.read_at
            )
    return sorted(found.values(), key=lambda stack: (stack.name != LOCAL, stack.name))


def is_location(text: str) -> bool:
    """Whether `text` is a path or URL rather than the name of a stack."""
    return "://" in text or text.startswith(("file:", "/", "./", "../", "~")) or text.endswith(".json")


# sources


def _find_named(name: str, settings: Settings, *, allow_cache: bool = True) -> FoundStack:
    tried: list[str] = []
    hint = f"`runtime stack pull URL` reads a published copy; `pulumi up --stack {name}` makes the stack"
    first: RuntimeFailure | None = None
    failed: PulumiFailed | None = None
    if _has_pulumi():
        try:
            return remember(_read_pulumi(name), settings, name)
        except PulumiFailed as problem:
            tried.append(f"pulumi: {problem.reason}")
            hint, first, failed = problem.hint or hint, problem, problem
    else:
        tried.append("pulumi: not installed here")
    if settings.outputs is None:
        tried.append("RUNTIME_OUTPUTS: not set")
    else:
        published = _try_published(settings.outputs)
        if isinstance(published, RuntimeFailure):
            tried.append(f"RUNTIME_OUTPUTS: {published.message}")
            first = first or published
        elif _is_of(published, name):
            if failed is not None:
                _say_published(published, failed)
            return remember(published, settings, name)
        else:
            tried.append(f"RUNTIME_OUTPUTS: `{settings.outputs}` holds stack `{published.name}`")
    cached = read_cache(name, settings)
    copy = _known_copy(cached)
    if copy is not None and copy != settings.outputs and (failed is not None or not allow_cache):
        published = _try_published(copy)
        if isinstance(published, FoundStack) and _is_of(published, name):
            if failed is not None:
                _say_published(published, failed)
            return remember(published, settings, name)
        if isinstance(published, RuntimeFailure):
            tried.append(f"published copy: {published.message}")
            first = first or published
        else:
            tried.append(f"published copy: `{copy}` holds stack `{published.name}`")
    if cached is not None and allow_cache:
        return _say_cached(cached, tried[0] if _has_pulumi() else tried[-1])
    if not allow_cache and isinstance(first, StoreUnavailable):
        raise first
    tried.append(f"cache: no copy in `{cache_folder(settings)}`")
    listed = _pulumi_stacks()
    if failed is not None and name in listed:
        # Pulumi has it: that it cannot be read is the news, not its name.
        failed.facts = tuple(tried)
        raise failed
    known = [LOCAL, *(stack.name for stack in list_cached(settings)), *listed]
    raise StackNotFound(name, sorted(set(known)), tried, hint=hint) from first


def _find_published(settings: Settings) -> FoundStack:
    assert settings.outputs is not None
    published = _try_published(settings.outputs)
    if isinstance(published, FoundStack):
        return remember(published, settings)
    for cached in list_cached(settings):
        if cached.source == settings.outputs:
            return _say_cached(cached, published.message)
    raise published


def _is_of(found: FoundStack, name: str) -> bool:
    return found.name == name or name.endswith(f"/{found.name}")


def _known_copy(cached: FoundStack | None) -> str | None:
    """Where what was last read says that a published copy lies."""
    if cached is None:
        return None
    return cached.source if is_location(cached.source) else cached.outputs.published_url


def _say_published(found: FoundStack, failed: PulumiFailed) -> None:
    when = found.published.at if found.published else None
    age = f", published {format_duration(datetime.now(UTC) - when)} ago" if when else ""
    _warn(f"using the published copy of stack `{found.name}` at {found.source}{age} (pulumi: {failed.reason})")


def _say_cached(cached: FoundStack, why: str) -> FoundStack:
    age = format_duration(datetime.now(UTC) - cached.read_at)
    _warn(f"using outputs of stack `{cached.name}` as read {age} ago from {cached.source} ({why})")
    return cached


def _warn(text: str) -> None:
    import logging  # Here, and only when there is something to say: a worker does without it.

    logging.getLogger(__name__).warning(text)


def _try_published(source: str) -> FoundStack | StoreUnavailable | RequestRefused:
    """A contract that is there and cannot be used is raised; one that cannot be reached is returned as the reason."""
    try:
        return _parse_published(source)
    except InvalidContract:
        raise
    except (StoreUnavailable, RequestRefused) as problem:
        return problem


def _parse_published(source: str) -> FoundStack:
    return parse_found(decode_fields(read_location(source), source=source), source, datetime.now(UTC))


def read_location(source: str) -> bytes:
    """The bytes at a path or a `file:`, `https://`, `gs://` or `s3://` URL; `StoreUnavailable` if they cannot be read."""
    scheme = source.partition(":")[0] if "://" in source or source.startswith("file:") else ""
    if scheme in ("", "file"):
        from urllib.parse import unquote, urlsplit

        path = Path(unquote(urlsplit(source).path) if scheme else source).expanduser()
        try:
            return path.read_bytes()
        except OSError as problem:
            failure = NothingThere if isinstance(problem, FileNotFoundError) else StoreUnavailable
            raise failure(
                f"cannot read `{path}`: {(problem.strerror or str(problem)).lower()}",
                hint="check the path, here or in RUNTIME_OUTPUTS; `runtime stack list` shows what can be named",
                retryable=False,
            ) from problem
    if scheme in ("http", "https"):
        return _read_web(source)
    if scheme in ("gs", "s3"):
        return _read_bucket(source)
    raise InvalidValue("location", source, "a path or a file:, https://, gs:// or s3:// URL")


def _read_web(url: str) -> bytes:
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            data: bytes = answer.read()
            return data
    except OSError as problem:
        if isinstance(problem, urllib.error.HTTPError):
            problem.close()
        raise StoreUnavailable(f"cannot read `{url}`: {problem}", hint="check the URL and the network") from problem


def _read_bucket(url: str) -> bytes:
    from runtime.records.blobs.bucket import BucketBlobs

    folder, _, name = url.rpartition("/")
    blobs = BucketBlobs(folder, timeout=READ_PATIENCE, retry_for=READ_PATIENCE)
    try:
        data = blobs.get(name)
    finally:
        blobs.close()
    if data is None:
        raise NothingThere(f"no object `{url}`", hint="check the URL, or `runtime stack list`", retryable=False)
    return data


# pulumi


def _read_pulumi(name: str) -> FoundStack:
    answer = _run_pulumi("stack", "output", OUTPUT_NAME, "--json", "--stack", name)
    if answer is None:
        raise PulumiFailed(
            name, f"pulumi did not answer within {PULUMI_PATIENCE_S} s", hint="try it by hand: pulumi whoami"
        )
    if answer.returncode:
        raise _explain_pulumi(name, answer.stderr)
    try:
        value = json.loads(answer.stdout)
    except ValueError:
        raise PulumiFailed(
            name, "pulumi printed no JSON", hint=f"see what `pulumi stack output --json --stack {name}` prints"
        ) from None
    return parse_found(value, "pulumi", datetime.now(UTC))


def _explain_pulumi(stack: str, stderr: str) -> PulumiFailed:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    text = " ".join(lines).lower()
    said = next(
        (line for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else "no reason given"
    )
    said = said.partition("error: ")[2] or said
    if "passphrase" in text:
        return PulumiFailed(
            stack,
            "pulumi needs the stack's passphrase, though the contract holds no secret",
            hint="set PULUMI_CONFIG_PASSPHRASE or PULUMI_CONFIG_PASSPHRASE_FILE, or read the published copy: RUNTIME_OUTPUTS=URL",
        )
    if "does not have output property" in text:
        return PulumiFailed(stack, f"the stack exports no `{OUTPUT_NAME}`", hint=f"run `pulumi up --stack {stack}`")
    if any(each in text for each in ("no stack named", "no pulumi.yaml", "no pulumi project", "fully qualified name")):
        return PulumiFailed(
            stack,
            said,
            hint="run it in the folder that holds Pulumi.yaml, or name the stack as ORGANISATION/PROJECT/STACK",
        )
    if "pulumi login" in text or "access_token" in text:
        return PulumiFailed(stack, "pulumi is not logged in", hint="pulumi login")
    return PulumiFailed(stack, said, hint=f"see what `pulumi stack output --stack {stack}` says")


def _pulumi_stacks() -> list[str]:
    answer = _run_pulumi("stack", "ls", "--json") if _has_pulumi() else None
    if answer is None or answer.returncode:
        return []
    try:
        return [str(stack["name"]) for stack in json.loads(answer.stdout)]
    except (ValueError, KeyError, TypeError):
        return []


def _has_pulumi() -> bool:
    import shutil

    return shutil.which("pulumi") is not None


def _run_pulumi(*args: str) -> subprocess.CompletedProcess[str] | None:
    """The answer of the CLI, None if it took too long. It never asks: there may be nobody."""
    import subprocess

    try:
        return subprocess.run(
            ["pulumi", *args, "--non-interactive"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env={**os.environ, "PULUMI_SKIP_UPDATE_CHECK": "true"},
            timeout=PULUMI_PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
