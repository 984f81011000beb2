"""The failures we explain: each has a type, the facts, and a next step.

RuntimeFailure                      printed by the command line; `exit_code`, `facts`, `hint`
├── RequestRefused        exit 2    the request is wrong, or refused for a reason we can name
│   ├── UnknownName                 no such stack, queue, workflow …; lists the known ones
│   ├── InvalidValue                a duration, size, range or option that cannot be read
│   ├── InvalidTask                 a task that cannot be parsed; goes to the dead letters
│   ├── InvalidRecord               something that no record can hold; nothing was written
│   ├── InvalidContract             a stack's contract that this release cannot use
│   ├── MissingExtra                a library of an extra that is not installed
│   ├── Untrusted                   a file that others made or can write, which decides what runs or where it goes
│   └── NotPossible                 a state or a backend rules it out
│       └── PartTaken               other tasks were submitted at that place of the experiment
├── WorkFailed            exit 1    the work itself failed
└── InfrastructureFailure exit 3    a service, disk or network failed; `retryable` if another try may help
    ├── QueueUnavailable
    ├── StoreUnavailable
    │   ├── ObjectGone              one object that is not there
    │   └── StoreBroken             a task file that is damaged, replaced or gone: no retry can help
    └── StoreUnsafe                 a store that broke its promise, such as create-only
        └── ObjectDamaged           one object that was changed after it was written
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

MOST_LETTERS = 4_000
"""A longer line of an error is shown without its middle."""


class RuntimeFailure(Exception):
    """Base of everything the command line explains instead of showing a traceback."""

    exit_code = 3
    retryable = False

    def __init__(self, message: str, *, facts: Iterable[str] = (), hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        """The action that failed, naming the thing in backticks; lower case, no full stop."""
        self.facts = tuple(facts)
        """Facts seen, values expected or allowed, things left behind; a line each."""
        self.hint = hint
        """The next command or edit."""
        self._added: tuple[str, ...] = ()

    @property
    def __notes__(self) -> list[str]:  # type: ignore[override]  # Python reads it and never assigns it
        """What Python prints below an uncaught one: facts and hint as they are by then, and the notes of others."""
        hint = [f"hint: {self.hint}"] if self.hint else []
        return [*(f"  {fact}" for fact in self.facts), *hint, *self._added]

    def add_note(self, note: str) -> None:
        self._added = (*self._added, note)

    def render(self) -> str:
        """The text that goes to stderr, readable without colour. A newline in a part of it begins no other part."""
        lines = [f"error: {self.message}", *(f"  {fact}" for fact in self.facts)]
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(_cut(line).replace("\n", "\n  ") for line in lines)


def _cut(line: str) -> str:
    """Return `line` without its middle if it repeats a very long argument, so that the hint stays in sight."""
    if len(line) <= MOST_LETTERS:
        return line
    half = MOST_LETTERS // 2
    return f"{line[:half]} [{len(line) - 2 * half} more letters] {line[-half:]}"


def explain_briefly(problem: BaseException) -> str:
    """Its first line, without facts and hint."""
    return problem.message if isinstance(problem, RuntimeFailure) else f"{type(problem).__name__}: {problem}"


class RequestRefused(RuntimeFailure):
    exit_code = 2


class UnknownName(RequestRefused):
    """`kind` has no member called `name`; the text lists the known ones and the nearest."""

    def __init__(self, kind: str, name: str, known: Iterable[str], *, where: str = "", hint: str | None = None) -> None:
        self.kind, self.name, self.known = kind, name, sorted(known)
        import difflib

        nearest = difflib.get_close_matches(name, self.known, n=1)
        shown = ", ".join(self.known[:20]) + (f", and {len(self.known) - 20} more" if len(self.known) > 20 else "")
        super().__init__(
            f"no {kind} named `{name}`" + (f" {where}" if where else ""),
            facts=[f"known {kind}s: {shown or 'none'}"],
            hint=f"did you mean `{nearest[0]}`?" if nearest else hint,
        )


class InvalidValue(RequestRefused):
    """A value that cannot be read; `allowed` describes valid ones."""

    def __init__(self, field: str, value: object, allowed: str, *, hint: str | None = None) -> None:
        self.field, self.value, self.allowed = field, value, allowed
        super().__init__(f"`{value}` is no valid {field}", facts=[f"allowed: {allowed}"], hint=hint)


class InvalidTask(RequestRefused):
    """A task that cannot be parsed. `field` is the path of the problem, `line` its place in the input."""

    def __init__(self, field: str, problem: str, *, line: int | None = None, hint: str | None = None) -> None:
        self.field, self.problem, self.line = field, problem, line
        place = f" on line {line}" if line is not None else ""
        super().__init__(
            f"task{place} is malformed: `{field}` {problem}",
            hint=hint or "docs/task-format.md has every field with an example",
        )


class InvalidRecord(RequestRefused):
    """`field` holds a value that no record can hold, in any store; nothing was written."""

    def __init__(self, field: str, problem: BaseException) -> None:
        self.field, self.problem = field, explain_json(problem)
        super().__init__(
            f"`{field}` cannot be recorded: {self.problem}",
            facts=["nothing was written"],
            hint="record plain numbers, texts, lists and dicts, and write the rest to the output folder",
        )


def explain_json(problem: BaseException) -> str:
    """Python's reason why it can neither write nor read JSON, without its advice, which would only move the trouble."""
    if isinstance(problem, RecursionError):
        return "it is nested too deeply"
    said = str(problem)
    return "it holds a whole number of thousands of digits; pass it as text" if "max_str_digits" in said else said


