"""The artifacts of a task: files that its attempts save as they run, and files that they find when they begin. Pure.

docs/artifacts.md has the promises.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Final

from runtime.errors import InvalidTask

_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})
EVERY: Final = timedelta(minutes=1)
MOST_TAGS: Final = 100
CHECKPOINT: Final = "_checkpoint"
"""The tag of the folder that all attempts of a task share; no tag of a user begins like it."""
_TAG: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_VERSION: Final = re.compile(
    r"(?P<owner>[A-Za-z0-9-]{1,64})/(?P<tag>_?[A-Za-z0-9][A-Za-z0-9_.-]{0,63})/"
    r"g(?P<generation>\d{7})\.a(?P<attempt>\d{6})\.n(?P<number>\d{8})\.(?P<token>[A-Za-z0-9]{1,64})",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class ArtifactSpec:
    """The artifacts that attempts of a task save and find, by tag."""

    capture: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    """Tag → file or folder, relative to the folder that an attempt starts in."""
    every: timedelta = EVERY
    """How often a change is saved while an attempt runs."""
    reuse: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    """Tag → id of a version, which an attempt finds in `artifacts/<tag>`."""

    @property
    def named(self) -> bool:
        """Whether there are any."""
        return bool(self.capture or self.reuse)

    @property
    def paths(self) -> dict[str, str]:
        """Tag → its path in the folder that an attempt starts in."""
        return {**{tag: place_of(tag) for tag in self.reuse}, **self.capture}


NO_ARTIFACTS: Final = ArtifactSpec()


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """One state of an artifact in a store. Versions of a tag are ordered by age, the newest last."""

    generation: int
    attempt: int
    number: int
    token: str
    """The attempt that saved it."""
    owner: str
    """The id of a task, or the place of what people put."""
    tag: str

    @property
    def id(self) -> str:
        return f"{self.owner}/{self.tag}/g{self.generation:07}.a{self.attempt:06}.n{self.number:08}.{self.token}"

    @classmethod
    def parse(cls, text: str) -> Version | None:
        """The version of an id; None for any other text."""
        found = _VERSION.fullmatch(text)
        if found is None:
            return None
        generation, attempt, number = (int(found[name]) for name in ("generation", "attempt", "number"))
        return cls(generation, attempt, number, found["token"], found["owner"], found["tag"])


def place_of(tag: str) -> str:
    """The path of an artifact that no path was named for."""
    return f"artifacts/{tag}"


def variable_of(tag: str) -> str:
    """The variable with an artifact's path in an attempt's environment."""
    return "RUNTIME_ARTIFACT_" + re.sub("[^A-Z0-9]", "_", tag.upper())


def is_tag(value: object) -> bool:
    return isinstance(value, str) and _TAG.fullmatch(value) is not None


def check_artifacts(artifacts: Any) -> None:
    """Raise `InvalidTask` with the field's name on the wire."""
    if not isinstance(artifacts, ArtifactSpec):
        raise InvalidTask(
            "artifacts", f'is {artifacts!a:.60}, expected an object such as {{"capture": {{"model": "out"}}}}'
        )
    _check_names("artifacts.capture", artifacts.capture)
    _check_names("artifacts.reuse", artifacts.reuse)
    every: Any = artifacts.every
    path: Any
    version: Any
    if not isinstance(every, timedelta) or not 1 <= every.total_seconds() <= 86_400:
        shown = f"{every.total_seconds():g}" if isinstance(every, timedelta) else f"{every!a:.60}"
        raise InvalidTask("artifacts.every_s", f"is {shown}, expected seconds from 1 to 86,400")
    for tag, path in artifacts.capture.items():
        if not isinstance(path, str) or not _is_below(path):
            expected = "a relative path without `.` and `..`, such as out/model"
            raise InvalidTask(f"artifacts.capture.{tag}", f"is {path!a:.60}, expected {expected}")
    for tag, version in artifacts.reuse.items():
        if not isinstance(version, str) or Version.parse(version) is None:
            raise InvalidTask(
                f"artifacts.reuse.{tag}",
                f"is {version!a:.60}, expected the id of a version",
                hint="`runtime artifacts list EXPERIMENT -o json` has the ids",
            )
    _check_apart(artifacts)


def _check_names(name: str, by_tag: object) -> None:
    if not isinstance(by_tag, Mapping):
        raise InvalidTask(name, f"is {type(by_tag).__name__}, expected an object by tag")
    if len(by_tag) > MOST_TAGS:
        raise InvalidTask(name, f"has {len(by_tag)} tags, expected at most {MOST_TAGS}")
    for tag in by_tag:
        if not is_tag(tag):
            raise InvalidTask(name, f"has the tag {tag!a:.80}, expected up to 64 letters, digits and _.-")


def _is_below(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return not (path.startswith("/") or {"", ".", ".."} & set(path.split("/")) or "\0" in path or len(path) > 1024)


def _check_apart(artifacts: ArtifactSpec) -> None:
    """Refuse two artifacts with one tag, one variable, or one place inside the other."""
    named = [*artifacts.capture, *artifacts.reuse]
    variables: dict[str, str] = {}
    for tag in named:
        if (other := variables.setdefault(variable_of(tag), tag)) != tag or named.count(tag) > 1:
            what = (
                f"the tag {tag!a} twice" if other == tag else f"the tags {other!a} and {tag!a}, which are one variable"
            )
            raise InvalidTask("artifacts", f"has {what}; name them apart")
    places = sorted((f"{path}/", tag) for tag, path in artifacts.paths.items())
    for (above, first), (path, second) in itertools.pairwise(places):
        if path.startswith(above):
            raise InvalidTask("artifacts", f"has {second!a} at `{path[:-1]}`, inside {first!a} at `{above[:-1]}`")


def artifacts_fields(artifacts: ArtifactSpec) -> dict[str, Any]:
    """The wire object, without fields that have their default value."""
    fields: dict[str, Any] = {}
    if artifacts.capture:
        fields["capture"] = dict(artifacts.capture)
    if artifacts.every != EVERY:
        fields["every_s"] = artifacts.every.total_seconds()
    if artifacts.reuse:
        fields["reuse"] = dict(artifacts.reuse)
    return fields


def read_artifacts(name: str, value: object) -> ArtifactSpec:
    """The artifacts of a wire object. Raises `InvalidTask`."""
    if type(value) is not dict:
        raise InvalidTask(name, f'is {value!a:.60}, expected an object such as {{"capture": {{"model": "out"}}}}')
    if unknown := sorted(set(value) - {"capture", "every_s", "reuse"}):
        raise InvalidTask(f"{name}.{unknown[0]}", "is not known, expected capture, every_s or reuse")
    every = value.get("every_s", EVERY.total_seconds())
    if type(every) not in (int, float) or not 1 <= every <= 86_400:
        raise InvalidTask(f"{name}.every_s", f"is {every!a:.60}, expected seconds from 1 to 86,400")
    return ArtifactSpec(value.get("capture", _NOTHING), timedelta(seconds=every), value.get("reuse", _NOTHING))
