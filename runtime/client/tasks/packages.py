"""Packages that other machines can install, from a lock file, or those of the Python that submits, frozen."""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

from runtime.client.tasks.environment import ALLOWED
from runtime.errors import InvalidValue, NotPossible
from runtime.file_trust import check_size, read_file
from runtime.snapshots.environment import LOCK_OF, Packages

if TYPE_CHECKING:
    from importlib.metadata import Distribution


NAMED_AT_MOST: Final = 5
OWN: Final = frozenset({"research-runtime", "pip"})
"""Packages that a frozen list leaves out: a worker has its own copy of the first, and an environment its own second."""

_NAME: Final = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_is_name = re.compile(_NAME).fullmatch
_is_version = re.compile(r"[0-9A-Za-z][0-9A-Za-z.!+_-]*").fullmatch
_pin = re.compile(rf"({_NAME})\s*(?:\[[^\]]*\])?\s*(===?\s*[0-9A-Za-z][0-9A-Za-z.!+_-]*|@\s*\S+)\s*(;.*)?").fullmatch
_OPTIONS: Final = frozenset(
    {
        "-i",
        "--index-url",
        "--extra-index-url",
        "--no-index",
        "-f",
        "--find-links",
        "--only-binary",
        "--no-binary",
        "--prefer-binary",
    }
    | {"--pre", "--require-hashes", "--trusted-host"}
)
"""Options of a requirements file that say where packages come from."""
_URLS: Final = ("https", "http", "git+https", "git+http", "git+ssh", "hg+https", "svn+https")
_ADD: Final = "pin a released version, or let the code go with the snapshot and leave the package out"


def _minor() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


# lock files


def read_lock(path: Path, extra: Sequence[str] = ()) -> Packages:
    """Read a lock file, with the pyproject.toml beside it if it is uv's. Raises `NotPossible` for one that another machine could
    not install."""
    text = _read(path)
    if path.name == LOCK_OF["uv"]:
        if extra:
            raise NotPossible(
                f"`--with {extra[0]}` cannot be added to `{path}`, whose versions fit together as they are",
                hint=f"uv add {extra[0]!r}, which locks again; or submit with `--environment frozen --with …`",
            )
        _check_uv(path, text)
        project = path.with_name("pyproject.toml")
        settings = _read(project, f"what `{path.name}` is a lock of,")
        for url in re.findall(r"[a-z+]+://[^\s\"']+", settings):
            _check_url(str(project), url)
        return Packages(manager="uv", python=_minor(), files={path.name: text, project.name: settings})
    if path.suffix in (".yml", ".yaml", ".toml", ".lock"):
        raise NotPossible(
            f"`{path}` is no lock file that tasks can carry",
            facts=["known: uv.lock, and requirements with exact versions, such as `uv export` or `pip freeze` writes"],
            hint="for a conda environment, name it in the worker's job: environment.name",
        )
    lines = list(_read_pins(path, text))
    return Packages(manager="pip", python=_minor(), files={LOCK_OF["pip"]: _with(lines, extra)})


def _read(path: Path, what: str = "the lock file") -> str:
    found = read_file(str(path))
    if found is None:
        problem = "it is no regular file" if path.exists() else "no such file"
        raise NotPossible(f"cannot read {what} `{path}`: {problem}", hint=f"--environment takes {ALLOWED}")
    check_size(str(path), found[1])
    try:
        return found[1].decode("utf-8-sig")  # some editors begin a file with a mark
    except UnicodeDecodeError:
        raise NotPossible(f"cannot read {what} `{path}`: it is no text in UTF-8") from None


def _check_uv(path: Path, text: str) -> None:
    import tomllib

    try:
        listed = tomllib.loads(text).get("package", [])
        sources = [(str(each.get("name")), each.get("source", {})) for each in listed]
        local = [
            (name, kind, str(place))
            for name, source in sources
            for kind, place in source.items()
            if kind in ("path", "directory", "editable", "virtual") and str(place) != "."
        ]
        urls = [
            (name, str(source.get("url") or source.get("git") or source.get("registry") or ""))
            for name, source in sources
        ]
    except (ValueError, AttributeError, TypeError) as problem:
        raise NotPossible(f"`{path}` cannot be read: {problem}", hint="uv lock") from None
    if local:
        raise _local(str(path), [f"{name} ({place})" for name, _, place in local])
    for name, url in urls:
        _check_url(f"{path}: {name}", url)


def _read_pins(path: Path, text: str) -> Iterator[str]:
    """Yield the lines of a requirements file without comments. Raises `NotPossible` for one that is no lock file."""
    joined = re.sub(r"\\\r?\n", " ", text)
    for line in joined.splitlines():
        line = re.sub(r"(^|\s)#.*$", "", line).strip()
        if not line:
            continue
        if line.startswith("-"):
            option, value = _split_option(line)
            if option not in _OPTIONS:
                raise _no_pin(path, line)
            for url in value.split():
                _check_url(str(path), url)
            yield line
            continue
        requirement = re.sub(r"\s+--hash[= ]\S+", "", line)
        pin = _pin(requirement)
        if pin is None:
            raise _no_pin(path, line)
        if pin[2].startswith("@"):
            url = pin[2][1:].strip()
            if urlsplit(url).scheme not in _URLS:
                raise _local(str(path), [f"{pin[1]} ({url})"])
            _check_url(f"{path}: {pin[1]}", url)
        yield line


def _split_option(line: str) -> tuple[str, str]:
    option, _, value = line.replace("=", " ", 1).partition(" ")
    return option, value.strip()