class InvalidContract(RequestRefused):
    pass


class MissingExtra(RequestRefused):
    """`what` needs the library of the extra `extra`, which is not installed."""

    def __init__(self, what: str, extra: str) -> None:
        self.what, self.extra = what, extra
        super().__init__(
            f"{what} needs an extra that is not installed", hint=f"pip install 'research-runtime[{extra}]'"
        )


class NotPossible(RequestRefused):
    pass


class PartTaken(NotPossible):
    """Part `index` of the experiment's manifest lists other tasks; nothing was written."""

    def __init__(self, experiment: str, index: int) -> None:
        self.experiment, self.index = experiment, index
        super().__init__(
            f"part {index} of experiment `{experiment}` lists other tasks",
            facts=["the tasks differ from those that were submitted there before", "nothing was submitted"],
            hint="submit the unchanged file again, or choose another name with `--experiment`",
        )


class Untrusted(RequestRefused):
    """A file that chooses code or destinations, and that other users made or can write. It was not used.

    `trust` is the setting that has it believed, `instead` the way on without it.
    """

    def __init__(self, path: str, *, why: str, owner: str, mode: str, trust: str, instead: str) -> None:
        self.path, self.owner, self.trust = path, owner, trust
        super().__init__(
            f"`{path}` is not used: {'it ' if why[0] != '`' else ''}{why}",
            facts=[f"owner {owner}, mode {mode}", "whoever can write it decides what your commands run, and where"],
            hint=f"if you trust all who can write there, set {trust}; else {instead}",
        )


class WorkFailed(RuntimeFailure):
    exit_code = 1


class InfrastructureFailure(RuntimeFailure):
    """A service, a disk or the network failed."""

    def __init__(
        self,
        message: str,
        *,
        facts: Iterable[str] = (),
        hint: str | None = None,
        retryable: bool = True,
        denied: bool = False,
    ) -> None:
        """`denied` if we lack a permission: no try helps until somebody grants it, and it is nobody's task's fault."""
        super().__init__(message, facts=facts, hint=hint)
        self.retryable, self.denied = retryable and not denied, denied


def may_pass(problem: Exception) -> bool:
    """Whether another try may help."""
    return isinstance(problem, InfrastructureFailure) and problem.retryable


class QueueUnavailable(InfrastructureFailure):
    pass


class StoreUnavailable(InfrastructureFailure):
    pass


class ObjectGone(StoreUnavailable):
    """A store answers that it has no such object; asking again would not help."""

    def __init__(self, url: str, *, store: str = "") -> None:
        if store:
            message, hint = f"`{url}` is not in record store `{store}`", "was it removed, or written to another store?"
        else:
            message, hint = f"`{url}` is gone", None
        super().__init__(message, hint=hint, retryable=False)


class StoreBroken(StoreUnavailable):
    """The file under a store is damaged, was replaced or is gone: nothing can be read or written until a person acts."""

    def __init__(self, message: str, *, facts: Iterable[str] = (), hint: str | None = None) -> None:
        super().__init__(message, facts=facts, hint=hint, retryable=False)


class StoreUnsafe(InfrastructureFailure):
    pass


class ObjectDamaged(StoreUnsafe):
    """One object of a store cannot be understood; it was changed after it was written."""

    def __init__(self, where: str, problem: object) -> None:
        super().__init__(
            f"`{where}` cannot be read: {problem}",
            facts=["it was changed or damaged after it was written; what it said is unknown"],
            hint="move it out of the store to go on without it",
            retryable=False,
        )


LOST_FOR_GOOD: Final = (ObjectGone, ObjectDamaged)
"""What is wrong with one object. Any other failure is the store's, however final it sounds: one that refuses us may take us
again in a minute, and says nothing about a task."""
