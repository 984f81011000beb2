"""Records in a bucket, `gs://bucket/prefix` or `s3://bucket/prefix`, through obstore.

The library retries retryable failures with backoff, and may then meet its own write; every ambiguous write ends in
reading back. It refuses a whole page of a listing for one name that it cannot represent
(https://github.com/developmentseed/obstore/issues/429), so such a listing goes on with the client that jobs use.
Endpoints and credentials come from the clouds' own environment variables: `AWS_ENDPOINT_URL` and
`STORAGE_EMULATOR_HOST` (then without credentials) point to another server.
A process that forks opens its store afterwards: the library has threads of its own.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import os
import re
import shlex
import socket
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TypeAlias, TypeVar

from runtime.errors import InvalidValue, MissingExtra, ObjectGone, StoreUnavailable
from runtime.records.blobs import BlobInfo
from runtime.sanitize import CleanLogger
from runtime.system import system

if TYPE_CHECKING:
    from runtime.shim.bucket import Bucket

REQUEST_TIMEOUT: Final = timedelta(seconds=60)
RETRY_FOR: Final = timedelta(seconds=90)
TRIES: Final = 3
"""How often a call is made that the library does not retry itself, such as a write without an answer in time."""
LIST_TRIES: Final = 7
"""How often in a row a page that was cut off is requested; the library itself never asks for one again."""
METADATA: Final = ("169.254.169.254", 80)
"""The address of a cloud machine's own credentials."""
PAGE: Final = 1000

_EXTRAS: Final = {"gs": "gcp", "s3": "ec2"}
_AWS_BY_ITSELF: Final = (
    "AWS_ACCESS_KEY_ID",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_SKIP_SIGNATURE",
)
_GOOGLE_BY_ITSELF: Final = (
    "GOOGLE_SERVICE_ACCOUNT",
    "GOOGLE_SERVICE_ACCOUNT_PATH",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
    "GOOGLE_BEARER_TOKEN",
    "GOOGLE_SKIP_SIGNATURE",
)
_LOG_IN: Final = {"gs": "gcloud auth application-default login", "s3": "aws configure"}
_STATUS: Final = re.compile(r"status code: (\d+)")
_MAY_PASS: Final = {408, 409, 425, 429}
_NATIVE_GOOGLE: Final = {"authorized_user", "service_account"}
_LAST: Final = "~"
"""Sorts behind every character of a key."""
_REMOVE: Final = {"gs": "gsutil rm", "s3": "aws s3 rm"}
_NOT_A_PAGE: Final = "invalid list response"
"""The library's words for a page that it cannot read, such as one with a control character in a name."""

_UNREADABLE: Final = re.compile("[\\x00-\\x1f\\x7f\\ufffd]")
_NUMBER: Final = re.compile("[0-9]{5,}")
_LONG_AGO: Final = datetime.min.replace(tzinfo=UTC)

T = TypeVar("T")
_Row: TypeAlias = tuple[str, int, datetime]
"""Key below the prefix, size in bytes and time."""

_reported: set[str] = set()
"""URLs that this process has reported for holding foreign names."""


