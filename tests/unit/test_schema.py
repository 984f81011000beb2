"""The reader of dataclasses: leniency of subclasses, and the wording of problems."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from runtime.schema import UNREADABLE, Problem, Reader, read_record


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    name: str
    count: int = 1
    parts: Mapping[str, Inner] = field(default_factory=dict)


class Lenient(Reader):
    keeps_rest = True

    def is_absent(self, value: object, *, required: bool) -> bool:
        return value is None


def test_record_with_a_problem_is_none_and_every_problem_is_listed() -> None:
    found, problems = read_record(Outer, {"nmae": "x", "count": "2", "parts": {"a": {}}})

    assert found is None
    assert [str(each) for each in problems] == [
        "`nmae` is no field here; did you mean `name`?",
        "`name` is missing",
        '`count` is "2", expected a whole number',
        "`parts.a.size` is missing",
    ]


def test_reader_that_keeps_the_rest_makes_a_value_of_what_it_could_read() -> None:
    reader = Lenient()

    read = reader.read(Outer, {"name": "x", "count": "2", "parts": {"a": {}, "b": {"size": 3.0}}}, "")

    assert read == Outer(name="x", parts={"b": Inner(size=3)})
    assert [each.path for each in reader.problems] == ["count", "parts.a.size"]


def test_reader_without_a_required_field_has_no_value() -> None:
    reader = Lenient()

    assert reader.read(Outer, {"name": None}, "") is UNREADABLE
    assert reader.problems == [Problem("name", "is missing")]


def test_problem_is_one_printable_line() -> None:
    assert str(Problem("a\nb", "is `\x1b[2J`")) == "`a\\nb` is `\\x1b[2J`"


def test_record_with_bytes_that_are_no_utf8_names_the_fields_that_hold_them() -> None:
    value = {"name": "a\udcff", "parts": {"\ud800": {"size": 1}}}

    value["parts"]["itself"] = value  # type: ignore[index]

    found, problems = read_record(Outer, value)

    assert found is None
    assert [str(each) for each in problems if "UTF-8" in each.message] == [
        "`name` holds bytes that are no UTF-8, near 'a\\udcff'; name the file by a path that is UTF-8, such as a link to it",
        "`parts` holds bytes that are no UTF-8, near '\\ud800'; name the file by a path that is UTF-8, such as a link to it",
    ]
