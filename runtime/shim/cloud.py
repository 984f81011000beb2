"""Endpoints, credentials and signatures of the clouds with records, gs:// and s3://.

Credentials and endpoints come from the variables and files of the clouds' own tools, and from the machine.
"""

import base64
import calendar
import configparser
import errno
import hashlib
import hmac
import json
import os
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import xml.etree.ElementTree

from runtime.shim.files import read_json, read_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Optional

MAY_PASS = (408, 409, 425, 429, 500, 502, 503, 504)
OWN = "RUNTIME_RECORDS_"
"""Prefix of variables for the record root alone; commands do not see them."""
SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
FRESH_S = 300.0
"""How long before credentials end they are renewed."""


class BucketUnreachable(Exception):
    """The bucket did not answer in time; the text has its last words."""


class BucketDenied(BucketUnreachable):
    """The bucket refused, and would refuse again."""


class NoCredentials(IOError):
    """No source gives credentials now; a later attempt may succeed."""


def find_text(element, name):
    """The text of the first child with a name, in any namespace."""
    for each in element:
        if each.tag.rpartition("}")[2] == name:
            return each.text or ""
    return ""


class Cloud(object):
    """An endpoint and its credentials, which are found on first use and kept until they end."""

    def __init__(self, endpoint, if_absent):
        self.endpoint = endpoint.rstrip("/")
        self.if_absent = if_absent
        """Headers of a write that creates and never replaces."""
        self.lock = threading.Lock()
        self.known: Optional[Any] = None
        self.ends = 0.0
        self.skew = 0.0
        """How far the service's clock is ahead of ours, in seconds, if it reported that."""

    def credentials(self):
        with self.lock:
            if self.known is None or time.time() >= self.ends - FRESH_S:
                try:
                    self.known, self.ends = self.find()
                except (IOError, OSError, ValueError, KeyError, StopIteration, SyntaxError) as problem:
                    if self.known is None or time.time() >= self.ends:
                        raise NoCredentials(errno.EIO, "no credentials: %s" % problem)
            return self.known

    def find(self):
        """The credentials for `sign`, and their end in seconds since 1970."""
        raise NotImplementedError

    def forget(self):
        with self.lock:
            self.known = None


def variable(name):
    """A variable about the bucket or its credentials, empty if it is not set."""
    return os.environ.get(OWN + name) or os.environ.get(name) or ""


class Google(Cloud):
    """https://cloud.google.com/storage/docs/xml-api/overview"""

    def __init__(self, scope=SCOPE):
        self.scope = scope
        emulator = variable("STORAGE_EMULATOR_HOST")
        if emulator and "://" not in emulator:
            emulator = "http://" + emulator
        self.emulated = bool(emulator)
        Cloud.__init__(self, emulator or "https://storage.googleapis.com", {"x-goog-if-generation-match": "0"})

    def sign(self, method, path, query, headers, data):
        return {"Authorization": "Bearer " + self.credentials(), "Content-Type": "application/octet-stream"}

    def find(self):
        """A token and its end."""
        if self.emulated:
            return "anonymous", time.time() + 1e9
        named = ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH", "GOOGLE_APPLICATION_CREDENTIALS")
        path = next(filter(None, map(variable, named)), "")
        usual = os.path.expanduser("~/.config/gcloud/application_default_credentials.json")
        if not path and os.path.exists(usual):
            path = usual
        if variable("GOOGLE_SERVICE_ACCOUNT_KEY"):
            path, about = "GOOGLE_SERVICE_ACCOUNT_KEY", json.loads(variable("GOOGLE_SERVICE_ACCOUNT_KEY"))
        elif path:
            try:
                about = read_json(path)
            except (IOError, OSError) as problem:
                raise BucketDenied("cannot read %s: %s" % (path, problem.strerror))
        else:
            return _read_token(ask_account("token"))
        if about.get("type") == "authorized_user":
            form = {name: about[name] for name in ("client_id", "client_secret", "refresh_token")}
            return _token("https://oauth2.googleapis.com/token", {}, dict(form, grant_type="refresh_token"))
        if about.get("type") == "service_account":
            form = {
                "grant_type": "urn:ietf:params:oauth:grant-type:jwt-bearer",
                "assertion": _assertion(about, self.scope),
            }
            return _token(about.get("token_uri") or "https://oauth2.googleapis.com/token", {}, form)
        raise BucketDenied("credentials of type %s in %s are not read here" % (about.get("type"), path))


