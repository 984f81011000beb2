"""`run_worker`: a worker of a stack's queue, or of an open one, as `runtime worker` runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.clock import Clock
from runtime.config import Durability
from runtime.queues.base import Queue
from runtime.stack.open import OpenStack, open_stack
from runtime.worker.options import WorkerOptions, WorkerResult
from runtime.worker.worker import Worker
from runtime.worker.worker_log import WorkerLog

if TYPE_CHECKING:
    from runtime.worker.secrets import AttemptSecrets


def run_worker(
    queue: str | Queue | None = None,
    options: WorkerOptions | None = None,
    *,
    stack: str | None = None,
    durability: Durability | None = None,
    reporter: WorkerLog | None = None,
    clock: Clock | None = None,
    secrets: AttemptSecrets | None = None,
) -> WorkerResult:
    """Serve a queue in this thread until it is drained or asked to stop, as `runtime worker` does.

    `queue` is a name or a URL as for `submit`, the stack's default queue if None, or an open queue, whose attempts get no
    secrets without `secrets`, which is closed at the end.
    """
    if queue is not None and not isinstance(queue, str):
        return Worker(queue, options, clock=clock, reporter=reporter, secrets=secrets).run()
    with open_stack(stack, queue=queue, durability=durability) as opened:
        served = opened.queue()
        new = opened.describe_new(served, serving=True)
        if new and reporter is not None:
            reporter.serving_new_queue(new)
        given = secrets or _secrets_of(opened)
        return Worker(served, options, clock=clock, reporter=reporter, secrets=given).run()


def _secrets_of(stack: OpenStack) -> AttemptSecrets | None:
    if not stack.gives_secrets:
        return None
    from runtime.stack.find import is_location, pull_stack
    from runtime.worker.secrets import AttemptSecrets

    source = stack.found.source if is_location(stack.found.source) else stack.name
    return AttemptSecrets(
        stack.outputs,
        server=stack.settings.google_api,
        find_outputs=lambda: pull_stack(source, settings=stack.settings).outputs,
    )
