"""Opens the queues and records of a stack."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.config import Durability, Settings, load_settings
from runtime.errors import InvalidValue, MissingExtra, NotPossible, UnknownName
from runtime.outputs import MissingOutput, OtherQueueOutput, PubSubQueueOutput, SqliteQueueOutput
from runtime.queues.base import DEFAULT_QUEUE

if TYPE_CHECKING:
    from runtime.queues.base import Queue
    from runtime.records.base import RecordStore
from runtime.stack.find import LOCAL, FoundStack, find_stack


def open_stack(
    name: str | None = None,
    *,
    queue: str | None = None,
    durability: Durability | None = None,
    settings: Settings | None = None,
) -> OpenStack:
    """Find the stack as `find_stack` does, and open each of its queues and its records on first use.

    `queue` is the default queue: one of the stack's, or a URL (`sqlite:/path.db#name`,
    `pubsub:projects/P/subscriptions/S?topic=T`), whose records are then the stack's records too.
    """
    settings = settings or load_settings()
    return OpenStack(find_stack(name, settings=settings), settings, queue=queue, durability=durability)


class OpenStack:
    """The queues and records of a stack; closing it closes the open ones."""

    def __init__(
        self, found: FoundStack, settings: Settings, *, queue: str | None = None, durability: Durability | None = None
    ) -> None:
        self.found = found
        self.outputs = found.outputs
        self.settings = settings
        if queue == "":
            raise InvalidValue("queue", queue, "the name of a queue", hint="leave it out for the stack's default queue")
        self.default_queue = queue or settings.queue or DEFAULT_QUEUE
        if self.default_queue not in self.outputs.queues:
            _check_name(self.default_queue)
        self._durability: Durability = durability or settings.durability
        self._queues: dict[str, Queue] = {}
        self._records: RecordStore | None = None

    @property
    def name(self) -> str:
        return self.outputs.stack

    @property
    def records(self) -> RecordStore:
        """The store that the default queue settles into."""
        if self._records is None:
            output = self.outputs.queues.get(self.default_queue)
            embedded = self.name == LOCAL or isinstance(output, SqliteQueueOutput)
            if embedded or _is_queue_url(self.default_queue):
                self._records = self.queue().records
            else:
                self._records = self._open_records(f"stack `{self.name}`")
        return self._records

    def queue(self, name: str | None = None) -> Queue:
        """Return the queue `name`, by default the default queue; the same object each time.

        Raises `UnknownName`, and `NotPossible` for a queue that has no record store beside it.
        """
        name = name or self.default_queue
        # Tasks and workers have the name of a queue, also if a URL was given for it.
        by_url = name not in self._queues and name != self.default_queue and _is_queue_url(self.default_queue)
        if by_url and (named := self.queue()).name == name:
            return named
        if name not in self._queues:
            self._queues[name] = self._open_queue(name)
        return self._queues[name]

    def existing_queue(self) -> Queue:
        """Return the default queue. Raises `UnknownName` if nobody has used it, and `NotPossible` without its file.

        A queue of an embedded file begins with its first task or with a worker that serves it.
        """
        if self.default_queue.startswith("sqlite:"):
            path = Path(self.default_queue[len("sqlite:") :].partition("#")[0]).expanduser()
            if path.name and not path.exists():
                raise NotPossible(f"there is no task file `{path}`", hint="the first `runtime submit` there makes it")
        queue = self.queue()
        known = self._find_others(queue)
        if known is not None:
            hint = f"its first task makes it: `runtime submit --queue {queue.name}`"
            raise UnknownName("queue", queue.name, known, where=f"in stack `{self.name}`", hint=hint)
        return queue

    def describe_new(self, queue: Queue, *, serving: bool = False) -> str | None:
        """Return what to say of an embedded queue that nobody has used, to notice a misspelt name; None for any other.

        `serving` if a worker is about to serve it, and not a submission to fill it.
        """
        others = self._find_others(queue)
        if others is None:
            return None
        then = f"`runtime submit --queue {queue.name}` puts tasks there"
        if not serving:
            then = f"tasks wait there for `runtime worker --queue {queue.name}`"
        return f"queue `{queue.name}` is new in stack `{self.name}`, beside {', '.join(others)}: {then}"

    def _find_others(self, queue: Queue) -> list[str] | None:
        """Return the known queues of the file if `queue` is none of them; None if it is, or does not lie in a file."""
        if queue.traits.kind != "sqlite" or queue.name == DEFAULT_QUEUE:
            return None
        from runtime.records.sqlite import SqliteRecords
        from runtime.records.transitions import list_queues

        known = {DEFAULT_QUEUE}
        if isinstance(queue.records, SqliteRecords):
            with queue.records.file.reading() as connection:
                known.update(list_queues(connection))
        if queue.name not in known:
            known |= {seen.queue for seen in queue.records.workers()}
        return None if queue.name in known else sorted(known)

    def queue_names(self) -> list[str]:
        """List the stack's queues. The local stack lists the default queue, though any name makes another."""
        return sorted(self.outputs.queues)

    @property
    def gives_secrets(self) -> bool:
        """Whether workers of the default queue have secrets to give to attempts.

        Those of a queue that a URL names have none: other people than the stack's may put tasks there.
        """
        granted = any(secret.attempts is not None for secret in self.outputs.secrets.values())
        return granted and not _is_queue_url(self.default_queue)

    def check_secrets(self, names: Sequence[str]) -> None:
        """Raise `RequestRefused` for the name of a secret that no attempt of the default queue can get."""
        from runtime.stack.secret_selection import check_named

        if _is_queue_url(self.default_queue):
            raise NotPossible(
                f"workers of queue `{self.default_queue}` give no secrets to attempts",
                facts=["it is named by its URL, and secrets belong to the queues of a stack"],
                hint="name one of the stack's queues, or let the command read the secret itself",
            )
        check_named(names, self.outputs)

    def close(self) -> None:
        queues, opened = list(self._queues.values()), self._records
        self._queues.clear()
        self._records = None
        stores = {id(queue.records): queue.records for queue in queues}
        if opened is not None:
            stores[id(opened)] = opened
        for queue in queues:
            queue.close()
        for store in stores.values():
            store.close()

    def abandon(self) -> None:
        """Abandon embedded queues in a forked child, since they are the parent's."""
        for queue in self._queues.values():
            if hasattr(queue, "abandon"):
                queue.abandon()

    def __enter__(self) -> OpenStack:
        return self

    def __exit__(self, *ended: object) -> None:
        self.close()

    def _open_queue(self, name: str) -> Queue:
        if _is_queue_url(name):
            return self._open_queue_url(name)
        output = self.outputs.queues.get(name)
        if output is None and self.name == LOCAL:
            # The embedded file makes a queue for any name.
            output = self.outputs.queues[DEFAULT_QUEUE]
        if output is None and not self.outputs.queues:
            raise MissingOutput(self.name, "queues", f"queue `{name}`")
        match output:
            case None:
                raise UnknownName("queue", name, self.outputs.queues, where=f"in stack `{self.name}`")
            case SqliteQueueOutput(path=path):
                return self._open_sqlite(Path(path), name)
            case PubSubQueueOutput():
                return self._open_pubsub(name, output, self._records or self._open_records(f"queue `{name}`"))
            case OtherQueueOutput(kind=kind):
                raise NotPossible(
                    f"queue `{name}` of stack `{self.name}` is of kind `{kind}`",
                    facts=["this release opens pubsub and sqlite queues"],
                    hint="pip install --upgrade research-runtime",
                )

    def _open_queue_url(self, url: str) -> Queue:
        kind, _, rest = url.partition(":")
        if kind == "sqlite":
            path, _, name = rest.partition("#")
            if not path or "?" in path:
                raise InvalidValue(
                    "queue",
                    url,
                    "sqlite:/path/to/file.db, or sqlite:/path/to/file.db#name",
                    hint="it takes no parameters: the records lie in the same file" if path else None,
                )
            return self._open_sqlite(Path(path).expanduser(), name or DEFAULT_QUEUE)
        from urllib.parse import parse_qsl

        subscription, _, query = rest.partition("?")
        values = dict(parse_qsl(query))
        topic = values.pop("topic", "")
        records_url = values.pop("records", None)
        parts = subscription.split("/")
        if len(parts) != 4 or parts[0] != "projects" or parts[2] != "subscriptions" or not topic or values:
            raise InvalidValue(
                "queue",
                url,
                "pubsub:projects/P/subscriptions/S?topic=T, and &records=URL where the stack has no records",
            )
        output = PubSubQueueOutput(
            topic=topic if "/" in topic else f"projects/{parts[1]}/topics/{topic}", subscription=subscription
        )
        return self._open_pubsub(parts[3], output, self._open_records(f"queue `{url}`", records_url))

    def _open_sqlite(self, path: Path, name: str) -> Queue:
        from runtime.queues.sqlite.queue import open_sqlite

        try:
            name.encode()
        except UnicodeEncodeError:
            raise InvalidValue("queue", name, "any name that is UTF-8") from None
        # A path that somebody chose may be shared on purpose.
        private = path.parent == self.settings.data_dir and self.settings.keeps_data_private
        queue, _ = open_sqlite(path, queue=name, durability=self._durability, private=private)
        return queue

    def _open_pubsub(self, name: str, output: PubSubQueueOutput, records: RecordStore) -> Queue:
        try:
            from runtime.queues.pubsub.queue import PubSubQueue
        except ModuleNotFoundError as problem:
            if (problem.name or "").startswith("google"):
                raise MissingExtra(f"queue `{name}` on Pub/Sub", "gcp") from problem
            raise
        self._records = records
        return PubSubQueue(output, records, name=name)

    def _open_records(self, needed_by: str, url: str | None = None) -> RecordStore:
        """Open a folder or bucket; a queue elsewhere cannot settle into an embedded file."""
        url = url or (self.outputs.records.url if self.outputs.records else None)
        if url is None and self.name != LOCAL:
            raise MissingOutput(self.name, "records", needed_by)
        if url is None or url.startswith("sqlite:"):
            problem = "exports no `records`" if url is None else "keeps its records in an embedded file"
            raise NotPossible(
                f"stack `{self.name}` {problem}, and {needed_by} needs a folder or bucket for them",
                facts=["the queue only delivers; what became of each task lies in the record store"],
                hint=f"run `pulumi up --stack {self.name}` with a record bucket"
                if self.name != LOCAL
                else "add `&records=gs://BUCKET/PATH` or `&records=file:/FOLDER` to the queue's URL",
            )
        from runtime.records import open_records

        return open_records(url)


def _check_name(name: str) -> None:
    """Refuse a name that is a misspelt URL: in the local stack any name makes a queue, which nobody would serve."""
    if _is_queue_url(name) or not (":" in name or "/" in name):
        return
    import difflib

    kind, colon, rest = name.partition(":")
    near = difflib.get_close_matches(kind.lower(), _KINDS, n=1) if colon else []
    meant = f"{near[0]}:{rest.removeprefix('//')}" if near else f"sqlite:{name}" if name.endswith(".db") else None
    raise InvalidValue(
        "queue",
        name,
        "a name without `:` and `/`, or a URL: sqlite:/path/to/file.db#name, pubsub:projects/P/subscriptions/S?topic=T",
        hint=f"did you mean `{meant}`?" if meant else None,
    )


_KINDS = ("sqlite", "pubsub")


def _is_queue_url(text: str) -> bool:
    return text.startswith(tuple(f"{kind}:" for kind in _KINDS))
