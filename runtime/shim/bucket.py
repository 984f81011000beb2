"""Objects of a bucket, `gs://BUCKET/PREFIX` or `s3://BUCKET/PREFIX`, with the standard library alone.

Both clouds have the same protocol, Google by its XML API. A file that only one process may make is written under a
precondition, so two shims on two machines agree as on a shared folder.
"""

import calendar
import email.utils
import errno
import http.client
import io
import os
import random
import re
import time
import urllib.error
import urllib.parse
import urllib.request
import xml.etree.ElementTree

from runtime.shim.cloud import MAY_PASS, Amazon, BucketDenied, BucketUnreachable, Google, NoCredentials, find_text
from runtime.shim.common import TransferStopped, say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Iterator, List, Optional, Set, Tuple

    Row = Tuple[str, Optional[int], str]
    """Whole key, size in bytes and time of an object; the size of a folder is None."""

PATIENCE_S = 900.0
"""How long requests to a bucket that does not answer are repeated."""
ANSWER_S = 60.0
PART_BYTES = 16 << 20
"""Size of the parts of larger files; S3 takes 10,000 parts."""
EXPIRED = ("ExpiredToken", "InvalidToken", "TokenRefreshRequired")
SKEWED = "RequestTimeTooSkewed"
CREDENTIALS_S = 60.0
"""How long credentials may be missing, as on a machine that has just started."""


class HttpFailure(Exception):
    """A status that is no success, or an error in the body of one that is."""

    def __init__(self, status, body, date=None):
        try:
            root = xml.etree.ElementTree.fromstring(body)
            self.code, text = find_text(root, "Code"), " ".join(find_text(root, name) for name in ("Code", "Message"))
        except xml.etree.ElementTree.ParseError:
            self.code, text = "", body[:200].decode("utf-8", "replace")
        Exception.__init__(self, "%d %s" % (status, text.strip()))
        self.status = status
        self.date = date


