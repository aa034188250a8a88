# SPDX-License-Identifier: Apache-2.0
"""Temporary credentials of STS, containers, machines, Google and Azure, and their renewal."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import pathlib
import subprocess
import time
import urllib.parse
from collections.abc import Iterator

import numpy
import pytest
from object_store import ObjectStore, failure, mark, object_store, signature
from web_server import Answer, Request, web_server

from fastsafetensors import numpy as fst_numpy
from fastsafetensors import remote
from fastsafetensors._core import Model

MODEL_URL = "s3://bucket/m.safetensors"
OBJECT_PATH = "/bucket/m.safetensors"


@pytest.fixture(autouse=True)
def home(own_home: pathlib.Path) -> pathlib.Path:
    """An empty home directory, without the machine's settings."""
    remote.configure(retry_base_ms=2)
    (own_home / ".aws").mkdir()
    return own_home


class Issuer:
    """Issues KEYn with SECRETn, n = 1, 2, ... `good`: {key: secret} that the store accepts."""

    def __init__(self) -> None:
        """Start without issued credentials."""
        self.count = 0
        self.good: dict[str, str] = {}
        self.life_s = 3600
        self.requests: list[Request] = []
        self.refusals: list[str] = []

    def issue(self) -> dict[str, str]:
        """New keys."""
        self.count += 1
        key, secret = f"KEY{self.count}", f"SECRET{self.count}"
        self.good[key] = secret
        date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + self.life_s))
        return {
            "AccessKeyId": key,
            "SecretAccessKey": secret,
            "Token": "T/+=",
            "Expiration": date,
        }

    def sts(self, request: Request, answer: Answer) -> Answer:
        """Answer requests to STS: a form, answered by XML. AssumeRole requests must be signed."""
        self.requests.append(request)
        form = dict(urllib.parse.parse_qsl(request.body.decode()))
        keys = self.issue()
        if form["Action"] == "AssumeRole":
            code = signature(request, "SOURCESECRET")
            if code:
                return failure("403 Forbidden", code)
        elif form["WebIdentityToken"] != "WEB TOKEN":
            return failure("400 Bad Request", "InvalidIdentityToken")
        keys["SessionToken"] = keys.pop("Token")
        rows = "".join(f"<{name}>{value}</{name}>" for name, value in keys.items())
        text = f"<A><B><Credentials>{rows}</Credentials></B></A>"
        return Answer("200 OK", {}, text.encode())

    def machine(self, request: Request, answer: Answer) -> Answer:
        """Answer requests to IMDSv2 and to the containers' credential endpoint."""
        self.requests.append(request)
        if request.method == "PUT":
            return Answer("200 OK", {}, b"SESSION")
        if request.path == "/container":
            if request.headers.get("authorization") != "CONTAINER":
                return failure("401 Unauthorized", "No")
            return Answer("200 OK", {}, json.dumps(self.issue()).encode())
        if request.headers.get("x-aws-ec2-metadata-token") != "SESSION":
            return failure("401 Unauthorized", "No")
        if request.path.endswith("/"):
            return Answer("200 OK", {}, b"the-role")
        return Answer("200 OK", {}, json.dumps(self.issue()).encode())


@pytest.fixture
def service() -> Issuer:
    """A credential service for one test."""
    return Issuer()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file of two tensors, which take several requests."""
    file = tmp_path_factory.mktemp("model") / "m.safetensors"
    value = numpy.arange(9 << 20, dtype=numpy.uint8)
    fst_numpy.save_file({"a": value, "b": value}, file)
    return file.read_bytes()


@pytest.fixture
def store(service: Issuer, model: bytes) -> Iterator[ObjectStore]:
    """A store that accepts temporary credentials, with a model."""
    with object_store(keys=service.good) as server:
        service.good["OWNER"] = "OWNERSECRET"
        server.objects[OBJECT_PATH] = (model, mark(model))
        remote.configure(endpoint=server.url, retry_base_ms=2)
        yield server


def names() -> list[str]:
    """Return the names of the model's tensors."""
    model = Model(MODEL_URL)
    try:
        return sorted(model.names())
    finally:
        model.close()


