"""Records in a bucket, `gs://bucket/prefix` or `s3://bucket/prefix`, through obstore.

The library retries what a service says may be retried, with backoff, and may then meet its own write; all that is
ambiguous ends in reading back. Endpoints and credentials come from the clouds' own environment variables:
`AWS_ENDPOINT_URL` and `STORAGE_EMULATOR_HOST` (then without credentials) point to another server.
A process that forks opens its store afterwards: the library has threads of its own.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

from runtime.clock import Clock
from runtime.errors import InvalidValue, MissingExtra, StoreUnavailable
from runtime.records.blobs import BlobInfo
from runtime.records.keyed import BlobRecords

REQUEST_TIMEOUT: Final = timedelta(seconds=60)
RETRY_FOR: Final = timedelta(seconds=90)
TRIES: Final = 3
"""What the library does not retry itself, such as a write without an answer in time, begins anew this often."""
METADATA: Final = ("169.254.169.254", 80)
"""Where a machine of either cloud finds its credentials."""
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

T = TypeVar("T")


class BucketBlobs:
    parallel = 32

    def __init__(self, url: str, *, timeout: timedelta = REQUEST_TIMEOUT, retry_for: timedelta = RETRY_FOR) -> None:
        """Contacts nothing yet. Raises `MissingExtra` without the library, `InvalidValue` without a bucket."""
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
        self._bucket, self._scheme, self._retry_for = bucket, scheme, retry_for
        self._store = _open_store(
            scheme,
            bucket,
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
        self._next_chunk: dict[str, int] = {}

    def create(self, key: str, data: bytes) -> bool:
        def try_once() -> bool:
            try:
                self._obstore.put(self._store, key, data, mode="create", use_multipart=False)
            except self._obstore.exceptions.AlreadyExistsError:
                return False
            except (self._obstore.exceptions.BaseError, OSError) as problem:
                # It may have been stored though no answer came; the caller sees by what is there whose it is.
                if self._explain(problem, key).retryable and self.get(key) is not None:
                    return False
                raise
            return True

        return self._write(key, try_once)

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
        """At most `limit` bytes from `offset`; empty at the end and where there is no object."""

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
        """Write the object to an open, empty file, piece by piece. Raises `StoreUnavailable` if there is none."""

        def try_once() -> None:
            to.seek(0)
            to.truncate()
            to.writelines(self._obstore.get(self._store, key).stream())

        try:
            self._call(key, try_once)
        except FileNotFoundError as problem:
            raise StoreUnavailable(f"`{self.url}/{key}` is gone", retryable=False) from problem

    def copy(self, there: str, key: str) -> bool:
        """Have the service copy an object, over what is there. False where there is no object to copy."""
        try:
            self._call(key, lambda: self._obstore.copy(self._store, there, key))
        except FileNotFoundError:
            return False
        return True

    def list_folder(self, folder: str) -> list[str]:
        """Names of objects and folders in `folder`, which ends with a slash; what lies deeper is not looked at."""
        found = self._call(folder, lambda: self._obstore.list_with_delimiter(self._store, folder.rstrip("/") or None))
        objects = [each["path"] for each in found["objects"]]
        return sorted({path.rstrip("/")[len(folder) :] for path in [*objects, *found["common_prefixes"]]} - {""})

    def delete(self, key: str) -> None:
        try:
            self._call(key, lambda: self._obstore.delete(self._store, key))
        except FileNotFoundError:
            return

    def list_keys(self, prefix: str, *, after: str | None = None) -> Iterator[str]:
        return (found["path"] for found in self._list(prefix, after))

    def list_blobs(self, prefix: str, *, after: str | None = None) -> Iterator[BlobInfo]:
        for found in self._list(prefix, after):
            yield BlobInfo(found["path"], found["size"], found["last_modified"])

    def _list(self, prefix: str, after: str | None) -> Iterator[Any]:
        """The library lists whole folders; a prefix that ends inside a name starts there and stops behind it."""
        folder, _, start = prefix.rpartition("/")
        before = f"{prefix[:-1]}{chr(ord(prefix[-1]) - 1)}{_LAST}" if start else None
        offset = max(filter(None, (before, after)), default=None)
        pages = self._obstore.list(self._store, folder or None, offset=offset, chunk_size=PAGE)
        while True:
            try:
                page = self._call(prefix, lambda: next(pages, None))
            except FileNotFoundError as problem:
                raise self._explain(problem, prefix) from problem
            if page is None:
                return
            for found in page:
                path = found["path"]
                if path.startswith(prefix):
                    if offset is None or path > offset:
                        yield found
                elif path > prefix:
                    return

    def append(self, key: str, data: bytes) -> None:
        """One create-only object for each call: `t.log` becomes `t.00000.log`, `t.00001.log` …; give it much at once."""
        stem, _, suffix = key.rpartition(".")
        number = self._next_chunk.get(key)
        if number is None:
            last = max(self.list_keys(f"{stem}."), default=None)
            number = 0 if last is None else int(last.rsplit(".", 2)[1]) + 1
        while not self.create(chunk := f"{stem}.{number:05}.{suffix}", data):
            if self.get(chunk) == data:
                break
            number += 1
        if len(self._next_chunk) > 10_000:
            self._next_chunk = {}
        self._next_chunk[key] = number + 1

    def stream(self, key: str) -> Iterator[bytes]:
        stem = key.rpartition(".")[0]
        for chunk in self.list_keys(f"{stem}."):
            if data := self.get(chunk):
                yield data

    def path(self, key: str) -> Path | None:
        return None

    def close(self) -> None:
        pass

    def _write(self, key: str, call: Callable[[], T]) -> T:
        try:
            return self._call(key, call)
        except FileNotFoundError as problem:  # what a write does not find is the bucket
            raise self._explain(problem, key) from problem

    def _call(self, key: str, call: Callable[[], T]) -> T:
        """Of an object that is not there it raises `FileNotFoundError`."""
        deadline = time.monotonic() + self._retry_for.total_seconds()
        for tries_left in reversed(range(TRIES)):
            try:
                return call()
            except FileNotFoundError as problem:
                if "NoSuchBucket" in str(problem):
                    raise self._explain(problem, key) from problem
                raise
            except (self._obstore.exceptions.BaseError, OSError) as problem:
                failure = self._explain(problem, key)
                if not failure.retryable or not tries_left or time.monotonic() > deadline:
                    raise failure from problem
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
                retryable=False,
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


class BucketRecords(BlobRecords):
    def __init__(self, url: str, *, clock: Clock | None = None) -> None:
        super().__init__(BucketBlobs(url), clock=clock)


def _open_store(scheme: str, bucket: str, *, client_options: dict[str, Any], **options: Any) -> Any:
    stores: Any = importlib.import_module("obstore.store")
    if scheme == "s3":
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
        if endpoint.startswith("http://"):
            client_options["allow_http"] = True
        return stores.S3Store(bucket, client_options=client_options, **_aws_credentials(), **options)
    emulator = os.environ.get("STORAGE_EMULATOR_HOST")
    if emulator:
        options["base_url"] = emulator if "://" in emulator else f"http://{emulator}"
        options["bearer_token"] = "anonymous"
        client_options["allow_http"] = True
    else:
        options |= _google_credentials()
    return stores.GCSStore(bucket, client_options=client_options, **options)


def _aws_credentials() -> dict[str, Any]:
    """Nothing where the library finds them by itself: in the environment, or from the machine it runs on.

    Profiles and single sign-on of a laptop are read by boto3, which is slow to import and so only asked for those.
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
    """Nothing where the library can use the default credentials; workload identities go through google-auth."""
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
    credentials, _ = google.default(scopes=["https://www.googleapis.com/auth/devstorage.read_write"])

    def refresh() -> dict[str, Any]:
        credentials.refresh(transport.Request())
        expiry: datetime | None = credentials.expiry
        return {"token": credentials.token, "expires_at": expiry and expiry.replace(tzinfo=UTC)}

    return {"credential_provider": refresh}


def _expect_machine_credentials(scheme: str) -> None:
    """Fail at once where only a cloud's machine could have credentials and this is none; the library tries for long."""
    try:
        socket.create_connection(METADATA, timeout=1).close()
    except OSError:
        raise StoreUnavailable(
            f"no credentials for `{scheme}://` were found",
            facts=["looked in the environment, in the home folder, and for a cloud machine's own"],
            hint=f"`{_LOG_IN[scheme]}`",
            retryable=False,
        ) from None
