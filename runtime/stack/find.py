"""Finds a stack's outputs, and keeps copies of them on this machine.

The sources, in this order: the `pulumi` CLI, if a stack is named and the CLI is installed; a published copy
(`RUNTIME_OUTPUTS`, a path or URL); the cache of the last reading; and with nothing configured, the built-in stack
`local`: one embedded file in the user's data folder. If the `pulumi` CLI cannot answer, the stack's known published copy
is read, with a warning.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from runtime.config import Settings, load_settings, working_folder
from runtime.errors import (
    InvalidContract,
    InvalidValue,
    NotPossible,
    RequestRefused,
    RuntimeFailure,
    StoreUnavailable,
    UnknownName,
)
from runtime.file_trust import check_trusted, is_ours, write_private
from runtime.outputs import (
    OUTPUT_NAME,
    PUBLISHED,
    PublishedCopy,
    RecordsOutput,
    SqliteQueueOutput,
    StackOutputs,
    decode_fields,
    outputs_fields,
    parse_outputs,
    read_published,
)
from runtime.queues.base import DEFAULT_QUEUE
from runtime.sanitize import CleanLogger
from runtime.system import system
from runtime.units import format_duration, format_time, parse_time

if TYPE_CHECKING:
    import subprocess

LOCAL: Final = "local"
PULUMI_PATIENCE_S: Final = 60
READ_PATIENCE: Final = timedelta(seconds=20)
"""Limit for reading a published copy; the cache comes next."""
PUBLISHED_PREFIX: Final = "published:"
CACHE_PREFIX: Final = "cache:"


class PulumiFailed(RequestRefused):
    """The `pulumi` CLI could not print a stack's outputs; `reason` is one line."""

    def __init__(self, stack: str, reason: str, *, hint: str) -> None:
        self.stack, self.reason = stack, reason
        super().__init__(f"outputs of stack `{stack}` cannot be read: {reason}", hint=hint)


class StackNotFound(UnknownName):
    """No source has the stack; `tried` has the answer of each."""

    def __init__(self, name: str, known: list[str], tried: list[str], *, hint: str) -> None:
        super().__init__("stack", name, known, hint=hint)
        self.tried = tried
        self.facts = (*self.facts, *tried)


class NothingThere(StoreUnavailable):
    """The source can be reached, and holds no contract."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundStack:
    outputs: StackOutputs
    source: str
    """`built-in`, `pulumi`, or the path or URL of the contract."""
    read_at: datetime
    cached: bool = False
    """Whether the outputs come from the cache, because the source did not answer."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The contract as read, with keys that this release does not know."""
    published: PublishedCopy | None = None
    """The publication's own facts, in a published copy."""

    @property
    def name(self) -> str:
        return self.outputs.stack

    @property
    def contract(self) -> dict[str, Any]:
        """The contract without the keys of its published copy."""
        return {key: value for key, value in self.fields.items() if key != PUBLISHED} or outputs_fields(self.outputs)


def parse_found(
    value: Any, source: str, read_at: datetime, *, path: str | None = None, cached: bool = False
) -> FoundStack:
    outputs = parse_outputs(value, source=path or source)
    published = read_published(value, source=path or source)
    return FoundStack(outputs=outputs, source=source, read_at=read_at, cached=cached, fields=value, published=published)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedStack:
    name: str
    source: str
    default: bool
    """Whether commands without a stack use it."""
    read_at: datetime | None = None


def local_outputs(settings: Settings) -> StackOutputs:
    """Return the outputs of the built-in stack: queue and records in one file of the user's data folder."""
    path = str(settings.data_dir / "local.db")
    return StackOutputs(
        stack=LOCAL,
        records=RecordsOutput(url=f"sqlite:{path}"),
        queues={DEFAULT_QUEUE: SqliteQueueOutput(path=path)},
    )


