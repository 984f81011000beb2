"""The secrets that a worker gives to attempts: read with the worker's own identity, and kept in its memory for minutes.

A value is in this cache, in the orders of attempts on their way to a child, and in that attempt's environment. It is in no
file, argument, log, record or error, and not in the worker's own environment. Only workers of stacks that grant them
secrets import this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, TypeAlias

from runtime.clock import Clock, SystemClock
from runtime.errors import InfrastructureFailure, InvalidContract, NotPossible, RequestRefused, RuntimeFailure, may_pass
from runtime.outputs import StackOutputs
from runtime.stack.secret_reader import decode_value, read_newest
from runtime.stack.secret_selection import NotGranted, check_named, choose, find_granted
from runtime.worker.thread_calls import ThreadCalls

LIFETIME_S: Final = 300.0
"""Time after which values are read again. A new version reaches new attempts within it, and so does a withdrawn grant."""
REFUSED_FOR_S: Final = 60.0
"""Time after which a refusal is tried again. Google's grants take effect within minutes."""
FAILED_FOR_S: Final = 10.0
"""The same for a service that did not answer."""

Values: TypeAlias = Mapping[str, str]
"""Values by variable. A value in the cache is never changed."""


class AttemptSecrets:
    """The cache, by sets of names. All methods belong to the worker's loop; reading happens on a thread of its own."""

    def __init__(
        self,
        outputs: StackOutputs,
        *,
        server: str | None = None,
        find_outputs: Callable[[], StackOutputs] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`server` stands in for Google; `find_outputs` reads the contract again, which may have more secrets by then."""
        self._outputs, self._granted = outputs, find_granted(outputs)
        self._server, self._find_outputs = server, find_outputs
        self._clock = clock or SystemClock()
        self._looked_at = float("-inf")
        """When the contract was read again."""
        self._kept: dict[tuple[str, ...], tuple[Values | RuntimeFailure, float]] = {}
        """Values, or the reason why they cannot be read, and the boot time until which this holds."""
        self.calls = ThreadCalls(inline=False, threads=1)

    def choose(self, named: Sequence[str] | None) -> tuple[str, ...]:
        """Return the names of a task's secrets; None stands for the stack's default."""
        return choose(named, self._granted)

    def find(self, names: tuple[str, ...]) -> Values | RuntimeFailure | None:
        """Return the values, or the reason why they cannot be read; None if they have to be fetched."""
        kept = self._kept.get(names)
        return kept[0] if kept is not None and self._clock.boottime() < kept[1] else None

    def fetch(self, names: tuple[str, ...], then: Callable[[Values | RuntimeFailure], None]) -> None:
        """Read the values; `then` gets what `find` returns from now on, on the loop's thread."""
        asked_at = self._clock.boottime()
        self.calls.call(
            partial(self._read, names),
            lambda values, problem: then(self._keep(names, values, problem, asked_at)),
        )

    def read(self, name: str) -> str:
        """Read the value of one secret now, on any thread. Raises `RuntimeFailure`, whose text has no value."""
        try:
            return next(iter(self._read((name,)).values()))
        except Exception as problem:
            raise _without_values(problem, (name,)) from None

    def close(self) -> None:
        """Forget all values. A call that hangs is not waited for."""
        self._kept.clear()
        self.calls.close(wait=False)

    def _keep(
        self, names: tuple[str, ...], values: Values | None, problem: Exception | None, asked_at: float
    ) -> Values | RuntimeFailure:
        now = self._clock.boottime()
        self._kept = {each: kept for each, kept in self._kept.items() if now < kept[1]}
        if values is not None:
            # From the question on: a version that is added before the answer must not wait for longer.
            self._kept[names] = values, asked_at + LIFETIME_S
            return values
        failure = _without_values(problem, names)
        self._kept[names] = failure, now + (FAILED_FOR_S if may_pass(failure) else REFUSED_FOR_S)
        return failure

    def _read(self, names: tuple[str, ...]) -> Values:
        from runtime.stack.google_api import GoogleApi
        from runtime.stack.secrets import find_secret

        if any(name not in self._granted for name in names):
            self._poll_again()
        outputs = self._outputs
        try:
            check_named(names, outputs)
        except InvalidContract:
            raise
        except RequestRefused as refusal:
            raise NotGranted(refusal) from None
        values: dict[str, str] = {}
        # The loop tries again, with pauses.
        with GoogleApi(server=self._server, again=False) as api:
            for name in names:
                secret = find_secret(outputs, name)
                value = read_newest(name, secret, outputs.stack, api)
                if not value:
                    raise NotPossible(
                        f"secret `{name}` of stack `{outputs.stack}` is empty",
                        hint=f"runtime secrets put {name} --stack {outputs.stack}",
                    )
                hint = f"keep it encoded, such as with base64: runtime secrets put {name} --stack {outputs.stack}"
                values[secret.env] = decode_value(value, name, secret.resource, hint=hint)
        return values

    def _poll_again(self) -> None:
        """Read the contract again, at most once a minute: the stack may have got secrets since this worker started."""
        now = self._clock.boottime()
        if self._find_outputs is not None and now >= self._looked_at + REFUSED_FOR_S:
            outputs = self._find_outputs()
            self._outputs, self._granted, self._looked_at = outputs, find_granted(outputs), now


def _without_values(problem: Exception | None, names: Sequence[str]) -> RuntimeFailure:
    """Return a failure whose text and frames hold no value."""
    if not isinstance(problem, RuntimeFailure):
        # The text of an error that nobody foresaw may quote anything.
        those = ", ".join(f"`{name}`" for name in names)
        return InfrastructureFailure(f"cannot read the secrets {those}: {type(problem).__name__}", hint="try again")
    problem.__traceback__ = problem.__cause__ = problem.__context__ = None
    return problem
