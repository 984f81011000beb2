"""StackOutputs: the typed, versioned contract between a Pulumi stack and the runtime.

A stack exports one object named `contract`; this module is its only definition and both sides use it. It holds
references, never a secret's value. Keys that this release does not know are ignored, so a stack may add keys
without a new `schema`; another `schema` is refused, with the release that reads it.

A published copy is the same object with one more key, `published`: the digest of the rest, the commit that it was made
from, and when. So every reader of contracts reads published ones too.
"""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import datetime
from typing import Any, ClassVar, Final, TypeAlias

from runtime.errors import InvalidContract, NotPossible, RequestRefused
from runtime.schema import UNREADABLE, Reader, join
from runtime.units import format_time, parse_time

SCHEMA: Final = 1
NEEDS_RUNTIME: Final = "0.1"
"""The first release that reads this `SCHEMA`. Every contract carries it, so that older releases can name it; raise it
together with `SCHEMA`."""
OUTPUT_NAME: Final = "contract"
"""Name of the stack output that holds the contract."""
PROJECT_ID: Final = re.compile(r"[a-z][a-z0-9-]{4,28}[a-z0-9]|[a-z0-9-]+(?:\.[a-z0-9-]+)+:[a-z][a-z0-9-]{0,28}[a-z0-9]")
"""Projects of before 2018 may be a domain's, `example.com:lab`."""
NO_DIGEST: Final = "sha256:" + "0" * 64
"""What an `image` has until one is pushed."""
PUBLISHED: Final = "published"
"""The key that only a published copy has."""
_HIDDEN: Final = "[secret]"
"""Text that `pulumi stack output` prints in the place of a secret value."""
_MARKED: Final = "4dabf18193072939515e22adb298388d"
"""The key by which Pulumi marks an object that holds a secret, encrypted or plain."""
_DEEPEST: Final = 64


