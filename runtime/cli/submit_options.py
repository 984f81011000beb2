"""Options of `runtime submit` that go with every task: its packages or its container, and its artifacts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from runtime.errors import InvalidTask, RequestRefused

if TYPE_CHECKING:
    from runtime.client.tasks.build import TaskOptions
    from runtime.client.tasks.environment import SubmittedPackages
    from runtime.client.tasks.task_snapshot import SubmittedCode
    from runtime.config import Settings
    from runtime.records.base import RecordStore
    from runtime.tasks.container import ContainerSpec


@dataclass(frozen=True, slots=True)
class PackageOptions:
    """The packages that tasks run with."""

    environment: str | None
    extra: tuple[str, ...]

    def take(self, records: RecordStore | None, settings: Settings, code: SubmittedCode) -> SubmittedPackages:
        from runtime.client.tasks.environment import take_packages

        return take_packages(self.environment, records, settings, code, extra=self.extra)

    def choose_container(
        self, image: str | None, mounts: Sequence[str] | None
    ) -> tuple[ContainerSpec | None, PackageOptions]:
        """Return the container of the tasks, and the packages beside it. Raises `InvalidTask`."""
        if image is None and not mounts:
            return None, self
        from runtime.client.tasks.build import choose_container

        container, environment = choose_container(image, mounts or (), self.environment, self.extra)
        return container, replace(self, environment="none" if environment is False else environment)

    def add_to(self, options: TaskOptions, packages: SubmittedPackages) -> TaskOptions:
        try:
            return replace(options, environment=packages.id)
        except InvalidTask as problem:
            raise RequestRefused(f"`--environment` {problem.problem}", hint=problem.hint) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactOptions:
    """Artifacts as the command line names them, by tag."""

    capture: Mapping[str, str]
    every: str | None
    reuse: Mapping[str, str]

    @classmethod
    def read(cls, capture: Sequence[str] | None, every: str | None, reuse: Sequence[str] | None) -> ArtifactOptions:
        if not (capture or reuse):
            if every is not None:
                raise RequestRefused("`--capture-every` needs `--capture`", hint="such as --capture out/model:model")
            return cls(capture={}, every=None, reuse={})
        from runtime.client.artifacts import split_capture, split_reuse

        named = {"capture": map(split_capture, capture or ()), "reuse": map(split_reuse, reuse or ())}
        found: dict[str, dict[str, str]] = {"capture": {}, "reuse": {}}
        for option, pairs in named.items():
            for source, tag in pairs:
                if found[option].setdefault(tag, source) != source:
                    raise RequestRefused(f"`--{option}` names the tag `{tag}` twice", hint="give each a tag of its own")
        return cls(every=every, **found)

    def add_to(self, options: TaskOptions, records: RecordStore, last: str | None) -> TaskOptions:
        if not (self.capture or self.reuse):
            return options
        from runtime.client.artifacts import make_artifacts
        from runtime.units import parse_duration

        every = None if self.every is None else parse_duration(self.every, field="capture-every")
        made = make_artifacts(self.capture, every, self.reuse, records, options.experiment, last=last)
        try:
            return replace(options, artifacts=made)
        except InvalidTask as problem:
            option = "--capture-every" if problem.field.endswith("every_s") else "--capture"
            tag = problem.field.removeprefix("artifacts").removeprefix(".capture").removeprefix(".")
            whose = f" of `{tag}`" if tag and option == "--capture" else ""
            hint = "such as --capture out/model:model --capture-every 1m"
            raise RequestRefused(f"`{option}`{whose} {problem.problem}", hint=hint) from None