class BucketBlobs:
    parallel = 32

    def __init__(self, url: str, *, timeout: timedelta = REQUEST_TIMEOUT, retry_for: timedelta = RETRY_FOR) -> None:
        """Contacts nothing yet. Raises `MissingExtra` without the library, `InvalidValue` without a bucket, and
        `StoreUnavailable` if the credentials of the environment cannot be used."""
        scheme, _, rest = url.partition("://")
        bucket, _, prefix = rest.partition("/")
        prefix = prefix.strip("/")
        if scheme not in _EXTRAS or not bucket:
            raise InvalidValue("record store", url, "gs://BUCKET/PREFIX or s3://BUCKET/PREFIX")
        try:
            self._obstore: Any = importlib.import_module("obstore")
        except ModuleNotFoundError:
            raise MissingExtra(f"record store `{url}`", _EXTRAS[scheme]) from None
        self.url = f"{scheme}://{bucket}" + (f"/{prefix}" if prefix else "")
        self._bucket, self._scheme, self._timeout, self._retry_for = bucket, scheme, timeout, retry_for
        self._below = f"{prefix}/" if prefix else ""
        self._credentials = _aws_credentials() if scheme == "s3" else _google_credentials()
        try:
            self._store = _open_store(
                scheme,
                bucket,
                self._credentials,
                prefix=prefix or None,
                client_options={"timeout": timeout, "connect_timeout": timedelta(seconds=5)},
                retry_config={
                    "max_retries": 8,
                    "retry_timeout": retry_for,
                    "backoff": {
                        "init_backoff": timedelta(milliseconds=100),
                        "max_backoff": timedelta(seconds=10),
                        "base": 2,
                    },
                },
            )
        except self._obstore.exceptions.BaseError as problem:
            raise StoreUnavailable(
                f"bucket `{bucket}` cannot be opened",
                facts=[str(problem).partition("\n")[0]],
                hint=f"correct the environment's {'AWS' if scheme == 's3' else 'GOOGLE'}_ variables, or unset them and "
                f"`{_LOG_IN[scheme]}`",
                retryable=False,
            ) from problem
        self._plain: Bucket | None = None
        self._next_chunk: dict[str, int] = {}

    def create(self, key: str, data: bytes) -> bool:
        def try_once() -> bool:
            try:
                self._obstore.put(self._store, key, data, mode="create", use_multipart=False)
            except self._obstore.exceptions.AlreadyExistsError as problem:
                # S3 answers 409 to a write that meets another one, which may fail: then nothing exists.
                if not self._exists(key):
                    raise self._obstore.exceptions.BaseError(f"it met another write: {problem}") from problem
                return False
            except (self._obstore.exceptions.BaseError, OSError) as problem:
                # It may have been stored though no answer came; the caller compares the existing object with its own.
                if self._explain(problem, key).retryable and self.get(key) is not None:
                    return False
                raise
            return True

        return self._write(key, try_once)

    def _exists(self, key: str) -> bool:
        try:
            self._call(key, lambda: self._obstore.head(self._store, key))
        except FileNotFoundError:
            return False
        return True

    def put(self, key: str, data: bytes) -> None:
        self._write(key, lambda: self._obstore.put(self._store, key, data, use_multipart=False))

    def upload(self, key: str, file: Path) -> None:
        self._call(key, lambda: self._obstore.put(self._store, key, file))

    def get(self, key: str) -> bytes | None:
        try:
            return self._call(key, lambda: bytes(self._obstore.get(self._store, key).bytes()))
        except FileNotFoundError:
            return None

    def get_range(self, key: str, offset: int, limit: int) -> bytes:
        """At most `limit` bytes from `offset`; empty at the end, or without an object."""

        def try_once() -> bytes:
            size: int = self._obstore.head(self._store, key)["size"]
            if offset >= size:
                return b""
            return bytes(self._obstore.get_range(self._store, key, start=offset, end=min(size, offset + limit)))

        try:
            return self._call(key, try_once)
        except FileNotFoundError:
            return b""

    def download(self, key: str, to: BinaryIO) -> None:
        """Write the object to an open, empty file, piece by piece. Raises `ObjectGone` without one."""

        def try_once() -> None:
            to.seek(0)
            to.truncate()
            to.writelines(self._obstore.get(self._store, key).stream())

        try:
            self._call(key, try_once)
        except FileNotFoundError as problem:
            raise ObjectGone(f"{self.url}/{key}") from problem

    def copy(self, there: str, key: str) -> bool:
        """Have the service copy an object, over an existing one. False without an object to copy."""
        try:
            self._call(key, lambda: self._obstore.copy(self._store, there, key))
        except FileNotFoundError:
            return False
        return True

    def list_folder(self, folder: str) -> list[str]:
        """Names of objects and folders directly in `folder`, which ends with a slash."""
        try:
            found = self._call(
                folder, lambda: self._obstore.list_with_delimiter(self._store, folder.rstrip("/") or None), LIST_TRIES
            )
        except FileNotFoundError as problem:
            raise self._explain(problem, folder) from problem
        except (_PageRefused, ValueError) as problem:
            keys = [key for key, _, _ in self._list_plainly(folder, None, problem, delimiter="/")]
        else:
            keys = [*(each["path"] for each in found["objects"]), *found["common_prefixes"]]
        return sorted({key.rstrip("/")[len(folder) :] for key in keys} - {""})

    def delete(self, key: str) -> None:
        try:
            self._call(key, lambda: self._obstore.delete(self._store, key))
        except FileNotFoundError:
            return

    def list_keys(self, prefix: str, *, after: str | None = None) -> Iterator[str]:
        return (key for key, _, _ in self._list(prefix, after))

    def list_blobs(self, prefix: str, *, after: str | None = None) -> Iterator[BlobInfo]:
        return itertools.starmap(BlobInfo, self._list(prefix, after))

    def _list(self, prefix: str, after: str | None) -> Iterator[_Row]:
        """Every row or an error: a listing that fails is taken up after the last key that came."""
        folder, _, start = prefix.rpartition("/")
        # The library lists whole folders; a prefix that ends inside a name starts there and stops behind it.
        before = f"{prefix[:-1]}{chr(ord(prefix[-1]) - 1)}{_LAST}" if start else None
        last = max(filter(None, (before, after)), default=None)
        pages: Iterator[Any] | None = None
        repeated = 0

        def read_next() -> Any:
            nonlocal pages
            # After a failure the library's iterator is at its end, as if the listing were, so a new one is made.
            going, pages = pages, None
            going = going or self._obstore.list(self._store, folder or None, offset=last, chunk_size=PAGE)
            page = next(going, None)
            pages = going
            return page

        while True:
            try:
                page = self._call(prefix, read_next, LIST_TRIES)
            except FileNotFoundError as problem:
                raise self._explain(problem, prefix) from problem
            except (_PageRefused, ValueError) as problem:
                yield from self._list_plainly(prefix, last, problem)
                return
            if page is None:
                return
            repeated += 1
            for found in page:
                path = found["path"]
                if last is not None and path <= last:
                    continue
                last, repeated = path, 0
                if path.startswith(prefix):
                    yield path, found["size"], found["last_modified"]
                elif path > prefix:
                    return
            if repeated == TRIES:
                raise self._explain(OSError("the same page of the listing came again and again"), prefix)

    def _list_plainly(
        self, prefix: str, after: str | None, refused: Exception, delimiter: str | None = None
    ) -> Iterator[_Row]:
        """`_list` with a client that takes any name: foreign names are reported and left out."""
        from runtime.shim.cloud import BucketDenied, BucketUnreachable

        self._plain = self._plain or self._open_plain_client()
        whole = self._below + prefix
        pages = self._plain.pages(whole, delimiter, after and self._below + after, self._retry_for.total_seconds())
        folder = whole.rfind("/") + 1
        while True:
            try:
                page = next(pages, None)
            except BucketUnreachable as problem:
                raise StoreUnavailable(
                    f"bucket `{self._bucket}` cannot be listed around a name that is not ours",
                    facts=[f"at `{self.url}/{prefix}`", str(refused), str(problem)],
                    hint="remove that object" if isinstance(problem, BucketDenied) else None,
                    retryable=not isinstance(problem, BucketDenied),
                ) from problem
            if page is None:
                return
            for key, size, modified in page:
                name = key[len(self._below) :]
                if key[folder:] and not _is_name(key[folder:].removesuffix("/")):
                    self._report(name)
                elif size is None:
                    yield name, 0, _LONG_AGO
                elif not key.endswith("/"):  # consoles and mounts put such an object where they show a folder
                    yield name, size, datetime.fromisoformat(modified)

    def _open_plain_client(self) -> Bucket:
        from runtime.shim.bucket import Bucket
        from runtime.shim.cloud import Amazon

        client = Bucket(self.url)
        client.answer_s = self._timeout.total_seconds()
        client.say = lambda text: None  # The caller gets the error in the end.
        provider = self._credentials.get("credential_provider")
        if provider is not None:
            if self._scheme == "s3":
                client.cloud = Amazon(getattr(provider, "config", {}).get("region"))
            client.cloud.find = functools.partial(_ask_provider, provider)  # type: ignore[method-assign]
        return client

    def _report(self, name: str) -> None:
        """Report foreign names once in a process, and how to remove them."""
        if self.url in _reported:
            return
        _reported.add(self.url)
        address = f"{self.url}/{name}"  # The name may contain a terminal's control characters.
        remove = f"; `{_REMOVE[self._scheme]} {shlex.quote(address)}` removes it" if address.isprintable() else ""
        CleanLogger(__name__).warning(
            f"bucket `{self._bucket}` holds names that are not ours, such as {address!a}: they are left out of every "
            f"listing, and make it slower{remove}"
        )

    def append(self, key: str, data: bytes) -> None:
        """One create-only object for each call: `t.log` becomes `t.00000.log`, `t.00001.log` …; give it much at once."""
        stem, _, suffix = key.rpartition(".")
        number = self._next_chunk.get(key)
        if number is None:
            number = max((number for number, _ in self._list_chunks(key)), default=-1) + 1
        while not self.create(chunk := f"{stem}.{number:05}.{suffix}", data):
            if self.get(chunk) == data:
                break
            number += 1
        if len(self._next_chunk) > 10_000:
            self._next_chunk = {}
        self._next_chunk[key] = number + 1

    def stream(self, key: str) -> Iterator[bytes]:
        for _, chunk in sorted(self._list_chunks(key)):
            if data := self.get(chunk):
                yield data

    def _list_chunks(self, key: str) -> Iterator[tuple[int, str]]:
        stem, _, suffix = key.rpartition(".")
        for chunk in self.list_keys(f"{stem}."):
            number = chunk[len(stem) + 1 :].removesuffix(f".{suffix}")
            if chunk == f"{stem}.{number}.{suffix}" and _NUMBER.fullmatch(number):
                yield int(number), chunk

    def path(self, key: str) -> Path | None:
        return None

    def close(self) -> None:
        pass

    def _write(self, key: str, call: Callable[[], T]) -> T:
        try:
            return self._call(key, call)
        except FileNotFoundError as problem:  # A write that finds nothing lacks the bucket.
            raise self._explain(problem, key) from problem

    def _call(self, key: str, call: Callable[[], T], tries: int = TRIES) -> T:
        """Make a call, again while its failure may pass. Raises `FileNotFoundError` if the object does not exist."""
        deadline = system.monotonic() + self._retry_for.total_seconds()
        for tries_left in reversed(range(tries)):
            try:
                return call()
            except FileNotFoundError as problem:
                if "NoSuchBucket" in str(problem):
                    raise self._explain(problem, key) from problem
                raise
            except (self._obstore.exceptions.BaseError, OSError) as problem:
                if isinstance(problem, self._obstore.exceptions.InvalidPathError) or _NOT_A_PAGE in str(problem):
                    raise _PageRefused(_UNREADABLE.sub("?", str(problem).partition("\n")[0])) from problem
                failure = self._explain(problem, key)
                if not failure.retryable or not tries_left or system.monotonic() > deadline:
                    raise failure from problem
                system.sleep(0.1 * 2 ** (tries - 1 - tries_left))
        raise AssertionError(key)

    def _explain(self, problem: Exception, key: str) -> StoreUnavailable:
        said = str(problem).partition("\n")[0]
        place = f"at `{self.url}/{key}`"
        if isinstance(problem, FileNotFoundError) or "404 Not Found" in said:
            return StoreUnavailable(
                f"there is no bucket `{self._bucket}`",
                facts=[place, said],
                hint="check the stack's `records` url, or run `pulumi up`",
                retryable=False,
            )
        exceptions = self._obstore.exceptions
        denied = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
        if isinstance(problem, denied) or "403 Forbidden" in said or "401 Unauthorized" in said:
            return StoreUnavailable(
                f"bucket `{self._bucket}` refused us",
                facts=[place, said],
                hint=f"`{_LOG_IN[self._scheme]}`, or give this identity access to the bucket",
                denied=True,
            )
        status = _STATUS.search(said)
        code = int(status[1]) if status else 0
        for_good = (300 <= code < 500 and code not in _MAY_PASS) or "configured region" in said
        return StoreUnavailable(
            f"bucket `{self._bucket}` did not answer as it should",
            facts=[place, said],
            hint="is `AWS_REGION` the bucket's region?" if for_good and self._scheme == "s3" else None,
            retryable=not for_good,
        )