def _no_pin(path: Path, line: str) -> NotPossible:
    shown = line if len(line) <= 60 else f"{line[:59]}…"
    if re.match(r"(-e|--editable|-r|-c|--requirement|--constraint|\.{0,2}/|\.$|file:)", line):
        return NotPossible(
            f"`{path}` names what is only on this machine: `{shown}`",
            hint="write the whole list into one file, such as with `uv pip compile` or `pip freeze`; the code itself goes with the snapshot",
        )
    return NotPossible(
        f"`{path}` is no lock file: `{shown}` is no exact version",
        facts=["every line is NAME==VERSION, or NAME @ URL, so that the same packages are installed tomorrow"],
        hint="lock it with `uv pip compile` or `pip freeze`, or submit with `--environment frozen`",
    )


def _local(where: str, names: Sequence[str]) -> NotPossible:
    shown = ", ".join(names[:NAMED_AT_MOST]) + (", …" if len(names) > NAMED_AT_MOST else "")
    return NotPossible(f"{where} has packages that are only on this machine: {shown}", hint=_ADD)


def _check_url(where: str, url: str) -> None:
    """Raise `NotPossible` for a URL with a password, which everyone who reads the records would read."""
    try:
        parts = urlsplit(url)
        secret = parts.password or (parts.username if parts.scheme in ("http", "https") else None)
    except ValueError:
        secret = None
    if secret and not secret.startswith("${"):
        raise NotPossible(
            f"{where} names a URL with a password, and everyone who reads the records would read it",
            hint="let the workers' machines have it: ~/.netrc, PIP_INDEX_URL or UV_INDEX_URL",
        )


def _with(lines: Sequence[str], extra: Sequence[str]) -> str:
    """The lines, with `extra` in the place of pins of the same packages."""
    pinned: dict[str, str] = {}
    for text in extra:
        pin = _pin(text.strip())
        if pin is None or (pin[2].startswith("@") and urlsplit(pin[2][1:].strip()).scheme not in _URLS):
            raise InvalidValue("with", text, "a package and its exact version, such as numpy==2.1")
        _check_url("--with", pin[2][1:].strip())
        pinned[_canonical(pin[1])] = text.strip()
    kept = [line for line in lines if (pin := re.match(_NAME, line)) is None or _canonical(pin[0]) not in pinned]
    return "".join(f"{line}\n" for line in (*kept, *pinned.values()))


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# the installed packages


def freeze(project: Path | None, extra: Sequence[str] = (), *, path: Sequence[str] | None = None) -> Packages:
    """List the packages of this Python with their exact versions, in the order of their names.

    Left out is `project`, the folder whose snapshot goes with the tasks, if it is installed from there. `path` is the import
    path to look at. Raises `NotPossible`, with names, for packages that no index has.
    """
    looked_at = tuple(sys.path if path is None else path)
    lines = _frozen(project, looked_at, tuple(map(_stamp, looked_at)))
    return Packages(manager="pip", python=_minor(), files={LOCK_OF["pip"]: _with(lines, extra)}, complete=not extra)


def _stamp(folder: str) -> int:
    try:
        return Path(folder).stat().st_mtime_ns
    except OSError:
        return 0


@functools.lru_cache(8)
def _frozen(project: Path | None, path: tuple[str, ...], _: tuple[int, ...]) -> tuple[str, ...]:
    """List the packages, again once a folder has got or lost one: a program may submit thousands of times."""
    from importlib.metadata import distributions

    found: dict[str, str] = {}
    local: list[str] = []
    for each in distributions(path=list(path)):
        name, version = str(each.metadata["Name"] or ""), str(each.metadata["Version"] or "")
        key = _canonical(name)
        if key in OWN or key in found:
            continue  # the first on the path is the one that is imported
        line = _freeze_one(each, name, version, project)
        if isinstance(line, _Local):
            local.append(line.described)
        found[key] = line if isinstance(line, str) else ""
    if local:
        raise _local(f"the environment of `{sys.prefix}`", sorted(local))
    return tuple(found[key] for key in sorted(found) if found[key])


@dataclass(frozen=True, slots=True)
class _Local:
    described: str


def _freeze_one(each: Distribution, name: str, version: str, project: Path | None) -> str | _Local | None:
    """The line of one package, None for the project itself."""
    if not _is_name(name) or not _is_version(version):
        return _Local(f"{name or 'a package without a name'!r}")
    told = _read_url(each)
    if told is None:
        folder = Path(str(each.locate_file(""))).resolve()
        if project is not None and folder.is_relative_to(project.resolve()) and not _is_installed_folder(folder):
            return None
        return f"{name}=={version}"
    url = str(told.get("url") or "")
    parts = urlsplit(url)
    if parts.scheme == "file":
        place = Path(unquote(parts.path)).resolve()
        return None if project is not None and place == project.resolve() else _Local(f"{name} ({place})")
    vcs: Mapping[str, Any] = told.get("vcs_info") or {}
    if parts.password or parts.username not in (None, "git"):
        return _Local(f"{name} (a URL with a password)")
    if vcs and vcs.get("commit_id"):
        url = f"{vcs.get('vcs')}+{url}@{vcs['commit_id']}"
    elif vcs:
        return _Local(f"{name} ({url}, no commit)")
    if urlsplit(url).scheme not in _URLS or re.search(r"\s", url):
        return _Local(f"{name} ({url})")
    folder_in = told.get("subdirectory")
    return f"{name} @ {url}" + (f"#subdirectory={folder_in}" if folder_in else "")


def _is_installed_folder(folder: Path) -> bool:
    """A virtual environment may lie in the project."""
    return folder.name in ("site-packages", "dist-packages")


def _read_url(each: Distribution) -> Mapping[str, Any] | None:
    """Where a package was installed from, if not from an index (PEP 610)."""
    text = each.read_text("direct_url.json")
    if not text:
        return None
    try:
        told = json.loads(text)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}