def find_stack(name: str | None = None, *, settings: Settings | None = None) -> FoundStack:
    """Read the outputs of `name`, by default of the configured stack, or else of `local`.

    The cache keeps the outputs; if only the cache answers, a warning has their age. Raises `StackNotFound` with the
    answer of each source, `InvalidContract` for a contract that cannot be used, `InvalidValue` for an empty name.
    """
    settings = settings or load_settings()
    if name == "":
        raise InvalidValue("stack", name, "the name of a stack", hint="leave it out for the default stack")
    name = name or settings.stack
    if name == LOCAL or (name is None and settings.outputs is None):
        return FoundStack(outputs=local_outputs(settings), source="built-in", read_at=system.now())
    if name is None:
        return _find_published(settings)
    return _find_named(name, settings)


def pull_stack(source: str, *, settings: Settings | None = None) -> FoundStack:
    """Read a stack from its source, a name, path or URL, and keep it in the cache."""
    settings = settings or load_settings()
    if is_location(source):
        return remember(_parse_published(source), settings)
    if source == LOCAL:
        raise NotPossible("stack `local` is built in: there is nothing to pull", hint="`runtime stack show local`")
    return _find_named(source, settings, allow_cache=False)


def read_stack(source: str, *, settings: Settings | None = None) -> FoundStack:
    """Read one source and keep nothing.

    `source` is `local`, the name of a stack (read from Pulumi, never from a copy), a path or URL, `cache:NAME`, or
    `published:NAME` for the stack's known published copy. Raises the source's own failure.
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
    """Return the location of the stack's published copy, from `RUNTIME_OUTPUTS` or the cache; None if unknown."""
    settings = settings or load_settings()
    name = name or settings.stack
    if settings.outputs is not None and name is None:
        return settings.outputs
    return _known_copy(read_cache(name, settings)) if name else None


def _published_of(name: str, settings: Settings) -> str:
    """Return the URL of the published copy, from Pulumi or else from the cache."""
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
    """List every stack that a command here can name: built-in, Pulumi's, the published copy, and cached."""
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

    def try_copy(label: str, source: str) -> FoundStack | None:
        nonlocal first
        published = _try_published(source)
        if isinstance(published, RuntimeFailure):
            tried.append(f"{label}: {published.message}")
            first = first or published
        elif name != published.name and not name.endswith(f"/{published.name}"):
            tried.append(f"{label}: `{source}` holds stack `{published.name}`")
        else:
            if failed is not None:
                _report_published(published, failed)
            return remember(published, settings, name)
        return None

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
    elif found := try_copy("RUNTIME_OUTPUTS", settings.outputs):
        return found
    cached = read_cache(name, settings)
    copy = _known_copy(cached)
    asked = failed is not None or not allow_cache
    if asked and copy and copy != settings.outputs and (found := try_copy("published copy", copy)):
        return found
    if cached is not None and allow_cache:
        return _report_cached(cached, tried[0] if _has_pulumi() else tried[-1])
    if not allow_cache and isinstance(first, StoreUnavailable):
        raise first
    tried.append(f"cache: no copy in `{cache_folder(settings)}`")
    listed = _pulumi_stacks()
    if failed is not None and name in listed:
        # Pulumi has the stack, so the failure to read it is reported, and not an unknown name.
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
            return _report_cached(cached, published.message)
    raise published


def _known_copy(cached: FoundStack | None) -> str | None:
    """Return the location of the published copy according to the last reading."""
    if cached is None:
        return None
    return cached.source if is_location(cached.source) else cached.outputs.published_url


def _report_published(found: FoundStack, failed: PulumiFailed) -> None:
    when = found.published.at if found.published else None
    age = f", published {format_duration(system.now() - when)} ago" if when else ""
    _warn(f"using the published copy of stack `{found.name}` at {found.source}{age} (pulumi: {failed.reason})")


def _report_cached(cached: FoundStack, why: str) -> FoundStack:
    age = format_duration(system.now() - cached.read_at)
    _warn(f"using outputs of stack `{cached.name}` as read {age} ago from {cached.source} ({why})")
    return cached