def test_web_identity(
    store: ObjectStore, service: Issuer, home: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token file is exchanged for a role's keys by one unsigned request, also for many files. A
    bad token is an error."""
    (home / "token").write_text("WEB TOKEN\n")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(home / "token"))
    with pytest.raises(Exception, match="AWS_ROLE_ARN is not"):
        names()
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/web identity")
    with web_server(home, service.sts) as sts:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", sts.url)
        assert names() == ["a", "b"] and names() == ["a", "b"]
        assert len(service.requests) == 1 and "authorization" not in service.requests[0].headers
        assert store.log[-1].headers["x-amz-security-token"] == "T/+="
        monkeypatch.setenv("AWS_ROLE_SESSION_NAME", "another")
        (home / "token").write_text("WRONG SECRET TOKEN")
        with pytest.raises(PermissionError, match="InvalidIdentityToken") as caught:
            names()
        assert "WRONG" not in str(caught.value)


def test_a_role_of_a_profile(
    store: ObjectStore, service: Issuer, home: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """role_arn and source_profile lead to a request that is signed with the source profile's
    keys."""
    (home / ".aws" / "config").write_text(
        "[profile worker]\nrole_arn = arn:aws:iam::1:role/x\nsource_profile = base\n"
        "external_id = e=1\nregion = eu-west-1\n[profile code]\nrole_arn = r\nmfa_serial = m\n"
    )
    (home / ".aws" / "credentials").write_text(
        "[base]\naws_access_key_id = SOURCE\naws_secret_access_key = SOURCESECRET\n"
    )
    monkeypatch.setenv("AWS_PROFILE", "worker")
    with web_server(home, service.sts) as sts:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", sts.url)
        assert names() == ["a", "b"]
    assert "/eu-west-1/sts/aws4_request" in service.requests[0].headers["authorization"]
    assert "ExternalId=e%3D1" in service.requests[0].body.decode()
    monkeypatch.setenv("AWS_PROFILE", "code")
    with pytest.raises(Exception, match="mfa_serial"):
        names()


def test_container_credentials(
    store: ObjectStore, service: Issuer, home: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The endpoint of containers, with a token from a file. Other hosts than the machine itself
    need TLS."""
    with web_server(home, service.machine) as server:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", server.url + "container")
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN", "WRONG")
        with pytest.raises(PermissionError, match="no credentials available"):
            names()
        (home / "token").write_text("CONTAINER")
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(home / "token"))
        assert names() == ["a", "b"]
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://example.com/x")
        with pytest.raises(Exception, match="neither https nor a local address"):
            names()


def test_instance_metadata(
    store: ObjectStore, service: Issuer, home: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """IMDSv2 needs a token first. A silent service costs a second, and a disabled one gets no
    request."""
    with web_server(home, service.machine) as server:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", server.url)
        with pytest.raises(Exception, match="no credentials for S3"):
            names()
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "false")
        assert names() == ["a", "b"]
    assert [r.method for r in service.requests] == ["PUT", "GET", "GET"]
    requests: list[Request] = []

    def silent(request: Request, answer: Answer) -> Answer:
        requests.append(request)
        return Answer(end="silent", pause_within_s=300)

    with web_server(home, silent) as server:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", server.url)
        with pytest.raises(PermissionError, match="no credentials available"):
            names()
    assert len(requests) == 1


@pytest.mark.parametrize(
    ("name", "byte"),
    [("AccessKeyId", "\n"), ("SecretAccessKey", "\x7f"), ("Token", "\r"), ("the-role", "\x01")],
)
def test_line_breaks_in_credentials(
    store: ObjectStore, service: Issuer, monkeypatch: pytest.MonkeyPatch, name: str, byte: str
) -> None:
    """Credentials with line breaks are rejected, because they could add header lines to every
    request."""
    store.log.clear()
    text = f"X{byte}Evil: 1"

    def fault(request: Request, answer: Answer) -> Answer:
        if name == "the-role" and request.path.endswith("/"):
            return Answer("200 OK", {}, f"ro{byte}le".encode())
        answer = service.machine(request, answer)
        if request.method == "GET" and not request.path.endswith("/"):
            answer.body = json.dumps({**json.loads(answer.body), name: text}).encode()
        return answer

    with web_server(pathlib.Path(), fault) as machine:
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "false")
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", machine.url)
        remote.configure(endpoint=store.url)
        with pytest.raises(PermissionError, match="no credentials|no role"):
            Model(MODEL_URL)
    assert not store.log