def image_path(project: str) -> str:
    """Return a project as addresses of images have it."""
    return project.replace(":", "/")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsOutput:
    url: str
    """`gs://…`, `s3://…`, `file:/…` or `sqlite:/…`"""
    location: str | None = None
    """Where a bucket is: a region such as `us-central2`, or a larger place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketOutput:
    url: str
    """`gs://BUCKET`"""
    location: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PubSubQueueOutput:
    topic: str
    """`projects/P/topics/T`"""
    subscription: str
    """`projects/P/subscriptions/S`"""
    ack_deadline_s: int = 60
    dead_letter_topic: str | None = None
    dead_letter_subscription: str | None = None
    max_delivery_attempts: int | None = None
    retention_s: int | None = None
    """How long the service keeps a message that nobody has taken."""
    exactly_once: bool | None = None
    kind: str = "pubsub"


@dataclass(frozen=True, slots=True, kw_only=True)
class SqliteQueueOutput:
    """A queue in an embedded file, which holds its records too."""

    path: str
    kind: str = "sqlite"


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherQueueOutput:
    """A queue of a kind that this release does not know; refused only when it is opened."""

    kind: str
    values: Mapping[str, Any] = field(default_factory=dict)


QueueOutput: TypeAlias = PubSubQueueOutput | SqliteQueueOutput | OtherQueueOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryOutput:
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretOutput:
    """A secret's place and the variable that carries it; its value is never here."""

    resource: str
    env: str
    attempts: str | None = None
    """How workers give the value to attempts of tasks: `all` to each one, `named` to those whose tasks name the secret, as
    does any word of a later release. None: not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOutput:
    network: str
    subnet: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOutput:
    head: str
    """Name of the head VM."""
    cluster_name: str
    zone: str
    internal_ip: str
    image: str
    ports: Mapping[str, int] = field(default_factory=dict)
    pools: Mapping[str, Any] = field(default_factory=dict)
    worker_identity: str
    config_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimOutput:
    claim: str
    size: str
    access_mode: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceOutput:
    service_account: str
    image_pull_secrets: tuple[str, ...] = ()
    claims: Mapping[str, ClaimOutput] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesOutput:
    context: str
    server: str
    namespaces: Mapping[str, NamespaceOutput] = field(default_factory=dict)
    slot_namespace: str | None = None
    """Whose Lease objects say which parts of GPUs are taken; None: each namespace keeps its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityOutput:
    email: str
    use: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOutputs:
    stack: str
    project: str | None = None
    region: str | None = None
    zone: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    records: RecordsOutput | None = None
    queues: Mapping[str, QueueOutput] = field(default_factory=dict)
    buckets: Mapping[str, BucketOutput] = field(default_factory=dict)
    registries: Mapping[str, Mapping[str, RegistryOutput]] = field(default_factory=dict)
    """By name, then by region."""
    secrets: Mapping[str, SecretOutput] = field(default_factory=dict)
    network: NetworkOutput | None = None
    clusters: Mapping[str, ClusterOutput] = field(default_factory=dict)
    kubernetes: Mapping[str, KubernetesOutput] = field(default_factory=dict)
    identities: Mapping[str, IdentityOutput] = field(default_factory=dict)
    published_url: str | None = None
    """The URL of a copy of this contract for machines without Pulumi."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedCopy:
    """Facts that a published copy carries about itself."""

    digest: str
    """`sha256:…` over the canonical JSON of the contract without the key `published`."""
    at: datetime
    commit: str | None = None
    """Commit of the Pulumi program; ends in `+dirty` if its tree had other changes."""
    committed_at: datetime | None = None


class ContractAltered(InvalidContract):
    """A published copy that was changed after it was published."""

    def __init__(self, stack: str, source: str | None, said: str, found: str) -> None:
        self.said, self.found = said, found
        super().__init__(
            f"the published contract of stack `{stack}` was changed after it was published",
            facts=[*([f"read from {source}"] if source else []), f"it says {said}", f"its content is {found}"],
            hint=f"publish it again: `runtime stack publish --stack {stack}`",
        )


class HiddenValue(InvalidContract):
    """The contract holds a secret at `path`, of any value: readers of a contract must not need to decrypt it."""

    def __init__(self, stack: str, path: str, source: str | None) -> None:
        self.path = path
        where = f"`{path}` is" if path else "all of it is"
        super().__init__(
            f"the contract of stack `{stack}` holds a secret: {where} hidden",
            facts=[*([f"read from {source}"] if source else []), "a contract says where secrets lie, never a value"],
            hint="export the resource's name instead of the value, or wrap it in `pulumi.Output.unsecret`; "
            f"then run `pulumi up --stack {stack}`",
        )


class MissingOutput(NotPossible):
    """Stack `stack` exports no `key`, which `needed_by` needs."""

    def __init__(self, stack: str, key: str, needed_by: str, *, setting: str | None = None) -> None:
        self.stack, self.key = stack, key
        local = "`runtime stack list` shows the other stacks; the built-in one has queues and records only"
        file = f"add `{setting or key}` to Pulumi.{stack}.yaml, then run `pulumi up --stack {stack}`"
        super().__init__(
            f"stack `{stack}` exports no `{key}`, and {needed_by} needs it", hint=local if stack == "local" else file
        )


TO_ALL: Final = "all"
"""`SecretOutput.attempts` of a secret that every attempt gets unless its task says otherwise."""

_VARIABLE: Final = r"[A-Za-z_][A-Za-z0-9_]*"
_TAKEN: Final = (
    "PATH|HOME|USER|LOGNAME|SHELL|PWD|TMPDIR|IFS|ENV|BASH_.*|BASHOPTS|SHELLOPTS|PS4|PROMPT_COMMAND"
    # Bash refuses a value for these and ends, or puts its own in its place.
    "|_|UID|EUID|PPID|BASHPID|GROUPS|SECONDS|S?RANDOM|LINENO|FUNCNAME|DIRSTACK|HISTCMD|EPOCH(?:SECONDS|REALTIME)|OPTIND|PIPESTATUS|SHLVL"
    "|(?:LD|DYLD)_.*|GCONV_PATH|GLIBC_TUNABLES|PYTHON.*|PERL5?(?:LIB|OPT|DB)|RUBY(?:LIB|OPT)|NODE_(?:OPTIONS|PATH)"
    "|(?:JAVA_TOOL|_JAVA|JDK_JAVA)_OPTIONS|GIT_(?:SSH|SSH_COMMAND|ASKPASS|CONFIG.*|EXEC_PATH|TEMPLATE_DIR)|SSH_ASKPASS"
    "|EDITOR|PAGER|(?i:(?:https?|all|no)_proxy)|SSL_CERT_(?:FILE|DIR)|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE"
    "|GOOGLE_(?:APPLICATION_CREDENTIALS|API_.*|CLOUD_UNIVERSE_DOMAIN)|CLOUDSDK_.*|[A-Z_]+_EMULATOR_HOST|GCE_METADATA_.*|NO_GCE_CHECK"
    "|BOTO_(?:CONFIG|PATH)|OPENSSL_(?:CONF|MODULES|ENGINES)|(?i:npm_config_.*)|PIP_.*|UV_(?!INDEX_.*_(?:USERNAME|PASSWORD)$).*"
    "|TPU_LIBRARY_PATH|PJRT_NAMES_AND_LIBRARY_PATHS|(?:CUDA|NVTX)_INJECTION.*|NCCL_(?:NET|TUNER|PROFILER)_PLUGIN|OMP_TOOL_LIBRARIES"
    "|KUBECONFIG|DOCKER_(?:HOST|CONFIG)|(?:RAY|RUNTIME)_.*"
    "|(?:CUDA|NVIDIA)_VISIBLE_DEVICES|(?:LOCAL_|NODE_)?RANK|(?:LOCAL_)?WORLD_SIZE|MASTER_(?:ADDR|PORT)"
    "|JAX_(?:COORDINATOR_ADDRESS|NUM_PROCESSES|PROCESS_ID)"
)
"""Variables that make a program load code or settings from elsewhere, change who it is, or belong to Ray or to us."""


def is_free_variable(variable: str) -> bool:
    """Whether a stack may choose the value of this variable, plain or from a secret.

    A variable that the system, Python, the loader, Ray or the runtime obeys would choose what each process loads, who it is,
    or where its results go; whoever can add a version of a secret would choose that with it.
    """
    return re.fullmatch(_VARIABLE, variable) is not None and re.fullmatch(_TAKEN, variable) is None


def pool_resource(pool: str) -> str:
    """Return the resource that the autoscaler's file gives to each node of a pool with a buffer, and to no other.

    The head requests one for each node of the buffer, so the autoscaler keeps that many nodes of this pool.
    """
    return f"runtime-pool-{pool}"


def is_pool_resource(name: str) -> bool:
    return name.startswith(pool_resource(""))


_SETTINGS: Final = {"clusters": "heads", "network": "network", "published_url": "records"}
"""Key of the contract → the setting, if its name differs."""


def need_output(outputs: StackOutputs, key: str, needed_by: str) -> Any:
    """The key `key` of the contract. Raises `MissingOutput` if it is absent or empty."""
    value = getattr(outputs, key)
    if value is None or value == {}:
        raise MissingOutput(outputs.stack, key, needed_by, setting=_SETTINGS.get(key))
    return value


def outputs_fields(outputs: StackOutputs) -> dict[str, Any]:
    """The contract as a JSON object, without keys for None."""
    return {"schema": SCHEMA, "needs_runtime": NEEDS_RUNTIME, **_plain(outputs)}


def encode_outputs(outputs: StackOutputs) -> str:
    """Canonical JSON: equal outputs have equal text."""
    return encode_fields(outputs_fields(outputs))


def encode_fields(contract: Mapping[str, Any]) -> str:
    """Canonical JSON of a contract as it was read, with keys that this release does not know."""
    return json.dumps(_whole_numbers(contract), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def contract_digest(contract: Mapping[str, Any]) -> str:
    """Digest of a contract's content: the same for a published copy and its original."""
    import hashlib

    bare = {key: value for key, value in contract.items() if key != PUBLISHED}
    return f"sha256:{hashlib.sha256(encode_fields(bare).encode(errors='surrogatepass')).hexdigest()}"