def _warn(text: str) -> None:
    CleanLogger(__name__).warning(text)


def _try_published(source: str) -> FoundStack | StoreUnavailable | RequestRefused:
    """Return the contract, or the failure to reach it; raises `InvalidContract` for a contract that cannot be used."""
    try:
        return _parse_published(source)
    except InvalidContract:
        raise
    except (StoreUnavailable, RequestRefused) as problem:
        return problem


def _parse_published(source: str) -> FoundStack:
    return parse_found(decode_fields(read_location(source), source=source), source, system.now())


def read_location(source: str) -> bytes:
    """Read a path or a `file:`, `https://`, `gs://` or `s3://` URL. Raises `StoreUnavailable`."""
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
    from http.client import HTTPException

    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            data: bytes = answer.read()
            return data
    except (OSError, ValueError, HTTPException) as problem:
        if isinstance(problem, urllib.error.HTTPError):
            problem.close()
        raise StoreUnavailable(f"cannot read `{url}`: {problem}", hint="check the URL and the network") from problem


def _read_bucket(url: str) -> bytes:
    from runtime.records.blobs.bucket import BucketBlobs

    folder, _, name = url.rpartition("/")
    with closing(BucketBlobs(folder, timeout=READ_PATIENCE, retry_for=READ_PATIENCE)) as blobs:
        data = blobs.get(name)
    if data is None:
        raise NothingThere(f"no object `{url}`", hint="check the URL, or `runtime stack list`", retryable=False)
    return data


# cache


def cache_folder(settings: Settings) -> Path:
    return settings.cache_dir / "stacks"


def cache_path(name: str, settings: Settings) -> Path:
    # A full Pulumi name has slashes.
    return cache_folder(settings) / f"{name.replace('/', '%2F')}.json"


def remember(found: FoundStack, settings: Settings, name: str | None = None) -> FoundStack:
    """Keep the stack in the cache, under `name` if that differs; a failure to write the cache is ignored."""
    path = cache_path(name or found.name, settings)
    content = {
        "source": found.source,
        "read_at": format_time(found.read_at),
        OUTPUT_NAME: dict(found.fields) or outputs_fields(found.outputs),
    }
    temporary = path.with_name(f".{path.name}.{system.urandom(4).hex()}")
    try:
        write_private(temporary, json.dumps(content, indent=1) + "\n")
        temporary.replace(path)
    except OSError:
        pass
    return found


def read_cache(name: str, settings: Settings) -> FoundStack | None:
    path = cache_path(name, settings)
    if not is_ours(str(path)):
        return None
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
        read_at, source = parse_time(content["read_at"]), str(content["source"])
        contract = content[OUTPUT_NAME]
    except (OSError, ValueError, KeyError, TypeError, RequestRefused):
        return None
    return parse_found(contract, source, read_at, path=str(path), cached=True)


def list_cached(settings: Settings) -> Iterator[FoundStack]:
    for path in sorted(cache_folder(settings).glob("*.json")):
        try:
            found = read_cache(path.stem.replace("%2F", "/"), settings)
        except InvalidContract:
            continue
        if found is not None:
            yield found


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
    return parse_found(value, "pulumi", system.now())


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


def _check_project() -> None:
    """Raise `Untrusted` for another user's project file: it names the backend that answers, and programs to run.

    Pulumi takes the nearest one going up: https://www.pulumi.com/docs/iac/concepts/projects/
    """
    here = working_folder()
    for folder in (here, *here.parents):
        for path in (folder / "Pulumi.yaml", folder / "Pulumi.yml"):
            if path.is_file():
                check_trusted(
                    str(path), instead="run it in another folder, or read the published copy: RUNTIME_OUTPUTS=URL"
                )
                return


def _run_pulumi(*args: str) -> subprocess.CompletedProcess[str] | None:
    """Return the answer of the CLI, None after a timeout. The CLI never prompts: there may be no terminal."""
    import subprocess

    _check_project()
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