def test_line_breaks_in_sts_credentials(
    store: ObjectStore,
    service: Issuer,
    home: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Line breaks in STS credentials are rejected also as XML character references."""
    store.log.clear()

    def fault(request: Request, answer: Answer) -> Answer:
        answer = service.sts(request, answer)
        answer.body = answer.body.replace(b"T/+=", b"T&#13;&#10;X-Evil: 1")
        return answer

    (home / "token").write_text("WEB TOKEN")
    with web_server(pathlib.Path(), fault) as sts:
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(home / "token"))
        monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/r")
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", sts.url)
        remote.configure(endpoint=store.url)
        with pytest.raises(PermissionError, match="STS returned no credentials"):
            Model(MODEL_URL)
    assert not store.log


def test_credentials_expire_during_a_load(
    store: ObjectStore, service: Issuer, home: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After ExpiredToken the credentials are renewed once for all requests, and the load continues.
    A second time is an error."""
    (home / "token").write_text("WEB TOKEN")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(home / "token"))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:renewed")
    served: list[str] = []

    def refuse(request: Request) -> Answer | None:
        served.append(request.headers.get("authorization", ""))
        is_old = "Credential=KEY1/" in served[-1]
        return failure("400 Bad Request", "ExpiredToken") if is_old and len(served) > 2 else None

    with web_server(home, service.sts) as sts:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", sts.url)
        store.refuse = refuse
        loaded = fst_numpy.load_file(MODEL_URL)
        assert len(loaded["b"]) == 9 << 20 and service.count == 2
        store.refuse = lambda request: failure("400 Bad Request", "ExpiredToken")
        with pytest.raises(OSError, match="ExpiredToken"):
            names()
    with web_server(home, service.sts) as sts:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", sts.url)
        store.refuse = lambda request: None
        # less than five minutes are left: the first use starts a renewal in the background
        service.life_s = 200
        count = service.count
        assert names() == ["a", "b"]
        end = time.monotonic() + 120
        while service.count < count + 2 and time.monotonic() < end:
            time.sleep(0.02)
        assert service.count == count + 2


def test_clock_skew(store: ObjectStore) -> None:
    """After RequestTimeTooSkewed the request is signed with the server's date and retried once."""
    dates: list[str] = []

    def refuse(request: Request) -> Answer | None:
        dates.append(request.headers["x-amz-date"])
        if dates[-1].startswith("20330518"):
            return None
        answer = failure("403 Forbidden", "RequestTimeTooSkewed")
        answer.headers["Date"] = "Wed, 18 May 2033 03:33:20 GMT"
        return answer

    remote.configure(endpoint=store.url, access_key="OWNER", secret_key="OWNERSECRET")
    store.refuse = refuse
    assert names() == ["a", "b"] and len(dates) == 2
    store.refuse = lambda request: (
        None
        if request.headers["x-amz-date"].startswith("2033") is False
        else Answer("403 Forbidden", {}, b"<Error><Code>RequestTimeTooSkewed</Code></Error>")
    )

    def back(request: Request) -> Answer | None:
        if not request.headers["x-amz-date"].startswith("2033"):
            return None
        answer = failure("403 Forbidden", "RequestTimeTooSkewed")
        answer.headers["Date"] = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime())
        return answer

    store.refuse = back
    assert names() == ["a", "b"]


