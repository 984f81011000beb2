"""`dataclass` for classes of values, with methods that are made when they are first needed.

The standard library compiles up to six functions for each class when its module loads, and a command uses few of the
classes that it loads. Here `__init__` is compiled when a class makes its first value, and the other methods are functions
that all classes share. From outside there is no difference: a type checker sees the standard library's decorator;
`dataclasses.fields`, `replace` and `asdict` take these classes; values compare, hash, print and pickle as its values do.
Less can be asked for: classes have slots, and what no class here uses is no argument of `dataclass` or `field`.
`docs/decisions/value-classes.md` has the figures.
"""

from __future__ import annotations

import operator
from types import MethodType
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from collections.abc import Callable

_FIELDS: Final = "__value_fields__"


class _Missing:
    def __repr__(self) -> str:
        return "MISSING"


_MISSING: Final = _Missing()


class _Field:
    """The facts about one field, under the names of `dataclasses.Field`."""

    __slots__ = ("compare", "default", "default_factory", "init", "kw_only", "name", "repr", "type")

    def __init__(
        self, *, default: Any = _MISSING, default_factory: Any = _MISSING, repr: bool = True, compare: bool = True
    ) -> None:
        self.default, self.default_factory, self.repr, self.compare = default, default_factory, repr, compare
        self.name: str = ""
        self.type: Any = ""
        self.init: Any = True
        self.kw_only: Any = False


def _fields(value: Any) -> tuple[_Field, ...]:
    for cls in (value if isinstance(value, type) else type(value)).__mro__:
        if (found := cls.__dict__.get(_FIELDS)) is not None:
            return cast("tuple[_Field, ...]", found)
        if "__dataclass_fields__" in cls.__dict__:
            return _foreign_fields(cls)
    raise TypeError(f"{value!r} has no fields")


def _foreign_fields(cls: type) -> tuple[_Field, ...]:
    """Fields of a class that the standard library made, such as a third-party launcher's."""
    import dataclasses

    found = []
    for each in dataclasses.fields(cls):
        default, make = (_MISSING if it is dataclasses.MISSING else it for it in (each.default, each.default_factory))
        same = _Field(default=default, default_factory=make, repr=each.repr, compare=each.compare)
        same.name, same.type, same.init, same.kw_only = each.name, each.type, each.init, each.kw_only
        found.append(same)
    return tuple(found)


def _is_dataclass(value: Any) -> bool:
    return hasattr(value, _FIELDS) or hasattr(value, "__dataclass_fields__")


def _replace(value: Any, /, **changes: Any) -> Any:
    for each in _fields(value):
        if each.name not in changes:
            changes[each.name] = getattr(value, each.name)
    return type(value)(**changes)


def _dataclass(
    *, slots: bool, frozen: bool = False, kw_only: bool = False, eq: bool = True, order: bool = False
) -> Callable[[type], type]:
    if not slots:
        raise TypeError("a value class has slots")
    return lambda cls: _define(cls, frozen=frozen, kw_only=kw_only, eq=eq, order=order)


def _define(cls: type, *, frozen: bool, kw_only: bool, eq: bool, order: bool) -> type:
    """The class once more: slots have to be there when a class is made."""
    body = {name: found for name, found in cls.__dict__.items() if name not in ("__dict__", "__weakref__")}
    own = [
        _read_field(name, kind, body, kw_only)
        for name, kind in cls.__annotations__.items()
        if not kind.removeprefix("typing.").startswith("ClassVar")
    ]
    inherited = {each.name: each for base in reversed(cls.__mro__[1:]) for each in base.__dict__.get(_FIELDS, ())}
    every = {**inherited, **{each.name: each for each in own}}
    body[_FIELDS] = tuple(every.values())
    body["__slots__"] = tuple(each.name for each in own if each.name not in inherited)
    body["__match_args__"] = tuple(each.name for each in every.values() if not each.kw_only)
    body |= _STANDARD
    body.setdefault("__repr__", _repr)
    if eq:
        key = _key([each.name for each in every.values() if each.compare])
        _add_comparisons(body, key, frozen=frozen, order=order)
    if frozen:
        body |= {"__setattr__": _refuse_change, "__delattr__": _refuse_removal}
        body |= {"__getstate__": _state, "__setstate__": _set_state}
    body.setdefault("__init__", _Init())
    made = type(cls)(cls.__name__, cls.__bases__, body)
    made.__qualname__ = cls.__qualname__
    return made


def _read_field(name: str, kind: str, body: dict[str, Any], kw_only: bool) -> _Field:
    default = body.pop(name, _MISSING)
    found = default if isinstance(default, _Field) else _Field(default=default)
    if found.default.__class__.__hash__ is None:
        raise ValueError(f"all values would share the default of `{name}`, which can change: use `default_factory`")
    found.name, found.type, found.kw_only = name, kind, kw_only
    return found


# what every class has in common


