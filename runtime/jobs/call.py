"""A call of a Python function, as a job's spec has it in place of a command."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from runtime.schema import describe

ANY_PYTHON: Final = "python3"


@dataclass(frozen=True, slots=True, kw_only=True)
class PickledFunction:
    """A function that cloudpickle packed, because no module has it."""

    function: str
    """The pickle in base64."""
    python: str
    """The minor version of Python that packed it, such as `3.11`; no other version can run it."""
    cloudpickle: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCall:
    """A Python function that runs instead of a command."""

    function: str
    """`module:name`; if the function is packed, the name that people see."""
    args: tuple[Any, ...] = ()
    """JSON values, like those of `kwargs` and `array.items`."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    run: bool = False
    """Whether the first argument is a `Run`."""
    paths: tuple[str, ...] = (".",)
    """Folders of the tree that come first on the module path."""
    folder: str = "."
    """Working directory of the function, in the tree."""
    python: str = ANY_PYTHON
    """The interpreter that calls the function."""
    pickled: PickledFunction | None = None
    packed: bool = False
    """Whether `args` is one pickle of all arguments, and each of `array.items` a pickle: `{"pickle": BASE64, "shown": {…}}`,
    where `shown` has what people see of it."""

    def __post_init__(self) -> None:
        module, colon, name = self.function.partition(":")
        if not (module and colon and name):
            raise ValueError(f"has `function` {describe(self.function)}, expected module:name")
        check_json("args", self.args)
        check_json("kwargs", self.kwargs)


def check_json(name: str, values: object) -> None:
    try:
        json.dumps(values, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise ValueError(f"has values for `{name}` that JSON does not have") from None