@pytest.mark.parametrize(
    "status", ["301 Moved Permanently", "307 Temporary Redirect", "400 Bad Request"]
)
def test_another_region(store: ObjectStore, status: str) -> None:
    """If a response names another region, the request is signed for that region and sent once more.
    Checked for reads, small and large saves, listings and deletes."""
    remote.configure(endpoint=store.url, access_key="OWNER", secret_key="OWNERSECRET")
    refused: set[str] = set()

    def refuse(request: Request) -> Answer | None:
        if "/eu-north-1/s3/" in request.headers["authorization"]:
            return None
        refused.add(request.method)
        answer = failure(status, "AuthorizationHeaderMalformed")
        answer.headers["x-amz-bucket-region"] = "eu-north-1"
        if status.startswith("3"):
            answer.headers["Location"] = f"http://localhost:{store.server_address[1]}/elsewhere"
        return answer

    store.refuse = refuse
    assert names() == ["a", "b"]
    for count in (20 << 20, 20):
        value = numpy.zeros(count, numpy.uint8)
        fst_numpy.save_file({"x": value}, "s3://bucket/dir/m.safetensors")
        assert len(fst_numpy.load_file("s3://bucket/dir/")["x"]) == count
    assert refused == {"GET", "PUT", "POST"}
    store.refuse = lambda request: Answer(status, {"x-amz-bucket-region": "eu-west-9"})
    with pytest.raises(OSError, match=status[:3]):
        names()
    with pytest.raises(OSError, match=status[:3]):
        fst_numpy.save_file({"x": value}, "s3://bucket/dir/m.safetensors")
    assert all(r.path != "/elsewhere" for r in store.log)


def test_object_version(store: ObjectStore) -> None:
    """versionId is in every request for that object, and not in requests for other names."""
    remote.configure(endpoint=store.url, access_key="OWNER", secret_key="OWNERSECRET")
    store.log.clear()
    fst_numpy.load_file(MODEL_URL + "?versionId=3sL4kqtJlcpXroDTDmJ.rmSpXd3dIbrHY")
    assert len(store.log) > 2
    assert {r.query for r in store.log} == {"versionId=3sL4kqtJlcpXroDTDmJ.rmSpXd3dIbrHY"}
    with pytest.raises(ValueError, match="can't be overwritten"):
        fst_numpy.save_file({"a": numpy.zeros(3)}, MODEL_URL + "?versionId=1")
    for query in ("?versionId=a&b=c", "?versionid=1", "?versionId="):
        with pytest.raises(ValueError, match="queries are not supported"):
            Model(MODEL_URL + query)