class Bucket(object):
    """Objects below one prefix. Every call may come from any thread, and raises `BucketUnreachable`."""

    answer_s = ANSWER_S
    say: "Callable[[str], None]" = staticmethod(say)

    def __init__(self, url: str) -> None:
        scheme, _, rest = url.partition("://")
        name, _, prefix = rest.partition("/")
        if scheme not in ("gs", "s3") or not name:
            raise ValueError("it is no gs://BUCKET/PREFIX or s3://BUCKET/PREFIX")
        self.cloud = Google() if scheme == "gs" else Amazon()
        self.name = name
        self.prefix = prefix.strip("/") + "/" if prefix.strip("/") else ""

    def get(self, key, patience=None):
        """The bytes of an object, None if there is none."""
        try:
            return self._ask("GET", key, patience=patience)
        except HttpFailure as answer:
            return self._none_of(answer, key)

    def download(self, key, path, give_up=None):
        """Save an object as a file; False if there is none. Raises `TransferStopped` once `give_up` comes true."""
        try:
            self._ask("GET", key, into=path, give_up=give_up)
            return True
        except HttpFailure as answer:
            return bool(self._none_of(answer, key))

    def put(self, key, data, patience=None):
        self._sure("PUT", key, data=data, patience=patience)

    def create(self, key, data, patience=None):
        """Create an object; returns whether this call made it, even if its answer was lost."""
        try:
            self._ask("PUT", key, data=data, headers=self.cloud.if_absent, patience=patience)
            return True
        except HttpFailure as answer:
            if answer.status != 412:
                raise BucketDenied("%s: %s" % (key, answer))
        # An object with the same bytes is our own: every object created here has a time or a token, or is empty.
        return bool(data) and self.get(key) == data

    def upload(self, key, path, patience=None, give_up=None):
        """Put a file of any size. Raises `TransferStopped` once `give_up` comes true."""
        more = {"patience": patience, "give_up": give_up}
        size = os.path.getsize(path)
        if size <= PART_BYTES:
            with io.open(path, "rb") as opened:
                self._sure("PUT", key, data=opened.read(), **more)
            return
        begun = self._sure("POST", key, query={"uploads": ""}, data=b"", **more)
        upload = find_text(xml.etree.ElementTree.fromstring(begun), "UploadId")
        part = max(PART_BYTES, -(-size // 10000))
        try:
            tags = []
            with io.open(path, "rb") as opened:
                for number in range(1, -(-size // part) + 1):
                    query = {"partNumber": str(number), "uploadId": upload}
                    tag = self._sure("PUT", key, query=query, data=opened.read(part), said="ETag", **more)
                    tags.append((number, tag))
            rows = ["<Part><PartNumber>%d</PartNumber><ETag>%s</ETag></Part>" % each for each in tags]
            whole = "<CompleteMultipartUpload>%s</CompleteMultipartUpload>" % "".join(rows)
            self._complete(key, upload, whole.encode("ascii"), size, patience)
        except BaseException:
            self._abandon(key, upload)
            raise

    def _complete(self, key, upload, whole, size, patience):
        try:
            self._ask("POST", key, query={"uploadId": upload}, data=whole, patience=patience)
        except HttpFailure as answer:
            # If the answer was lost, the next one reports that the upload does not exist any more.
            there = self._ask("HEAD", key, said="Content-Length") if answer.code == "NoSuchUpload" else None
            if there is None or int(there) != size:
                raise BucketDenied("%s: %s" % (key, answer))

    def _abandon(self, key, upload):
        try:
            self._ask("DELETE", key, query={"uploadId": upload}, patience=0.0)
        except (BucketUnreachable, HttpFailure):
            pass  # the bucket's own rule ends incomplete uploads

    def delete(self, key):
        try:
            self._ask("DELETE", key)
        except HttpFailure as answer:
            self._none_of(answer, key)

    def names(self, folder):
        """Sorted names of objects and folders in `folder`, which ends with a slash."""
        prefix = self.prefix + folder
        found = {key[len(prefix) :].rstrip("/") for page in self.pages(prefix, delimiter="/") for key, _, _ in page}
        return sorted(name for name in found if name)

    def pages(
        self,
        prefix: str,
        delimiter: "Optional[str]" = None,
        after: "Optional[str]" = None,
        patience: "Optional[float]" = None,
    ) -> "Iterator[List[Row]]":
        """Yield every object whose whole key begins with `prefix` and follows `after`, page by page.

        Keys with the same text up to a `delimiter` behind the prefix are one row. A listing is complete or raises
        `BucketUnreachable`: a page that is cut off, malformed or leads nowhere is requested again.
        """
        query = {"list-type": "2", "prefix": prefix}
        if delimiter:
            query["delimiter"] = delimiter
        if after:
            query["start-after"] = after
        tokens: Set[str] = set()
        while True:
            rows, token = self._sure(
                "GET", None, query=query, read=lambda body: read_page(body, tokens), patience=patience
            )
            yield rows
            if not token:
                return
            tokens.add(token)
            query["continuation-token"] = token

    def _none_of(self, answer, key):
        if answer.status != 404 or "NoSuchBucket" in str(answer):
            raise BucketDenied("%s: %s" % (key, answer))
        return

    def _sure(self, method, key, **more):
        try:
            return self._ask(method, key, **more)
        except HttpFailure as answer:
            raise BucketDenied("%s: %s" % (key or self.name, answer))

    def _ask(self, method, key, patience=None, give_up=None, **more):
        """Make a request, repeated while its failure may pass. Raises `HttpFailure` for one that will not."""
        began, pause, mended = time.time(), 0.2, set()
        until = began + (PATIENCE_S if patience is None else patience)
        problem: Optional[Exception] = None
        while True:
            if give_up is not None and give_up():
                raise TransferStopped(key)
            try:
                return self._ask_once(method, key, give_up=give_up, **more)
            except HttpFailure as answer:
                if (answer.status == 401 or answer.code in EXPIRED) and "key" not in mended:
                    mended.add("key")
                    self.cloud.forget()
                elif answer.code == SKEWED and answer.date and "clock" not in mended:
                    mended.add("clock")
                    self.cloud.skew = calendar.timegm(email.utils.parsedate(answer.date)) - time.time()
                elif answer.status not in MAY_PASS and answer.code != "RequestTimeout":
                    raise
                problem = answer
            except NoCredentials as found:
                problem = found
                if time.time() >= began + CREDENTIALS_S:
                    raise BucketDenied(str(found))
            except (IOError, OSError, http.client.HTTPException) as found:  # urllib's are subclasses
                if "CERTIFICATE_VERIFY_FAILED" in str(found):
                    raise BucketDenied("%s: %s; the image needs the certificates of public authorities" % (key, found))
                problem = found
            if time.time() + pause >= until:
                raise BucketUnreachable("%s: %s" % (key or self.name, problem))
            if 1.0 < pause <= 2.0:
                self.say("waits for the record root: %s: %s" % (key or self.name, problem))
            time.sleep(pause * (0.5 + random.random()))
            pause = min(30.0, pause * 2)

    def _ask_once(
        self, method, key, data=None, query=None, headers=None, into=None, said=None, read=None, give_up=None
    ):
        """The body of the answer, the result of `read` for it, or its header `said`."""
        path = "/" + self.name + ("" if key is None else "/" + self.prefix + key)
        path = urllib.parse.quote(path, safe="/-_.~")
        words = sorted((query or {}).items())
        text = "&".join("%s=%s" % tuple(urllib.parse.quote(each, safe="-_.~") for each in pair) for pair in words)
        headers = dict(headers or {})
        headers.update(self.cloud.sign(method, path, text, headers, data))
        url = self.cloud.endpoint + path + ("?" + text if text else "")
        request = urllib.request.Request(url, data=data, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=self.answer_s) as answer:
                if into is not None:
                    return _save(answer, into, give_up)
                if said is not None:
                    return answer.headers.get(said)
                body = answer.read()
        except urllib.error.HTTPError as problem:
            raise HttpFailure(problem.code, problem.read(), problem.headers.get("Date"))
        if method == "POST" and b"<Error>" in body[:1000]:
            raise HttpFailure(500, body)  # S3 answers the last request of an upload before its end
        return body if read is None else read(body)


def read_page(body, tokens):
    """The rows of a page of a listing, and the token of the next page or "". `tokens` are those of earlier pages.

    Raises `IOError` for a malformed page. U+FFFD stands for characters of a key that XML cannot hold.
    """
    text = _NO_XML.sub("\ufffd", _REFERENCE.sub(_readable, body.decode("utf-8", "replace")))
    try:
        root = xml.etree.ElementTree.fromstring(text)
        if root.tag.rpartition("}")[2] != "ListBucketResult":
            raise ValueError("it is %s" % root.tag)
        rows: List[Row] = []
        for each in root:
            kind = each.tag.rpartition("}")[2]
            if kind == "Contents":
                rows.append((find_text(each, "Key"), int(find_text(each, "Size")), find_text(each, "LastModified")))
            elif kind == "CommonPrefixes":
                rows.append((find_text(each, "Prefix"), None, ""))
    except (ValueError, xml.etree.ElementTree.ParseError) as problem:
        raise IOError(errno.EIO, "the answer is no page of a listing: %s" % problem)
    token = find_text(root, "NextContinuationToken")
    if token in tokens:
        raise IOError(errno.EIO, "a page of the listing leads back to an earlier one")
    if "\ufffd" in token or (find_text(root, "IsTruncated") == "true" and not token):
        raise IOError(errno.EIO, "a page of the listing says that more follows, and not where")
    return rows, token


_NO_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")
_REFERENCE = re.compile("&#(x[0-9a-fA-F]{1,6}|[0-9]{1,7});")


def _readable(reference):
    text = reference.group(1)
    number = int(text[1:], 16) if text.startswith("x") else int(text)
    if number > 0x10FFFF or 0xD800 <= number <= 0xDFFF or _NO_XML.match(chr(number)):
        return "\ufffd"
    return reference.group()


def _save(answer, path, give_up):
    """Save an answer's body as a file. Raises `IOError` for a body that was cut off."""
    size = 0
    with _write(path, lambda: io.open(path, "wb")) as opened:
        while True:
            if give_up is not None and give_up():
                raise TransferStopped(path)
            piece = answer.read(1 << 20)
            if not piece:
                break
            _write(path, lambda piece=piece: opened.write(piece))
            size += len(piece)
    wanted = answer.headers.get("Content-Length")
    if wanted is not None and int(wanted) != size:
        raise IOError(errno.EIO, "the answer was cut off after %d of %s bytes" % (size, wanted))


def _write(path, do):
    try:
        return do()
    except (IOError, OSError) as problem:
        raise BucketDenied("cannot write %s: %s" % (path, problem.strerror))