def published_fields(contract: Mapping[str, Any], published: PublishedCopy) -> dict[str, Any]:
    """The published form of `contract`."""
    said = {"digest": published.digest, "at": format_time(published.at), "commit": published.commit}
    if published.committed_at is not None:
        said["committed_at"] = format_time(published.committed_at)
    return {**contract, PUBLISHED: {key: value for key, value in said.items() if value is not None}}


def read_published(contract: Mapping[str, Any], *, source: str | None = None) -> PublishedCopy | None:
    """The facts that a published copy carries about itself; None for any other contract.

    Raises `ContractAltered` if the content was changed since, `InvalidContract` if that cannot be verified.
    """
    said = contract.get(PUBLISHED)
    if said is None:
        return None
    stack = str(contract.get("stack", "STACK"))
    try:
        if not said["digest"].startswith("sha256:"):
            raise ValueError(said["digest"])
        committed_at, commit = said.get("committed_at"), said.get("commit")
        published = PublishedCopy(
            digest=said["digest"],
            at=parse_time(said["at"]),
            commit=None if commit is None else str(commit),
            committed_at=None if committed_at is None else parse_time(committed_at),
        )
    except (KeyError, TypeError, AttributeError, ValueError, RequestRefused):
        raise InvalidContract(
            f"the published contract of stack `{stack}` cannot be verified: `{PUBLISHED}` is malformed",
            facts=[f"read from {source}"] if source else [],
            hint=f"publish it again: `runtime stack publish --stack {stack}`",
        ) from None
    if (found := contract_digest(contract)) != published.digest:
        raise ContractAltered(stack, source, published.digest, found)
    return published