def test_google(home: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Google's credentials: gcloud's user, a service account (with a check of its claim), and the
    machine."""
    requests: list[dict[str, str]] = []

    def tokens(request: Request, answer: Answer) -> Answer:
        form = dict(urllib.parse.parse_qsl(request.body.decode()))
        requests.append({**form, **request.headers})
        token = {"access_token": f"ya29.{len(requests)}", "expires_in": 3599, "x": {"a": [1, "}"]}}
        return Answer("200 OK", {}, json.dumps(token).encode())

    with object_store() as server, web_server(home, tokens) as google:
        remote.configure(endpoint=server.url)
        fst_numpy.save_file({"a": numpy.zeros(3)}, "gs://bucket/m.safetensors")
        assert "authorization" not in server.log[-1].headers
        file = home / "adc.json"
        user = {
            "type": "authorized_user",
            "client_id": "i",
            "client_secret": "s=",
            "refresh_token": "1//r",
            "token_uri": google.url + "token",
        }
        file.write_text(json.dumps(user))
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
        Model("gs://bucket/m.safetensors").close()
        assert server.log[-1].headers["authorization"] == "Bearer ya29.1"
        assert requests[0]["refresh_token"] == "1//r" and requests[0]["client_secret"] == "s="
        key = subprocess.run(["openssl", "genrsa", "2048"], capture_output=True, check=True).stdout
        (home / "key.pem").write_bytes(key)
        account = {
            "type": "service_account",
            "client_email": "me@x.iam",
            "private_key_id": "k",
            "private_key": key.decode(),
            "token_uri": google.url + "token",
        }
        file = home / "account.json"
        file.write_text(json.dumps(account))
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
        Model("gs://bucket/m.safetensors").close()
        head, claims, sign = requests[1]["assertion"].split(".")
        payload = json.loads(base64.urlsafe_b64decode(claims + "=="))
        assert payload["iss"] == "me@x.iam" and payload["exp"] - payload["iat"] == 3600
        (home / "sign").write_bytes(base64.urlsafe_b64decode(sign + "=="))
        (home / "text").write_text(f"{head}.{claims}")
        check = ["openssl", "dgst", "-sha256", "-prverify", "key.pem", "-signature", "sign", "text"]
        subprocess.run(check, cwd=home, check=True, capture_output=True)
        monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS")
        monkeypatch.setenv("GCE_METADATA_HOST", google.url.removeprefix("http://").rstrip("/"))
        Model("gs://bucket/m.safetensors").close()
        assert requests[2]["metadata-flavor"] == "Google"
        (home / "bad.json").write_text('{"type": "external_account"}')
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(home / "bad.json"))
        with pytest.raises(Exception, match="unsupported type"):
            Model("gs://bucket/m.safetensors")


def shared_key(request: Request, account: str, key: bytes) -> str:
    """Return the Authorization header that the specification requires for a request."""
    h = request.headers
    length = str(len(request.body)) if request.body else ""
    lines = [request.method, "", "", length, "", h.get("content-type", ""), "", ""]
    lines += [h.get("if-match", ""), h.get("if-none-match", ""), "", h.get("range", "")]
    lines += [f"{name}:{h[name]}" for name in sorted(h) if name.startswith("x-ms-")]
    text = "\n".join(lines) + f"\n/{account}{request.path}"
    pairs = urllib.parse.parse_qsl(request.query, keep_blank_values=True)
    text += "".join(f"\n{name}:{value}" for name, value in sorted(pairs))
    sign = hmac.new(key, text.encode(), hashlib.sha256).digest()
    return f"SharedKey {account}:{base64.b64encode(sign).decode()}"


def test_azure(home: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Azure's credentials: the account's key (with a check of each signature), a connection string,
    and identities."""
    key = bytes(range(200, 264 - 8)) + b"12345678"
    text = base64.b64encode(key).decode()
    wanted: dict[str, str] = {}

    def refuse(request: Request) -> Answer | None:
        given = request.headers.get("authorization", "")
        good = wanted.get("bearer") or shared_key(request, "acct", key)
        return None if given == good else failure("403 Forbidden", "AuthenticationFailed")

    with object_store() as server:
        server.refuse = refuse
        remote.configure(endpoint=server.url, account="acct", account_key=text)
        value = {"a": numpy.zeros(20 << 20, numpy.uint8)}
        for name in ("m", "model"):
            fst_numpy.save_file(value, f"az://box/dir x/{name}.safetensors")
        fst_numpy.save_file({"b": numpy.zeros(4)}, "az://box/dir x/m.safetensors")
        assert list(fst_numpy.load_file("az://box/dir x/model.safetensors")) == ["a"]
        assert "b" in fst_numpy.load_file("az://box/dir x/")
        remote.configure()
        monkeypatch.setenv(
            "AZURE_STORAGE_CONNECTION_STRING",
            f"AccountName=acct;AccountKey={text};BlobEndpoint={server.url}acct;",
        )
        assert list(fst_numpy.load_file("az://box/dir x/model.safetensors")) == ["a"]
        monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING")
        with pytest.raises(ValueError, match="base64"):
            remote.configure(endpoint=server.url, account="acct", account_key="not base64!")
        requests: list[Request] = []

        def identity(request: Request, answer: Answer) -> Answer:
            requests.append(request)
            expiry = str(int(time.time()) + 999)
            token = {"access_token": f"az.{len(requests)}", "expires_on": expiry}
            return Answer("200 OK", {}, json.dumps(token).encode())

        remote.configure(endpoint=server.url, account="acct")
        with web_server(home, identity) as machine:
            monkeypatch.setenv("IDENTITY_ENDPOINT", machine.url + "token")
            monkeypatch.setenv("IDENTITY_HEADER", "HEADER")
            wanted["bearer"] = "Bearer az.1"
            Model("az://box/dir x/model.safetensors").close()
            assert requests[0].headers["x-identity-header"] == "HEADER"
            assert "resource=https%3A%2F%2Fstorage.azure.com%2F" in requests[0].query
            (home / "federated").write_text("JWT")
            monkeypatch.setenv("AZURE_FEDERATED_TOKEN_FILE", str(home / "federated"))
            monkeypatch.setenv("AZURE_TENANT_ID", "tenant")
            monkeypatch.setenv("AZURE_CLIENT_ID", "client")
            monkeypatch.setenv("AZURE_AUTHORITY_HOST", machine.url)
            wanted["bearer"] = "Bearer az.2"
            Model("az://box/dir x/model.safetensors").close()
            assert requests[1].path == "/tenant/oauth2/v2.0/token"
            assert b"client_assertion=JWT" in requests[1].body