class _PageRefused(Exception):
    """The library read a page of a listing, and cannot represent a name on it."""


def _is_name(name: str) -> bool:
    """Whether the library can read, write and delete an object of that name."""
    return _UNREADABLE.search(name) is None and not {"", ".", ".."} & set(name.split("/"))


def _ask_provider(provider: Callable[[], Mapping[str, Any]]) -> tuple[Any, float]:
    """The plain client's credentials and when they expire, from a provider of the library's."""
    try:
        said = provider()
    except Exception as problem:
        raise OSError(f"{type(problem).__name__}: {problem}") from problem
    ends = said.get("expires_at")
    known = (
        (said["access_key_id"], said["secret_access_key"], said["token"]) if "access_key_id" in said else said["token"]
    )
    return known, system.time() + 600 if ends is None else ends.timestamp()


def _open_store(
    scheme: str, bucket: str, credentials: Mapping[str, Any], *, client_options: dict[str, Any], **options: Any
) -> Any:
    stores: Any = importlib.import_module("obstore.store")
    if scheme == "s3":
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
        if endpoint.startswith("http://"):
            client_options["allow_http"] = True
        return stores.S3Store(bucket, client_options=client_options, **credentials, **options)
    emulator = os.environ.get("STORAGE_EMULATOR_HOST")
    if emulator:
        options["base_url"] = emulator if "://" in emulator else f"http://{emulator}"
        client_options["allow_http"] = True
        if options["base_url"].startswith("http://"):
            # Over plain HTTP there are no certificates, nor any but the anonymous credentials; to read all that this machine
            # trusts takes 20 ms for each client.
            client_options["allow_invalid_certificates"] = True
    return stores.GCSStore(bucket, client_options=client_options, **credentials, **options)


