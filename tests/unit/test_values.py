"""Value classes against the standard library's: the same class made by both must behave the same."""

from __future__ import annotations

import abc
import ast
import copy
import dataclasses
import inspect
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar, Protocol

import pytest

from runtime import values

PACKAGE = Path(values.__file__).parent


@values.dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    x: int
    y: int = 2
    note: str = values.field(default="", repr=False, compare=False)


@values.dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio."""

    top: int
    bottom: int = 1
    seen: list[int] = values.field(default_factory=list)
    digits: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if self.bottom == 0:
            raise ValueError("a ratio to nothing")


@values.dataclass(frozen=True, slots=True, kw_only=True)
class Place(Point):
    y: int = 7
    name: str


@values.dataclass(slots=True)
class Counter:
    count: int = 0


@values.dataclass(slots=True, eq=False)
class Holder:
    held: object


@values.dataclass(frozen=True, slots=True, order=True)
class Version:
    major: int
    minor: int = 0


@values.dataclass(frozen=True, slots=True)
class Nothing:
    pass


@values.dataclass(frozen=True, slots=True)
class Spelled:
    text: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spelled) and other.text.lower() == self.text.lower()

    def __hash__(self) -> int:
        return hash(self.text.lower())

    def __repr__(self) -> str:
        return f"<{self.text}>"


def classes(by: Any) -> dict[str, Any]:
    """Define the same classes with one module or the other."""

    @by.dataclass(frozen=True, slots=True, kw_only=True)
    class Point:
        x: int
        y: int = 2
        note: str = by.field(default="", repr=False, compare=False)

    @by.dataclass(frozen=True, slots=True)
    class Ratio:
        top: int
        bottom: int = 1
        seen: list[int] = by.field(default_factory=list)

    @by.dataclass(slots=True)
    class Counter:
        count: int = 0

    @by.dataclass(frozen=True, slots=True, order=True)
    class Nothing:
        pass

    return {cls.__name__: cls for cls in (Point, Ratio, Counter, Nothing)}


CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("Point", (), {"x": 1}),
    ("Point", (), {"note": "n", "y": 3, "x": 1}),
    ("Ratio", (1,), {}),
    ("Ratio", (1, 2), {"seen": [3]}),
    ("Counter", (), {}),
    ("Counter", (4,), {}),
    ("Nothing", (), {}),
]
WRONG: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("Point", (1,), {}),
    ("Point", (), {}),
    ("Ratio", (1, 2, [], 4), {}),
    ("Counter", (), {"other": 1}),
    ("Nothing", (1,), {}),
]


@pytest.mark.parametrize(("name", "args", "kwargs"), CALLS)
def test_values_look_like_those_of_the_standard_library(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    cls, same = classes(values)[name], classes(dataclasses)[name]
    ours, theirs = cls(*args, **kwargs), same(*args, **kwargs)

    assert repr(ours) == repr(theirs)
    assert dataclasses.asdict(ours) == dataclasses.asdict(theirs)
    assert [str(each) for each in dataclasses.fields(ours)] == [str(each) for each in dataclasses.fields(theirs)]
    assert cls.__match_args__ == same.__match_args__
    assert dataclasses.replace(ours) == values.replace(ours) == ours == copy.copy(ours) == copy.deepcopy(ours)


@pytest.mark.parametrize(("name", "args", "kwargs"), WRONG)
def test_wrong_arguments_are_refused_in_the_words_of_the_standard_library(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    said = []
    for by in (values, dataclasses):
        with pytest.raises(TypeError) as refused:
            classes(by)[name](*args, **kwargs)
        said.append(str(refused.value))

    assert said[0] == said[1]


@pytest.mark.parametrize("value", [Point(x=1, note="n"), Ratio(1, 2, [3]), Counter(4), Nothing(), Place(x=1, name="p")])
def test_pickled_value_comes_back(value: object) -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(value, protocol)) == value


def test_pickle_of_a_standard_class_is_read() -> None:
    """Its state is a list of its fields, as with ours."""
    assert Point(x=1, note="n").__reduce_ex__(2)[2] == [1, 2, "n"]


def test_values_are_equal_by_their_compared_fields_and_class() -> None:
    assert Point(x=1, note="a") == Point(x=1, note="b")
    assert hash(Point(x=1, note="a")) == hash(Point(x=1, note="b"))
    assert Point(x=1) != Point(x=2)
    assert Point(x=1) != Place(x=1, y=2, name="")
    assert Nothing() == Nothing()
    assert len({Version(1), Version(1, 0), Version(2)}) == 2


def test_methods_that_a_class_writes_stay() -> None:
    assert Spelled("A") == Spelled("a")
    assert len({Spelled("A"), Spelled("a")}) == 1
    assert repr(Spelled("A")) == "<A>"


def test_values_that_change_have_no_hash() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(Counter())


def test_values_without_equality_are_themselves() -> None:
    assert Holder(1) != Holder(1)
    assert len({Holder(1), Holder(1)}) == 2


def test_order_is_that_of_the_fields() -> None:
    assert sorted([Version(2), Version(1, 5), Version(1)]) == [Version(1), Version(1, 5), Version(2)]
    assert Version(1) <= Version(1)
    with pytest.raises(TypeError):
        _ = Version(1) < 2  # type: ignore[operator]


def test_frozen_value_refuses_changes() -> None:
    point = Point(x=1)

    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'x'"):
        point.x = 2  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete field 'x'"):
        del point.x
    assert point.x == 1


def test_value_has_its_fields_and_nothing_else() -> None:
    with pytest.raises(AttributeError):
        Counter().other = 1  # type: ignore[attr-defined]
    assert not hasattr(Counter(), "__dict__")


def test_value_checks_itself() -> None:
    with pytest.raises(ValueError, match="a ratio to nothing"):
        Ratio(1, 0)


def test_values_share_no_default_that_can_change() -> None:
    assert Ratio(1).seen is not Ratio(1).seen
    with pytest.raises(ValueError, match="`default_factory`"):

        @values.dataclass(slots=True)
        class Shared:
            seen: list[int] = []  # noqa: RUF012


def test_class_without_slots_is_refused() -> None:
    with pytest.raises(TypeError, match="slots"):

        @values.dataclass(frozen=True, slots=False)
        class Wide:
            x: int


def test_derived_class_has_the_fields_of_both_in_their_order() -> None:
    place = Place(x=1, name="here")

    assert repr(place) == f"{Place.__qualname__}(x=1, y=7, name='here')"
    assert values.replace(place, x=2) == Place(x=2, name="here")
    assert [each.name for each in dataclasses.fields(Place)] == ["x", "y", "note", "name"]


def test_first_value_of_a_derived_class_leaves_its_base_as_it_is() -> None:
    @values.dataclass(frozen=True, slots=True)
    class Base:
        a: int

    @values.dataclass(frozen=True, slots=True)
    class Derived(Base):
        b: int

    class Plain(Base):
        def __init__(self) -> None:
            super().__init__(5)

    assert (Plain().a, Derived(1, 2).b, Base(3).a, Derived(4, 5).a) == (5, 2, 3, 4)


@pytest.mark.parametrize("kind", ["itself", "derived", "plain", "with a dict"])
def test_frozen_value_of_many_fields_is_of_its_own_class_and_refuses_changes(kind: str) -> None:
    @values.dataclass(frozen=True, slots=True)
    class Many:
        a: int
        b: int
        c: int
        d: int
        e: int
        f: int
        g: int
        h: int
        i: int = 9
        j: list[int] = values.field(default_factory=list)

    @values.dataclass(frozen=True, slots=True)
    class Derived(Many):
        k: int = 7

    class Plain(Many):
        __slots__ = ()

    class WithDict(Many):
        pass

    cls = {"itself": Many, "derived": Derived, "plain": Plain, "with a dict": WithDict}[kind]
    value = cls(1, 2, 3, 4, 5, 6, 7, 8)

    assert type(value) is cls
    assert [getattr(value, each.name) for each in values.fields(value)][:10] == [1, 2, 3, 4, 5, 6, 7, 8, 9, []]
    assert value == values.replace(cls(0, 2, 3, 4, 5, 6, 7, 8), a=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.a = 2  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        del value.a


def test_abstract_class_and_protocol_stay_what_they_are() -> None:
    class Named(Protocol):
        name: str

        def shout(self) -> str: ...

    @values.dataclass(slots=True)
    class Person(Named):
        name: str

        def shout(self) -> str:
            return self.name.upper()

    class Shape(abc.ABC):
        __slots__ = ()

        @abc.abstractmethod
        def area(self) -> int: ...

    @values.dataclass(slots=True)
    class Unfinished(Shape):
        side: int

    assert Person("ada").shout() == "ADA"
    with pytest.raises(TypeError, match="abstract"):
        Unfinished(1)  # type: ignore[abstract]


def test_signature_is_known_before_the_first_value_is_made() -> None:
    @values.dataclass(frozen=True, slots=True, kw_only=True)
    class Fresh:
        name: str
        count: int = 3

    assert str(inspect.signature(Fresh)) == "(*, name: 'str', count: 'int' = 3) -> None"


def test_class_of_the_standard_library_is_read_too() -> None:
    @dataclasses.dataclass(frozen=True)
    class Foreign(Version):
        patch: int = 0
        tags: list[str] = dataclasses.field(default_factory=list)

    value = values.replace(Foreign(1, 2, 3), minor=9)

    assert values.is_dataclass(Foreign)
    assert (value.major, value.minor, value.patch) == (1, 9, 3)
    assert [(each.name, each.default is values.MISSING) for each in values.fields(Foreign)] == [
        ("major", True), ("minor", False), ("patch", False), ("tags", True),
    ]  # fmt: skip


def test_what_has_no_fields_is_refused() -> None:
    assert not values.is_dataclass(3)
    with pytest.raises(TypeError, match="3 has no fields"):
        values.fields(3)  # type: ignore[arg-type]


def test_match_takes_values_apart() -> None:
    match Ratio(1, 2):
        case Ratio(top, bottom):
            assert (top, bottom) == (1, 2)
        case _:
            pytest.fail("not matched")


def imported_from(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "dataclasses"
        for name in node.names
    }


def test_package_makes_all_its_value_classes_in_one_way() -> None:
    wrong = {
        str(path.relative_to(PACKAGE)): names
        for path in PACKAGE.rglob("*.py")
        if path.name != "values.py" and (names := imported_from(path))
    }

    assert wrong == {}


def test_check_finds_a_class_made_in_the_other_way(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def f():\n    from dataclasses import dataclass\n")

    assert imported_from(tmp_path / "bad.py") == {"dataclass"}


def test_worker_starts_without_what_the_standard_library_makes_classes_with() -> None:
    code = "import sys, runtime.cli.worker, runtime.worker.worker, runtime.stack.find, runtime.queues.sqlite.queue; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True
    ).stdout

    assert set(loaded.split()) & {"dataclasses", "inspect"} == set()


def test_guardian_starts_without_typing() -> None:
    code = "import sys, runtime.worker.attempts.fork_server; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True
    ).stdout

    assert set(loaded.split()) & {"dataclasses", "inspect", "typing"} == set()
