# SPDX-License-Identifier: Apache-2.0
"""Object stores: names, listings, credentials and signatures, with servers that check them."""

from __future__ import annotations

import json
import pathlib
import urllib.parse
from contextlib import closing
from xml.sax.saxutils import escape

import numpy
import pytest
from object_store import KEY, SECRET, signature
from web_server import Answer, Fault, Request, web_server

from fastsafetensors import numpy as fst_numpy
from fastsafetensors import remote
from fastsafetensors._core import Model

pytestmark = pytest.mark.usefixtures("own_home")


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
    """Return a ListObjectsV2 response with one key per page."""
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
    """An S3 store with listings that checks signatures."""

    def fault(request: Request, answer: Answer) -> Answer:
        if "authorization" not in request.headers:
            return Answer("403 Forbidden", {}, b"<Error><Code>AccessDenied</Code></Error>")
        code = signature(request, SECRET)
        if code:
            return Answer("403 Forbidden", {}, f"<Error><Code>{code}</Code></Error>".encode())
        return listing(folder, request) if "list-type" in request.query else answer

    return fault


def test_a_folder_of_s3(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder is listed page by page, without files in subfolders, and every request is signed."""
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
    """Arguments precede the environment, which precedes the profile. Unusable configured
    credentials are an error."""
    one = "s3://bucket/my model/model-00001-of-00002.safetensors"
    with web_server(folder, store(folder)) as server:
        remote.configure(endpoint=server.url)
        with pytest.raises(Exception, match="no credentials for S3"):
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
    with pytest.raises(ValueError, match="must be given together"):
        remote.configure(access_key="a")
    with pytest.raises(ValueError, match="line break"):
        remote.configure(bearer_token="a\r\nX-Other: 1")
    with pytest.raises(ValueError, match="bucket_style"):
        remote.configure(bucket_style="no")


def test_the_hub(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """hf:// reads files of a revision. The token is sent to the Hub, but not to redirect
    targets."""
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
    """gs:// with a bearer token and az:// with a SAS have the right names, listings and headers."""
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
        with pytest.raises(Exception, match="the object does not exist"):
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
    """Listings with XML entities or endless pages, and other responses, are errors without a long
    wait."""
    remote_text = {"body": b""}

    def fault(request: Request, answer: Answer) -> Answer:
        return Answer("200 OK", {}, remote_text["body"])

    endless = (
        "<ListBucketResult><NextContinuationToken>t</NextContinuationToken></ListBucketResult>"
    )
    for text, words in {
        "<!DOCTYPE a [<!ENTITY b 'c'>]><ListBucketResult>": "contains a document type",
        "<html>": "not a listing",
        endless: "never ends",
        "<ListBucketResult></ListBucketResult>": "no \\*.safetensors file",
        "<ListBucketResult><Contents><Key>m/../x.safetensors</Key></Contents>"
        "</ListBucketResult>": "no \\*.safe",
    }.items():
        remote_text["body"] = text.encode()
        with web_server(folder, fault) as server:
            remote.configure(endpoint=server.url, anonymous=True)
            with pytest.raises(Exception, match=words):
                Model("s3://bucket/m/")


def serve_hub(commits: dict[str, dict[str, bytes]], branches: dict[str, str]) -> Fault:
    """A Hub with one repository, me/model, with branches, commits and their files."""

    def answer(request: Request, unused: Answer) -> Answer:
        path = urllib.parse.unquote(request.path)
        kind, _, rest = path.removeprefix("/api/models").removeprefix("/me/model/").partition("/")
        revision = next((b for b in branches if f"{rest}/".startswith(f"{b}/")), rest[:40])
        commit = branches.get(revision, revision)
        if commit not in commits:
            return Answer("404 Not Found", {"X-Error-Code": "RevisionNotFound"})
        if kind == "revision":
            files = [{"rfilename": name, "size": 1} for name in commits[commit]]
            text = json.dumps({"id": "me/model", "tags": ["a]"], "sha": commit, "siblings": files})
            return Answer("200 OK", {}, text.encode())
        data = commits[commit][rest.removeprefix(revision).lstrip("/")]
        begin, end = request.span(len(data)) or (0, len(data))
        span = f"bytes {begin}-{end - 1}/{len(data)}"
        headers = {"Content-Range": span, "ETag": f'"{hash(data):x}"'}
        return Answer("206 Partial Content", headers, data[begin:end])

    return answer


def hub_commits(tmp_path: pathlib.Path) -> dict[str, dict[str, bytes]]:
    """Two commits of a model of two files, with different values under the same names."""
    commits = {}
    for number, commit in enumerate(("a" * 40, "b" * 40)):
        files, weights = {}, {}
        for part in range(2):
            name = f"model-0000{part + 1}-of-00002.safetensors"
            fst_numpy.save_file({f"t{part}": numpy.full(9, number)}, tmp_path / name)
            files[name] = (tmp_path / name).read_bytes()
            weights[f"t{part}"] = name
        index = json.dumps({"metadata": {}, "weight_map": weights}).encode()
        commits[commit] = {
            "README.md": b"",
            "model.safetensors.index.json": index,
            **files,
            **{f"sub/{name}": data for name, data in files.items()},
            "sub/.hidden.safetensors": b"",
        }
    return commits


@pytest.mark.parametrize("branch", ["main", "refs/pr/1", "v1"])
@pytest.mark.parametrize("place", ["/model.safetensors.index.json", "/", "/sub/"])
def test_branch_moves_during_a_load(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, branch: str, place: str
) -> None:
    """All files of a model come from the commit that its branch named when the model was opened."""
    branches = {branch: "a" * 40}
    good = serve_hub(hub_commits(tmp_path), branches)

    def fault(request: Request, answer: Answer) -> Answer:
        answer = good(request, answer)
        branches[branch] = "b" * 40  # behind the first answer
        return answer

    with web_server(tmp_path, fault) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        revision = "" if branch == "main" else f"@{branch}"
        for value in range(2):
            loaded = fst_numpy.load_file(f"hf://me/model{revision}{place}")
            assert {name: int(t[0]) for name, t in loaded.items()} == {"t0": value, "t1": value}
        hub.log.clear()
        assert len(fst_numpy.load_file(f"hf://me/model@{'a' * 40}{place}")) == 2
        wanted = 0 if place.endswith("json") else 1  # a commit stays what it is
        assert len([r for r in hub.log if r.path.startswith("/api/")]) == wanted


@pytest.mark.parametrize(
    "text",
    [b"", b"{}", b'{"sha": "main"}', b'{"sha": 7}', b"[" * 99999, b'{"sha": "%s"}' % (b"A" * 40)],
)
def test_hub_without_commit(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, text: bytes
) -> None:
    """Loading a sharded model from a Hub without commit identifiers is an error."""
    with web_server(tmp_path, lambda request, answer: Answer("200 OK", {}, text)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with pytest.raises(OSError, match="did not name the revision|did not describe"):
            Model("hf://me/model/model.safetensors.index.json")
        assert len(hub.log) == 1
        commit = "c" * 40
        with pytest.raises(OSError, match="list of files can't be read|did not describe"):
            Model(f"hf://me/model@{commit}/")