class _Init:
    """`__init__`, which takes its own place in the class when somebody looks it up first."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.owner: Any = owner

    def __get__(self, value: object, cls: type | None = None) -> Any:
        self.owner.__init__ = init = _compile_init(self.owner)
        return init if value is None else MethodType(init, value)


def _compile_init(cls: Any) -> Callable[..., None]:
    frozen = cls.__setattr__ is _refuse_change
    scope: dict[str, Any] = {"_MISSING": _MISSING, "__name__": cls.__module__}
    taken: list[str] = []
    values: dict[str, str] = {}
    # Python wants positional parameters first.
    for each in sorted(_fields(cls), key=lambda each: each.kw_only):
        name = value = each.name
        if each.kw_only and "*" not in taken:
            taken.append("*")
        if each.default_factory is not _MISSING:
            scope[f"_make_{name}"] = each.default_factory
            taken.append(f"{name}=_MISSING")
            value = f"_make_{name}() if {name} is _MISSING else {name}"
        elif each.default is not _MISSING:
            scope[f"_default_{name}"] = each.default
            taken.append(f"{name}=_default_{name}")
        else:
            taken.append(name)
        values[name] = value
    lines = [f"self.{name} = {value}" for name, value in values.items()]
    if frozen and len(values) < _MANY:
        # The slot's own setter: a frozen class refuses assignments, and `object.__setattr__` takes twice as long.
        scope |= {f"_set_{name}": getattr(cls, name).__set__ for name in values}
        lines = [f"_set_{name}(self, {value})" for name, value in values.items()]
    elif frozen:
        # An assignment takes a twentieth of that, so the value is of an open class meanwhile. A value of a class that
        # derives from this one cannot be: it may have a `__dict__`, which no value of the open class has.
        scope |= {"_own": cls, "_open": _make_open(cls), "_set_class": _set_class, "_set_state": _set_state}
        state = ", ".join(values[each.name] for each in _fields(cls))
        quickly = ["_set_class(self, _open)", *lines, "self.__class__ = _own"]
        lines = [f"if type(self) is not _own: _set_state(self, [{state}])", "else:", *(f" {line}" for line in quickly)]
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    body = "\n ".join(lines or ["pass"])
    exec(f"def __init__(self, {', '.join(taken)}):\n {body}\n", scope)
    init: Callable[..., None] = scope["__init__"]
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    init.__annotations__ = {each.name: each.type for each in _fields(cls)} | {"return": None}
    return init


_MANY: Final = 10
"""Fields. With fewer, making an open class (0.3 million instructions) pays for nobody but who makes very many values."""
_set_class: Final = object.__dict__["__class__"].__set__


def _make_open(cls: type) -> type:
    """A class with the same slots that takes assignments."""
    ways = {name: getattr(object, name) for name in ("__setattr__", "__delattr__")}
    return type(cls)(cls.__name__, cls.__bases__, {"__slots__": cls.__dict__["__slots__"], **ways})


def _repr(self: Any) -> str:
    said = ", ".join(f"{each.name}={getattr(self, each.name)!r}" for each in _fields(self) if each.repr)
    return f"{type(self).__qualname__}({said})"


def _key(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)


def _add_comparisons(body: dict[str, Any], key: Callable[[Any], Any], *, frozen: bool, order: bool) -> None:
    def comparison(compare: Callable[[Any, Any], Any]) -> Callable[[Any, object], Any]:
        return lambda self, other: (
            compare(key(self), key(other)) if other.__class__ is self.__class__ else NotImplemented
        )

    # A class that defines `__eq__` alone has None here, which Python put there.
    if body.get("__hash__") is None:
        body["__hash__"] = (lambda self: hash(key(self))) if frozen else None
    body.setdefault("__eq__", comparison(operator.eq))
    if order:
        body |= {
            f"__{each.__name__}__": comparison(each) for each in (operator.lt, operator.le, operator.gt, operator.ge)
        }


def _refuse_change(self: object, name: str, value: object) -> None:
    from dataclasses import FrozenInstanceError

    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_removal(self: object, name: str) -> None:
    from dataclasses import FrozenInstanceError

    raise FrozenInstanceError(f"cannot delete field {name!r}")


def _state(self: Any) -> list[Any]:
    return [getattr(self, each.name) for each in _fields(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    for each, value in zip(_fields(self), state, strict=True):
        object.__setattr__(self, each.name, value)


# what only the standard library asks for


class _Standard:
    """An attribute of the same class as the standard library would have made it, made when somebody looks."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, value: object, cls: Any) -> Any:
        import dataclasses

        names: dict[str, Any] = {"__annotations__": {each.name: each.type for each in _fields(cls)}}
        for each in _fields(cls):
            given = {key: getattr(each, key) for key in ("default", "default_factory")}
            given = {key: found for key, found in given.items() if found is not _MISSING}
            names[each.name] = dataclasses.field(**given, repr=each.repr, compare=each.compare, kw_only=each.kw_only)
        frozen = cls.__setattr__ is _refuse_change
        twin = type(cls.__name__, (), names)
        return getattr(dataclasses.dataclass(init=False, repr=False, eq=False, frozen=frozen)(twin), self.name)


_STANDARD: Final = {
    "__dataclass_fields__": _Standard("__dataclass_fields__"),
    "__dataclass_params__": _Standard("__dataclass_params__"),
    "__replace__": _replace,
}


def encode(value: object) -> object:
    """Encode a value that the standard JSON encoder lacks; for `json.dumps(default=encode)`."""
    from datetime import datetime, timedelta
    from enum import Enum
    from pathlib import PurePath

    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, datetime):
        from runtime.units import format_time

        return format_time(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"no JSON for {type(value).__name__}")


if TYPE_CHECKING:
    from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
else:
    MISSING, dataclass, field, fields = _MISSING, _dataclass, _Field, _fields
    is_dataclass, replace = _is_dataclass, _replace

__all__ = ["MISSING", "dataclass", "encode", "field", "fields", "is_dataclass", "replace"]