def decode_fields(data: str | bytes, *, source: str | None = None) -> Any:
    """The JSON value, unchecked."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as problem:
        raise InvalidContract(
            f"the contract {_of(source)}is no JSON: {problem}", hint="`runtime stack show -o json` prints a valid one"
        ) from None


def parse_outputs(value: object, *, source: str | None = None) -> StackOutputs:
    """Check and type a contract, bare or published. Raises `InvalidContract` with the path of the first problem."""
    if value == _HIDDEN:
        raise HiddenValue("STACK", "", source)
    if not isinstance(value, Mapping):
        raise InvalidContract(
            f"the contract {_of(source)}is {_kind(value)}, expected an object",
            hint="`runtime stack show -o json` prints a valid one",
        )
    name = value.get("stack")
    stack = name if isinstance(name, str) and name else "STACK"
    if (path := _find_hidden(value)) is not None:
        raise HiddenValue(stack, path, source)
    schema = value.get("schema")
    if type(schema) not in (int, float) or schema != SCHEMA:
        raise _other_schema(stack, schema, value.get("needs_runtime"))
    read_published(value, source=source)
    reader = _ContractReader()
    outputs = reader.read(StackOutputs, value, "")
    # Files of this machine are named after the stack, and a published contract is written by others.
    if not reader.problems and not _is_stack_name(outputs.stack):
        reader.report("stack", f"is {outputs.stack!a}, expected letters, digits and -_. as Pulumi has them")
    if not reader.problems:
        _check_cloud_names(outputs, reader)
    if reader.problems:
        first = reader.problems[0]
        raise InvalidContract(
            f"stack `{stack}` exports a malformed contract: `{first.path}` {first.message}",
            facts=[f"read from {source}"] if source else [],
            hint=f"run `pulumi up --stack {stack}`",
        )
    return typing.cast(StackOutputs, outputs)


def _check_cloud_names(outputs: Any, reader: _ContractReader) -> None:
    """Report names of a cluster that are none of Google's: they become words of `ssh` and `gcloud`, paths and file names."""
    project = outputs.project
    if project is not None and outputs.clusters and not re.fullmatch(r"([a-z0-9.-]+:)?[a-z0-9][a-z0-9-]*", project):
        reader.report("project", f"is {project!a}, expected a project's id as Google has them")
    for key, cluster in outputs.clusters.items():
        for name in ("head", "zone", "cluster_name"):
            value = getattr(cluster, name)
            if not re.fullmatch(r"[a-z0-9]([a-z0-9_-]*[a-z0-9])?", value):
                reader.report(f"clusters.{key}.{name}", f"is {value!a}, expected lower-case letters, digits and -")


