"""The start-up script of a machine that runs a job whose records are in a bucket.

At every boot it brings the job's programs from the objects `boot/SHA256` of the record root, with the machine's own
identity, and becomes the shim. It is alone on the machine, so it uses nothing of this package; Python 3.6 and later.
"""

import hashlib
import hmac
import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

PATIENCE_S = 900.0
"""How long in all it waits for the network, the clock, credentials and the bucket."""
FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 30.0
ANSWER_S = 20.0
MAY_PASS = (401, 403, 408, 409, 425, 429)
"""Refusals that pass, besides those from 500 on: rights that are minutes old, and signatures before the clock is set."""
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens addresses of the machine itself, which are behind no proxy."""


class GivesUp(Exception):
    """Waiting cannot help."""


def main(boot):
    """Bring `boot["files"]`, name to SHA-256, and become the shim of `boot["job"]`; returns only to report a failure."""
    try:
        os.makedirs(boot["folder"], 0o700, exist_ok=True)
        if boot.get("region"):
            os.environ.setdefault("RUNTIME_RECORDS_AWS_REGION", boot["region"])
        until = time.monotonic() + PATIENCE_S
        for name, digest in sorted(boot["files"].items()):
            bring(boot["records"], digest, os.path.join(boot["folder"], name), until)
        program, job = os.path.join(boot["folder"], "shim.py"), os.path.join(boot["folder"], boot["job"])
        words = [sys.executable, program, job, "--bucket", boot["records"]] + boot["args"]
        os.execv(words[0], words)
    except (GivesUp, OSError) as problem:
        say("gives up: %s" % problem)
        return 1


def bring(records, digest, path, until):
    """Fetch the object with this digest into a file. A file that exists and is whole is not fetched again, and the network is
    not used then."""
    if read_digest(path) == digest:
        return
    name, pause, said = os.path.basename(path), FIRST_PAUSE_S, ""
    while True:
        try:
            data = fetch(records, "boot/" + digest)
            break
        # Before a machine is quite up, a metadata server or a bucket may answer anything; any answer may pass.
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as problem:
            text = "cannot fetch %s: %s" % (name, problem or type(problem).__name__)
        if time.monotonic() + pause >= until:
            raise GivesUp(text)
        if text != said:
            say("%s; tries again" % text)
        said = text
        time.sleep(pause)
        pause = min(LAST_PAUSE_S, pause * 2)
    if hashlib.sha256(data).hexdigest() != digest:
        raise GivesUp("%s has other bytes than the ones that were launched" % name)
    with open(path + ".new", "wb") as opened:
        opened.write(data)
    os.replace(path + ".new", path)


def read_digest(path):
    """The digest of a file, empty if it cannot be read."""
    try:
        with open(path, "rb") as opened:
            return hashlib.sha256(opened.read()).hexdigest()
    except OSError:
        return ""


def fetch(records, key):
    """The bytes of an object of the record root, `gs://BUCKET/PREFIX` or `s3://BUCKET/PREFIX`."""
    scheme, _, place = records.partition("://")
    path = "/" + urllib.parse.quote("%s/%s" % (place.strip("/"), key), safe="/-_.~")
    if scheme == "gs":
        endpoint = variable("STORAGE_EMULATOR_HOST") or "https://storage.googleapis.com"
        endpoint = endpoint if "://" in endpoint else "http://" + endpoint
        headers = {"Authorization": "Bearer " + find_token()}
    else:
        region = variable("AWS_REGION") or variable("AWS_DEFAULT_REGION") or "us-east-1"
        endpoint = variable("AWS_ENDPOINT_URL_S3") or variable("AWS_ENDPOINT_URL")
        endpoint = (endpoint or "https://s3.%s.amazonaws.com" % region).rstrip("/")
        now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        headers = sign(find_keys(), region, urllib.parse.urlsplit(endpoint).netloc, path, now)
    try:
        return ask(urllib.request.urlopen, "GET", endpoint + path, headers)
    except urllib.error.HTTPError as problem:
        said = "%s/%s: the bucket answers %d %s" % (records, key, problem.code, problem.reason)
        if problem.code in MAY_PASS or problem.code >= 500:
            raise OSError(said)
        raise GivesUp(said)


def find_token():
    """A token of the machine's service account. https://cloud.google.com/compute/docs/access/authenticate-workloads"""
    place = os.environ.get("GCE_METADATA_HOST") or "169.254.169.254"
    url = "http://%s/computeMetadata/v1/instance/service-accounts/default/token" % place
    return json.loads(ask_machine("GET", url, {"Metadata-Flavor": "Google"}))["access_token"]


def find_keys():
    """The keys of the machine's role: id, secret and session token.
    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instance-metadata-security-credentials.html"""
    machine = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or "http://169.254.169.254"
    machine = machine.rstrip("/") + "/latest/"
    token = ask_machine("PUT", machine + "api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "300"})
    headers = {"X-aws-ec2-metadata-token": token}
    place = machine + "meta-data/iam/security-credentials/"
    keys = json.loads(ask_machine("GET", place + ask_machine("GET", place, headers).split()[0], headers))
    return keys["AccessKeyId"], keys["SecretAccessKey"], keys["Token"]


def ask_machine(method, url, headers):
    """The answer of the metadata server, as text. Every refusal may pass: a machine may get its role after its start."""
    try:
        return ask(DIRECT.open, method, url, headers).decode("utf-8")
    except OSError as problem:
        raise OSError("no credentials of the machine: %s" % problem)


def ask(opener, method, url, headers):
    with opener(urllib.request.Request(url, headers=headers, method=method), timeout=ANSWER_S) as answer:
        return answer.read()


def sign(keys, region, host, path, now):
    """The headers of a GET, signed. https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html"""
    key, secret, session = keys
    nothing = hashlib.sha256(b"").hexdigest()
    signed = {"host": host, "x-amz-content-sha256": nothing, "x-amz-date": now, "x-amz-security-token": session}
    names = ";".join(sorted(signed))
    lines = "".join("%s:%s\n" % (name, signed[name]) for name in sorted(signed))
    request = "\n".join(["GET", path, "", lines, names, nothing])
    scope = "%s/%s/s3/aws4_request" % (now[:8], region)
    text = "\n".join(["AWS4-HMAC-SHA256", now, scope, hashlib.sha256(request.encode("utf-8")).hexdigest()])
    made = ("AWS4" + secret).encode("utf-8")
    for word in scope.split("/"):
        made = hmac.new(made, word.encode("utf-8"), hashlib.sha256).digest()
    signature = hmac.new(made, text.encode("utf-8"), hashlib.sha256).hexdigest()
    words = "AWS4-HMAC-SHA256 Credential=%s/%s, SignedHeaders=%s, Signature=%s" % (key, scope, names, signature)
    return dict(signed, Authorization=words)


def variable(name):
    """A variable about the record root, empty if it is not set; the shim reads the same ones."""
    return os.environ.get("RUNTIME_RECORDS_" + name) or os.environ.get(name) or ""


def say(text):
    sys.stderr.write("boot: %s\n" % text)
    sys.stderr.flush()