def _token(url, headers, form):
    return _read_token(fetch(url, headers, urllib.parse.urlencode(form).encode("ascii")))


def _read_token(body):
    said = json.loads(body.decode("utf-8"))
    return said["access_token"], time.time() + float(said["expires_in"])


def ask_account(what):
    """Ask Google's metadata server for this machine's account: its `token` or `email`."""
    place = variable("GCE_METADATA_HOST") or "metadata.google.internal"
    url = "http://%s/computeMetadata/v1/instance/service-accounts/default/%s" % (place, what)
    return fetch(url, {"Metadata-Flavor": "Google"})


def _assertion(about, scope):
    """The text that a service account signs for a token; openssl signs, since the standard library has no RSA."""
    now = int(time.time())
    claims = {"iss": about["client_email"], "scope": scope, "iat": now, "exp": now + 3600}
    claims["aud"] = about.get("token_uri") or "https://oauth2.googleapis.com/token"
    header = {"alg": "RS256", "typ": "JWT", "kid": about.get("private_key_id", "")}
    text = b".".join(_base64url(json.dumps(each).encode("utf-8")) for each in (header, claims))
    reading, writing = os.pipe()
    try:
        os.write(writing, about["private_key"].encode("ascii"))
        os.close(writing)
        child = subprocess.Popen(
            ["openssl", "dgst", "-sha256", "-sign", "/dev/fd/%d" % reading],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[reading],
        )
        signature, said = child.communicate(text)
    except OSError as problem:
        raise BucketDenied("the key of a service account needs openssl here: %s" % problem.strerror)
    finally:
        os.close(reading)
    if child.returncode != 0:
        raise BucketDenied("openssl cannot sign: %s" % said.decode("utf-8", "replace").strip())
    return (text + b"." + _base64url(signature)).decode("ascii")


def _base64url(data):
    return base64.urlsafe_b64encode(data).rstrip(b"=")


class Amazon(Cloud):
    """https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-authenticating-requests.html"""

    def __init__(self, region: "Optional[str]" = None) -> None:
        self.region = region or variable("AWS_REGION") or variable("AWS_DEFAULT_REGION") or "us-east-1"
        own = variable("AWS_ENDPOINT_URL_S3") or variable("AWS_ENDPOINT_URL")
        Cloud.__init__(self, own or "https://s3.%s.amazonaws.com" % self.region, {"If-None-Match": "*"})

    def sign(self, method, path, query, headers, data):
        """The headers that sign method, path, query and body."""
        key, secret, session = self.credentials()
        now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(time.time() + self.skew))
        signed = {
            "host": urllib.parse.urlsplit(self.endpoint).netloc,
            "x-amz-content-sha256": hashlib.sha256(data or b"").hexdigest(),
            "x-amz-date": now,
        }
        if session:
            signed["x-amz-security-token"] = session
        for name, value in headers.items():
            signed[name.lower()] = value
        names = ";".join(sorted(signed))
        lines = "".join("%s:%s\n" % (name, signed[name]) for name in sorted(signed))
        request = "\n".join([method, path, query, lines, names, signed["x-amz-content-sha256"]])
        scope = "%s/%s/s3/aws4_request" % (now[:8], self.region)
        digest = hashlib.sha256(request.encode("utf-8")).hexdigest()
        text = "\n".join(["AWS4-HMAC-SHA256", now, scope, digest])
        made = ("AWS4" + secret).encode("utf-8")
        for word in scope.split("/"):
            made = hmac.new(made, word.encode("utf-8"), hashlib.sha256).digest()
        signature = hmac.new(made, text.encode("utf-8"), hashlib.sha256).hexdigest()
        words = "AWS4-HMAC-SHA256 Credential=%s/%s, SignedHeaders=%s, Signature=%s" % (key, scope, names, signature)
        del signed["host"]
        return dict(signed, Authorization=words, **{"Content-Type": "application/octet-stream"})

    def find(self):
        """(key id, secret, session token or None) and their end."""
        if variable("AWS_ACCESS_KEY_ID"):
            known = variable("AWS_ACCESS_KEY_ID"), variable("AWS_SECRET_ACCESS_KEY")
            return known + (variable("AWS_SESSION_TOKEN") or None,), time.time() + 1e9
        if variable("AWS_WEB_IDENTITY_TOKEN_FILE"):
            return self._by_web_identity()
        if variable("AWS_CONTAINER_CREDENTIALS_FULL_URI") or variable("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"):
            return _by_container()
        return _by_file() or _by_machine()

    def _by_web_identity(self):
        token = read_text(variable("AWS_WEB_IDENTITY_TOKEN_FILE")).strip()
        form = {
            "Action": "AssumeRoleWithWebIdentity",
            "Version": "2011-06-15",
            "RoleArn": variable("AWS_ROLE_ARN"),
            "RoleSessionName": variable("AWS_ROLE_SESSION_NAME") or "research-runtime",
            "WebIdentityToken": token,
        }
        url = variable("AWS_ENDPOINT_URL_STS") or "https://sts.%s.amazonaws.com/" % self.region
        said = xml.etree.ElementTree.fromstring(fetch(url, {}, urllib.parse.urlencode(form).encode("ascii")))
        found = next(each for each in said.iter() if each.tag.rpartition("}")[2] == "Credentials")
        words = [find_text(found, name) for name in ("AccessKeyId", "SecretAccessKey", "SessionToken")]
        return tuple(words), _seconds(find_text(found, "Expiration"))


