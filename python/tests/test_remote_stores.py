# SPDX-License-Identifier: Apache-2.0
"""Object stores: names, listings, credentials and signatures, with servers that check them."""

from __future__ import annotations

import json
import pathlib
import urllib.parse
from collections.abc import Iterator
from contextlib import closing
from xml.sax.saxutils import escape

import numpy
import pytest
from object_store import KEY, SECRET, signature
from web_server import Answer, Fault, Request, web_server

from fastsafetensors import numpy as fst_numpy
from fastsafetensors import remote
from fastsafetensors._core import Model

VARIABLES = [
    *("AWS_" + name for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN", "REGION")),
    *("AWS_" + name for name in ("DEFAULT_REGION", "ENDPOINT_URL", "ENDPOINT_URL_S3", "PROFILE")),
    *("AWS_WEB_IDENTITY_TOKEN_FILE", "HF_TOKEN", "HF_ENDPOINT", "GOOGLE_OAUTH_ACCESS_TOKEN"),
    *("STORAGE_EMULATOR_HOST", "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_SAS_TOKEN"),
]


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Iterator[None]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    yield
    remote.configure()


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """A bucket with a folder of two files."""
    model = tmp_path / "bucket" / "my model"
    model.mkdir(parents=True)
    for i in range(2):
        value = numpy.full((400, 300), i, numpy.float32)
        fst_numpy.save_file({f"t{i}": value}, model / f"model-0000{i + 1}-of-00002.safetensors")
    (model / "deeper").mkdir()
    fst_numpy.save_file({"x": numpy.zeros(1)}, model / "deeper" / "other.safetensors")
    return tmp_path


def listing(folder: pathlib.Path, request: Request, page: int = 1) -> Answer:
    """ListObjectsV2, a key a page."""
    query = dict(urllib.parse.parse_qsl(request.query, keep_blank_values=True))
    bucket = folder / request.path.strip("/")
    prefix = query["prefix"]
    keys = sorted(
        str(file.relative_to(bucket))
        for file in bucket.rglob("*.safetensors")
        if str(file.relative_to(bucket)).startswith(prefix)
    )
    keys = [key for key in keys if "/" not in key[len(prefix) :]]
    first = int(query.get("continuation-token", "0=")[:-1])
    entries = "".join(
        f"<Contents><Key>{escape(key)}</Key></Contents>" for key in keys[first : first + page]
    )
    more = first + page < len(keys)
    token = f"<NextContinuationToken>{first + page}=</NextContinuationToken>" if more else ""
    text = f"<?xml version='1.0'?><ListBucketResult>{entries}{token}</ListBucketResult>"
    return Answer("200 OK", {}, text.encode())


def store(folder: pathlib.Path) -> Fault:
    """An S3 that checks signatures, and lists."""

    def fault(request: Request, answer: Answer) -> Answer:
        if "authorization" not in request.headers:
            return Answer("403 Forbidden", {}, b"<Error><Code>AccessDenied</Code></Error>")
        code = signature(request, SECRET)
        if code:
            return Answer("403 Forbidden", {}, f"<Error><Code>{code}</Code></Error>".encode())
        return listing(folder, request) if "list-type" in request.query else answer

    return fault


def test_a_folder_of_s3(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listed page by page, files below it left out, every request signed."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "TOKEN/+=")
    with web_server(folder, store(folder)) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.url)
        loaded = fst_numpy.load_file("s3://bucket/my model/")
        assert sorted(loaded) == ["t0", "t1"] and float(loaded["t1"][3, 4]) == 1.0
        one = "s3://bucket/my model/model-00001-of-00002.safetensors"
        with closing(Model(one)) as model, closing(model.load()) as loader:
            loader.wait()
            assert "credentials: the environment" in loader.stats()["reason"]
        assert server.log[0].query.startswith("delimiter=%2F&list-type=2&prefix=my%20model%2F")
        index = {"weight_map": {"t0": "model-00001-of-00002.safetensors"}}
        text = json.dumps(index)
        (folder / "bucket/my model/model.safetensors.index.json").write_text(text)
        assert list(fst_numpy.load_file("s3://bucket/my model/model.safetensors.index.json")) == [
            "t0"
        ]


def test_credentials_in_order(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Argument, environment, profile; what is configured and can't be used is an error."""
    one = "s3://bucket/my model/model-00001-of-00002.safetensors"
    with web_server(folder, store(folder)) as server:
        remote.configure(endpoint=server.url)
        with pytest.raises(Exception, match="no keys for S3"):
            Model(one)
        files = folder / ".aws"
        files.mkdir()
        (files / "credentials").write_text(
            f"[other]\naws_access_key_id = X\n[me]\naws_access_key_id = {KEY}\n"
            f"aws_secret_access_key={SECRET}\n"
        )
        monkeypatch.setenv("AWS_PROFILE", "me")
        Model(one).close()
        monkeypatch.setenv("AWS_PROFILE", "nobody")
        with pytest.raises(Exception, match="profile has no keys"):
            Model(one)
        (files / "config").write_text("[profile role]\nrole_arn = arn:aws:iam::1:role/x\n")
        monkeypatch.setenv("AWS_PROFILE", "role")
        with pytest.raises(Exception, match="no source_profile"):
            Model(one)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "WRONG-SECRET")
        with pytest.raises(PermissionError, match="SignatureDoesNotMatch") as caught:
            Model(one)
        assert "WRONG-SECRET" not in str(caught.value)
        remote.configure(endpoint=server.url, access_key=KEY, secret_key=SECRET)
        Model(one).close()
        remote.configure(endpoint=server.url, anonymous=True)
        with pytest.raises(PermissionError, match="AccessDenied"):
            Model(one)
    with pytest.raises(ValueError, match="go together"):
        remote.configure(access_key="a")
    with pytest.raises(ValueError, match="line break"):
        remote.configure(bearer_token="a\r\nX-Other: 1")
    with pytest.raises(ValueError, match="bucket_style"):
        remote.configure(bucket_style="no")


def test_the_hub(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """hf://: a revision's files, the token to the Hub and to nobody it sends us to."""
    with web_server(folder) as target:

        def fault(request: Request, answer: Answer) -> Answer:
            if request.headers.get("authorization") != "Bearer hf_SECRET":
                return Answer("401 Unauthorized", {"X-Error-Code": "GatedRepo"})
            name = request.path.removeprefix("/me/model/resolve/v1.0/")
            place = f"{target.url}bucket/my%20model/{name}?Signature=abc"
            return Answer("302 Found", {"Location": place})

        with web_server(folder, fault) as hub:
            monkeypatch.setenv("HF_ENDPOINT", hub.url)
            address = "hf://me/model@v1.0/model-00002-of-00002.safetensors"
            with pytest.raises(PermissionError, match="GatedRepo"):
                Model(address)
            monkeypatch.setenv("HF_TOKEN", "hf_SECRET")
            assert list(fst_numpy.load_file(address)) == ["t1"]
            with pytest.raises(ValueError, match="OWNER/NAME"):
                Model("hf://me")
        assert all("authorization" not in request.headers for request in target.log)


def test_google_and_azure(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gs:// with a bearer token, az:// with a SAS: their names, lists and headers."""
    seen: list[Request] = []

    def fault(request: Request, answer: Answer) -> Answer:
        seen.append(request)
        if "comp=list" in request.query:
            key = "my model/model-00001-of-00002.safetensors"
            body = f"<EnumerationResults ><Blobs><Blob><Name>{key}</Name></Blob></Blobs>"
            return Answer("200 OK", {}, (body + "<NextMarker/></EnumerationResults>").encode())
        return listing(folder, request) if "list-type" in request.query else answer

    with web_server(folder, fault) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        monkeypatch.setenv("GOOGLE_OAUTH_ACCESS_TOKEN", "ya29.SECRET")
        assert sorted(fst_numpy.load_file("gs://bucket/my model/")) == ["t0", "t1"]
        assert all(r.headers["authorization"] == "Bearer ya29.SECRET" for r in seen)
        seen.clear()
        remote.configure(endpoint=server.url + "..", account="x")
        with pytest.raises(Exception, match="no such object"):
            Model("az://bucket/none.safetensors")
        (folder / "acct").symlink_to(folder)
        remote.configure(endpoint=server.url, account="acct", sas_token="?sv=1&sig=SECRET%3D")
        monkeypatch.setattr(server, "folder", folder)
        try:
            Model("az://bucket/my model/").close()
        except ValueError as error:  # one shard of two is listed
            assert "SECRET" not in str(error)
        except FileNotFoundError as error:
            assert "SECRET" not in str(error) and "00002" in str(error)
        Model("az://bucket/my model/model-00001-of-00002.safetensors").close()
        assert seen[-1].query == "sv=1&sig=SECRET%3D" and "x-ms-version" in seen[-1].headers
    with pytest.raises(ValueError, match="AZURE_STORAGE_ACCOUNT_NAME"):
        remote.configure()
        Model("az://bucket/x.safetensors")


def test_hostile_listings(folder: pathlib.Path) -> None:
    """Entities, endless pages, no listing at all: errors, soon."""
    remote_text = {"body": b""}

    def fault(request: Request, answer: Answer) -> Answer:
        return Answer("200 OK", {}, remote_text["body"])

    endless = (
        "<ListBucketResult><NextContinuationToken>t</NextContinuationToken></ListBucketResult>"
    )
    for text, words in {
        "<!DOCTYPE a [<!ENTITY b 'c'>]><ListBucketResult>": "declares a document",
        "<html>": "no listing",
        endless: "does not end",
        "<ListBucketResult></ListBucketResult>": "no \\*.safetensors file",
        "<ListBucketResult><Contents><Key>m/../x.safetensors</Key></Contents>"
        "</ListBucketResult>": "no \\*.safe",
    }.items():
        remote_text["body"] = text.encode()
        with web_server(folder, fault) as server:
            remote.configure(endpoint=server.url, anonymous=True)
            with pytest.raises(Exception, match=words):
                Model("s3://bucket/m/")