def _aws_credentials() -> dict[str, Any]:
    """Empty if the library finds them in the environment, or from the machine that it runs on.

    boto3, which is slow to import, is used only for the profiles and single sign-on of a laptop.
    """
    if any(os.environ.get(name) for name in _AWS_BY_ITSELF):
        return {}
    if not _has_aws_profile():
        _expect_machine_credentials("s3")
        return {}
    try:
        provider: Any = importlib.import_module("obstore.auth.boto3")
    except ModuleNotFoundError:
        return {}
    return {"credential_provider": provider.Boto3CredentialProvider()}


def _has_aws_profile() -> bool:
    named = (os.environ.get("AWS_SHARED_CREDENTIALS_FILE"), os.environ.get("AWS_CONFIG_FILE"))
    usual = (Path.home() / ".aws/credentials", Path.home() / ".aws/config")
    return any(Path(own or default).exists() for own, default in zip(named, usual, strict=True))


def _google_credentials() -> dict[str, Any]:
    """Empty if the library can use the default credentials; workload identities go through google-auth."""
    if os.environ.get("STORAGE_EMULATOR_HOST"):
        return {"bearer_token": "anonymous"}
    if any(os.environ.get(name) for name in _GOOGLE_BY_ITSELF):
        return {}
    file = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    path = Path(file) if file else Path.home() / ".config/gcloud/application_default_credentials.json"
    try:
        kind = json.loads(path.read_bytes()).get("type")
    except OSError:
        _expect_machine_credentials("gs")
        return {}
    except (ValueError, AttributeError) as problem:
        raise StoreUnavailable(f"credentials `{path}` cannot be read: {problem}", retryable=False) from None
    if kind in _NATIVE_GOOGLE:
        return {}
    try:
        google: Any = importlib.import_module("google.auth")
        transport: Any = importlib.import_module("google.auth.transport.requests")
    except ModuleNotFoundError:
        return {}
    try:
        # It asks for a token here, if no variable names the project.
        credentials, _ = google.default(scopes=["https://www.googleapis.com/auth/devstorage.read_write"])
    except google.exceptions.GoogleAuthError as problem:
        raise StoreUnavailable(
            f"credentials `{path}` cannot be used",
            facts=[" ".join(str(problem).split())[:300]],
            hint="see docs/signing-in.md",
            retryable=problem.retryable,
        ) from problem

    def refresh() -> dict[str, Any]:
        credentials.refresh(transport.Request())
        expiry: datetime | None = credentials.expiry
        return {"token": credentials.token, "expires_at": expiry and expiry.replace(tzinfo=UTC)}

    return {"credential_provider": refresh}


def _expect_machine_credentials(scheme: str) -> None:
    if not has_machine_credentials():
        raise StoreUnavailable(
            f"no credentials for `{scheme}://` were found",
            facts=["looked in the environment, in the home folder, and for a cloud machine's own"],
            hint=f"`{_LOG_IN[scheme]}`",
            retryable=False,
        )


def has_machine_credentials() -> bool:
    """Whether this is a cloud machine: elsewhere the libraries look for its credentials for long."""
    try:
        socket.create_connection(METADATA, timeout=1).close()
    except OSError:
        return False
    return True