def _by_container():
    url = variable("AWS_CONTAINER_CREDENTIALS_FULL_URI")
    url = url or "http://169.254.170.2" + variable("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
    token = variable("AWS_CONTAINER_AUTHORIZATION_TOKEN")
    if variable("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"):
        token = read_text(variable("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE")).strip()
    return _of_json(fetch(url, {"Authorization": token} if token else {}))


def _by_file():
    path = variable("AWS_SHARED_CREDENTIALS_FILE") or os.path.expanduser("~/.aws/credentials")
    parser = configparser.RawConfigParser()
    profile = variable("AWS_PROFILE") or "default"
    if not parser.read(path) or not parser.has_option(profile, "aws_access_key_id"):
        return None
    about = dict(parser.items(profile))
    known = (about["aws_access_key_id"], about.get("aws_secret_access_key", ""), about.get("aws_session_token"))
    return known, time.time() + 1e9


def _by_machine():
    machine = (variable("AWS_EC2_METADATA_SERVICE_ENDPOINT") or "http://169.254.169.254").rstrip("/")
    ask = urllib.request.Request(machine + "/latest/api/token", method="PUT", data=b"")
    ask.add_header("X-aws-ec2-metadata-token-ttl-seconds", "21600")
    token = {"X-aws-ec2-metadata-token": _open(ask).decode("ascii")}
    place = machine + "/latest/meta-data/iam/security-credentials/"
    return _of_json(fetch(place + fetch(place, token).decode("ascii").split()[0], token))


def _of_json(body):
    said = json.loads(body.decode("utf-8"))
    return (said["AccessKeyId"], said["SecretAccessKey"], said.get("Token")), _seconds(said["Expiration"])


def _seconds(text):
    return calendar.timegm(time.strptime(text[:19], "%Y-%m-%dT%H:%M:%S"))


def fetch(url, headers, data=None):
    """The body at an address that gives credentials."""
    return _open(urllib.request.Request(url, data=data, headers=headers))


NEAR = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens addresses of the machine itself, which are behind no proxy."""


def _open(request):
    opener = NEAR.open if request.type == "http" else urllib.request.urlopen
    try:
        with opener(request, timeout=10) as answer:
            return answer.read()
    except urllib.error.HTTPError as problem:
        if problem.code in MAY_PASS:
            raise
        raise BucketDenied("no credentials: %s said %d" % (request.host, problem.code))
    except (urllib.error.URLError, socket.timeout) as problem:
        raise IOError(errno.EIO, "no credentials: %s does not answer: %s" % (request.host, problem))