def _is_stack_name(name: str) -> bool:
    return re.fullmatch(r"[\w.-]+(/[\w.-]+){0,2}", name, re.ASCII) is not None and not {".", ".."} & set(
        name.split("/")
    )


def _other_schema(stack: str, schema: object, needs: object) -> InvalidContract:
    facts = [f"found schema {json.dumps(schema)}, need {SCHEMA}"]
    if type(schema) not in (int, float) or schema < SCHEMA:  # type: ignore[operator]
        hint = f"run `pulumi up --stack {stack}`"
    elif isinstance(needs, str) and needs:
        facts.append(f"release {needs} of research-runtime reads it, and newer ones do")
        hint = f"pip install --upgrade 'research-runtime>={needs}'"
    else:
        hint = "pip install --upgrade research-runtime"
    return InvalidContract(f"stack `{stack}` exports a contract that this release cannot read", facts=facts, hint=hint)


def _find_hidden(value: object, path: str = "", depth: int = 0) -> str | None:
    """Path of the first secret: Pulumi's placeholder for one, or an object that Pulumi marks as one."""
    if depth > _DEEPEST:
        raise InvalidContract(f"the contract is nested deeper than {_DEEPEST} levels", hint="correct what exports it")
    if value == _HIDDEN:
        return path
    if isinstance(value, Mapping):
        if _MARKED in value:
            return path
        items = [(f"{path}.{key}" if path else str(key), item) for key, item in value.items()]
    elif isinstance(value, list):
        items = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    else:
        return None
    for inner, item in items:
        if (found := _find_hidden(item, inner, depth + 1)) is not None:
            return found
    return None


def _whole_numbers(value: Any) -> Any:
    """Pulumi carries every number as a double: 60.0 and 60 are one value, and get one text."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _whole_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_whole_numbers(item) for item in value]
    return value


def _of(source: str | None) -> str:
    return f"of `{source}` " if source else ""


def _plain(value: Any) -> Any:
    if isinstance(value, OtherQueueOutput):
        return {**_plain(value.values), "kind": value.kind}
    if is_dataclass(value):
        pairs = ((each.name, getattr(value, each.name)) for each in fields(value))
        return {name: _plain(item) for name, item in pairs if item is not None}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


class _ContractReader(Reader):
    """Ignores keys of later releases, and counts null as absent."""

    names: ClassVar[Mapping[Any, str]] = {**Reader.names, str: "a string"}

    def read(self, kind: Any, value: object, path: str) -> Any:
        return self._read_queue(value, path) if kind == QueueOutput else super().read(kind, value, path)

    def _read_queue(self, value: object, path: str) -> Any:
        if not isinstance(value, Mapping):
            return self.wrong(Mapping, value, path)
        kind = value.get("kind")
        if kind is None:
            self.report_missing(str, "kind", path)
            return UNREADABLE
        if not isinstance(kind, str):
            return self.wrong(str, kind, join(path, "kind"))
        known = {"pubsub": PubSubQueueOutput, "sqlite": SqliteQueueOutput}.get(kind)
        if known is None:
            return OtherQueueOutput(kind=kind, values={key: item for key, item in value.items() if key != "kind"})
        return self.read_record(known, value, path)

    def is_absent(self, value: object, *, required: bool) -> bool:
        return value is None

    def report_unknown(self, value: Mapping[str, Any], known: list[str], path: str) -> None:
        pass

    def wrong(self, kind: Any, value: object, path: str, expected: str | None = None) -> Any:
        self.report(path, f"is {_kind(value, path)}, expected {self.expected(kind)}")
        return UNREADABLE


def _kind(value: object, path: str = "") -> str:
    if path.partition(".")[0] == "secrets" and isinstance(value, str | int | float):
        # A person may have put the secret's value here instead of its place; keep it out of terminals and logs.
        return "a plain value"
    match value:
        case None:
            return "null"
        case bool():
            return f"a boolean ({json.dumps(value)})"
        case int() | float():
            return f"a number ({value})"
        case str():
            return f'a string ("{value[:40]}")'
        case Mapping():
            return "an object"
        case _:
            return "an array"
