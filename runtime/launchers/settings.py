"""Reads the settings of a target into the dataclass that its launcher has for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from runtime.errors import InvalidValue, UnknownName
from runtime.jobs.plan import Target
from runtime.schema import Reader, join, type_hints

T = TypeVar("T")


class SettingsReader(Reader):
    """Raises `UnknownName` or `InvalidValue` for the first setting that cannot be used.

    A setting is not an empty text, and whole numbers begin at 1.
    """

    names: ClassVar[Mapping[Any, str]] = {
        **Reader.names,
        str: "text",
        int: "a whole number from 1 on",
        tuple: "a list of text",
        Mapping: "a table",
    }

    def __init__(self, where: str, expected: Mapping[str, str]) -> None:
        super().__init__()
        self._where, self._expected = where, expected

    def read_record(self, kind: Any, value: object, path: str, given: Mapping[str, Any] | None = None) -> Any:
        for name, hint in type_hints(kind).items():
            if isinstance(value, Mapping) and hint is not Any and value.get(name, ()) in ("", None):
                self.wrong(hint, value[name], join(path, name))
        return super().read_record(kind, value, path, given)

    def read_scalar(self, kind: Any, value: object, path: str) -> Any:
        if kind is int and (type(value) is not int or value < 1):
            return self.wrong(kind, value, path)
        return super().read_scalar(kind, value, path)

    def report_unknown(self, value: Mapping[str, Any], known: list[str], path: str) -> None:
        for name in value:
            if name not in known:
                raise UnknownName("setting", name, known, where=self._where or f"in {path}")

    def wrong(self, kind: Any, value: object, path: str, expected: str | None = None) -> Any:
        named = [self._expected[part] for part in path.partition("[")[0].split(".")[2:] if part in self._expected]
        plain = self.expected(kind)
        # The words for a table's values are none for the table itself.
        raise InvalidValue(path, value, expected or (named[-1] if named and plain != self.names[Mapping] else plain))


def read_target_settings(kind: type[T], target: Target, expected: Mapping[str, str], *, where: str = "") -> T:
    """The settings of `target` as a `kind`; `expected` names the valid settings, `where` the place of an unknown one."""
    reader = SettingsReader(where, expected)
    found: T = reader.read_record(kind, target.settings, f"targets.{target.name}")
    return found
