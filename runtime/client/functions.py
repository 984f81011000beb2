"""Functions as jobs and tasks take them: by the name of their module, or packed where no module has them.

A function at the top level of a module goes by its name, and its code with the snapshot. A lambda, a closure, and what a
script or a notebook defines are packed by cloudpickle, which another minor version of Python cannot run. Arguments are JSON
where JSON gives them back as they are, and a pickle otherwise.
"""

from __future__ import annotations

import base64
import inspect
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from runtime.client.params import SHOWN, show_params
from runtime.client.pickler import dumps
from runtime.client.tasks.build import is_importable
from runtime.errors import RequestRefused
from runtime.jobs.call import FunctionCall, PickledFunction
from runtime.shim.call import dump, is_json
from runtime.units import format_size

MOST_BYTES: Final = 32 << 20
"""Limit for a packed function, and for the arguments of a call."""


def name_function(function: Callable[..., Any]) -> str:
    """Return `module:name` of a callable, whether or not the module has it under that name."""
    inner = function
    while (wrapped := getattr(inner, "func", None)) is not None and callable(wrapped):  # a partial's
        inner = wrapped
    name = getattr(inner, "__qualname__", None) or type(inner).__qualname__
    return f"{getattr(inner, '__module__', None) or type(inner).__module__}:{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedFunction:
    """A function by its name, or packed."""

    name: str
    pickled: PickledFunction | None = None


def pack_function(function: Callable[..., Any]) -> PackedFunction:
    """Raises `RequestRefused` for a callable that no other process could call."""
    name = name_function(function)
    check_returns_value(function)
    if is_importable(function):
        return PackedFunction(name=name)
    import cloudpickle  # type: ignore[import-untyped]

    try:
        packed = dumps(function)
    except Exception as problem:
        raise RequestRefused(
            f"`{name}` cannot be packed: {_text(problem)}",
            hint="let the function open connections, files and locks itself, rather than find them around it",
        ) from problem
    text = _in_base64(packed, f"`{name}` with all that it refers to")
    python = ".".join(platform.python_version_tuple()[:2])
    return PackedFunction(
        name=name, pickled=PickledFunction(function=text, python=python, cloudpickle=cloudpickle.__version__)
    )


def check_returns_value(function: Callable[..., Any]) -> None:
    """Raise `RequestRefused` for a coroutine function or a generator function."""
    if kind := _why_no_value(function):
        raise RequestRefused(
            f"`{name_function(function)}` cannot be called for its value: it {kind}, and a call returns one value",
            hint="call it in a function that returns the result, such as `lambda x: asyncio.run(fn(x))` or `lambda x: list(fn(x))`",
        )


def _why_no_value(function: Callable[..., Any]) -> str | None:
    inner = function if inspect.isroutine(function) else getattr(function, "func", type(function).__call__)
    if inspect.iscoroutinefunction(inner):
        return "is a coroutine function"
    if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        return "is a generator function"
    return None


def pack_value(value: object, what: str) -> str:
    """Return a value as a pickle in base64; `what` names it in errors."""
    try:
        import cloudpickle  # noqa: F401
    except ImportError:
        pack = dump
    else:
        # It takes classes of a script along, which the standard library only names.
        pack = dumps
    try:
        packed = pack(value)
    except Exception as problem:
        raise RequestRefused(
            f"{what} cannot be packed: {_text(problem)}", hint="pass a path or an id, and load the rest in the function"
        ) from problem
    return _in_base64(packed, what)


def _in_base64(packed: bytes, what: str) -> str:
    if len(packed) > MOST_BYTES:
        raise RequestRefused(
            f"{what} is {format_size(len(packed))} when packed, and the most is {format_size(MOST_BYTES)}",
            hint="write large data to a file or a bucket, and pass its name",
        )
    return base64.b64encode(packed).decode("ascii")


def _text(problem: Exception) -> str:
    return f"{type(problem).__name__}: {problem}".partition("\n")[0]


def make_call(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    items: Iterable[Any] | None = None,
    run: bool = False,
    folder: Path | None = None,
) -> tuple[FunctionCall, tuple[Any, ...]]:
    """Pack a call, and the first arguments of its runs if it has `items`. `folder` is the tree that goes along.

    Raises like `pack_function`.
    """
    packed = pack_function(function)
    every: tuple[Any, ...] = () if items is None else tuple(items)
    args, kwargs = tuple(args), dict(kwargs or {})
    plain = is_json([list(args), kwargs, list(every)])
    if not plain:
        every = tuple(
            _shown(pack_value(each, f"item {number} of `{packed.name}`"), [each]) for number, each in enumerate(every)
        )
        args, kwargs = (_shown(pack_value((args, kwargs), f"what `{packed.name}` is called with"), args, kwargs),), {}
    call = FunctionCall(
        function=packed.name,
        args=args,
        kwargs=kwargs,
        run=run,
        paths=import_paths(folder) if folder else (".",),
        folder=_place_in(folder, Path.cwd()) if folder else ".",
        pickled=packed.pickled,
        packed=not plain,
    )
    return call, every


def _shown(packed: str, args: Sequence[Any], kwargs: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """A pickle, and what people see of it."""
    return {"pickle": packed, SHOWN: show_params(args, kwargs)}


def import_paths(folder: Path) -> tuple[str, ...]:
    """The folders in `folder` from which this process imports modules, relative to it."""
    root, found = folder.resolve(), ["."]
    for each in sys.path:
        path = Path(each or ".").resolve()
        if path.is_relative_to(root) and path.is_dir() and "site-packages" not in path.parts:
            found.append(path.relative_to(root).as_posix())
    return tuple(dict.fromkeys(found))


def _place_in(folder: Path, here: Path) -> str:
    root = folder.resolve()
    return here.relative_to(root).as_posix() if here.is_relative_to(root) else "."
