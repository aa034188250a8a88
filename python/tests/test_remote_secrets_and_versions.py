# SPDX-License-Identifier: Apache-2.0
"""Remote loads: versions that change midway, misleading names, secrets."""

from __future__ import annotations

import json
import os
import pathlib
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import numpy
import pytest
from web_server import Answer, Request, web_server

from fastsafetensors import SafetensorError, remote
from fastsafetensors import numpy as fst_numpy
from fastsafetensors._core import Model

pytestmark = pytest.mark.usefixtures("own_home")
KEYS = {"access_key": "AKIDEXAMPLE", "secret_key": "S3CR3T", "session_token": "SESSION"}


def make(order: str) -> bytes:
    """Write a file of two tensors in the given order. Both orders have the same size."""
    value = {"a": 1.0, "b": 2.0}
    header = {
        name: {"dtype": "F32", "shape": [30000], "data_offsets": [at * 120000, (at + 1) * 120000]}
        for at, name in enumerate(order)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(numpy.full(30000, value[name], numpy.float32).tobytes() for name in order)
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("field", ["ETag", "weak", "Last-Modified", "X-Goog-Generation"])
def test_first_response_fixes_the_version(
    tmp_path: pathlib.Path, field: str, whole: bool
) -> None:
    """If the first response breaks off, its rest is not read from another version of the object."""
    asked: list[Request] = []

    def fault(request: Request, answer: Answer) -> Answer:
        asked.append(request)
        first = len(asked) == 1
        data, mark = (make("ab"), "1") if first else (make("ba"), "2")
        value = {"ETag": f'"{mark}"', "weak": f'W/"{mark}"'}.get(field, mark)
        begin, end = request.span(len(data)) or (0, len(data))
        headers = {"ETag" if field == "weak" else field: value}
        if whole and first:
            data = data[:5000]
            answer = Answer("200 OK", headers, data)
        else:
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
            answer = Answer("206 Partial Content", headers, data[begin:end])
        if first:
            answer.send_bytes, answer.end = 4096, "reset"
        return answer

    with (
        web_server(tmp_path, fault) as server,
        pytest.raises(SafetensorError, match="its .* changed"),
    ):
        fst_numpy.load_file(server.url + "x.safetensors")
    if field == "ETag":
        assert asked[1].headers["if-match"] == '"1"'


@pytest.mark.parametrize(
    ("scheme", "settings"),
    [
        ("gs", {"bearer_token": "SECRETBEARER"}),
        ("gs", {**KEYS, "access_key": "GOOG1EXAMPLE"}),
        ("s3", KEYS),
        ("az", {"account": "a", "sas_token": "sig=S3CR3T"}),
    ],
)
def test_redirected_listing_gets_no_credentials(
    tmp_path: pathlib.Path, scheme: str, settings: dict[str, str]
) -> None:
    """Only the store's own scheme, host and port ever receive credentials."""

    def nothing(request: Request, answer: Answer) -> Answer:
        return Answer("404 Not Found", {})

    with web_server(tmp_path, nothing) as other:

        def away(request: Request, answer: Answer) -> Answer:
            return Answer("307 Temporary Redirect", {"Location": other.url + "x"})

        with web_server(tmp_path, away) as server:
            remote.configure(endpoint=server.url, **settings)
            with pytest.raises(OSError, match="the object does not exist"):
                Model(f"{scheme}://bucket/m/")
            own = server.log[0].headers
            assert scheme == "az" or "authorization" in own
        [request] = other.log
        assert "authorization" not in request.headers and not request.query
        assert "x-amz-security-token" not in request.headers


NAMES = ["model?1.safetensors", "m#1.safetensors", "100%3F.safetensors", "a%b ü&+.safetensors"]


@pytest.mark.parametrize("name", NAMES)
def test_object_keys_are_plain_names(tmp_path: pathlib.Path, name: str) -> None:
    """Names in a listing or an index are not interpreted, whatever characters they have."""
    folder = tmp_path / "bucket" / "dir"
    folder.mkdir(parents=True)
    fst_numpy.save_file({"a": numpy.full(3, 7.0)}, folder / name.partition("?")[0])
    fst_numpy.save_file({"a": numpy.full(3, 1.0)}, folder / name)
    index = {"weight_map": {"a": name}}
    (folder / "m.safetensors.index.json").write_text(json.dumps(index))

    def fault(request: Request, answer: Answer) -> Answer:
        if "list-type" not in request.query:
            return answer
        key = "dir/" + name.replace("&", "&amp;")
        text = f"<ListBucketResult><Contents><Key>{key}</Key></Contents></ListBucketResult>"
        return Answer("200 OK", {}, text.encode())

    with web_server(tmp_path, fault) as server:
        remote.configure(endpoint=server.url, **KEYS)
        for url in ["s3://bucket/dir/", "s3://bucket/dir/m.safetensors.index.json"]:
            assert fst_numpy.load_file(url)["a"].tolist() == [1.0] * 3
        web = server.url + "bucket/dir/m.safetensors.index.json?x=1"
        assert fst_numpy.load_file(web)["a"].tolist() == [1.0] * 3


def test_bucket_root_is_a_folder(tmp_path: pathlib.Path) -> None:
    """s3://bucket means the same as s3://bucket/."""
    (tmp_path / "bucket").mkdir()
    fst_numpy.save_file({"a": numpy.zeros(3)}, tmp_path / "bucket/m.safetensors")
    text = "<ListBucketResult><Contents><Key>m.safetensors</Key></Contents></ListBucketResult>"

    def fault(request: Request, answer: Answer) -> Answer:
        is_list = "list-type" in request.query
        return Answer("200 OK", {}, text.encode()) if is_list else answer

    with web_server(tmp_path, fault) as server:
        remote.configure(endpoint=server.url, anonymous=True)
        assert list(fst_numpy.load_file("s3://bucket")) == ["a"]


@pytest.mark.parametrize(
    "url",
    [
        "s3://b/k.safetensors?versionId=1&x=2",
        "hf://me/model/k.safetensors?revision=1",
        "az://b/k.safetensors?sig=1",
        "gs://b/k.safetensors?versionId=1",
        "s3://b/m/?versionId=1",
        "s3://b:99/k.safetensors",
    ],
)
def test_ambiguous_settings_are_refused(url: str) -> None:
    """Queries and ports in URLs of stores are errors."""
    remote.configure(endpoint="http://127.0.0.1:1", account="x")
    with pytest.raises(ValueError, match="queries are not supported|have a port") as caught:
        Model(url)
    assert "=1" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<IsTruncated>true</IsTruncated></ListBucketResult>", "is incomplete"),
        ("", "truncated"),
        ("<Contents><Key>two/b.safe", "truncated"),
        ("<Contents><Key>two/b</Key></ListBucketResult>", "is incomplete"),
    ],
)
def test_truncated_listing_is_an_error(
    tmp_path: pathlib.Path, text: str, words: str
) -> None:
    """An incomplete model is an error."""
    (tmp_path / "bk/two").mkdir(parents=True)
    fst_numpy.save_file({"a": numpy.zeros(3)}, tmp_path / "bk/two/a.safetensors")
    body = "<ListBucketResult><Contents><Key>two/a.safetensors</Key></Contents>" + text

    def fault(request: Request, answer: Answer) -> Answer:
        if "list-type" not in request.query:
            return answer
        # Without a length, the end of the connection is the end of the body.
        return Answer(raw_head=b"HTTP/1.0 200 OK\r\n\r\n", body=body.encode(), end="close")

    with web_server(tmp_path, fault) as server:
        remote.configure(endpoint=server.url, anonymous=True)
        with pytest.raises(OSError, match=words):
            Model("s3://bk/two/")


@pytest.fixture
def ask(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Return a function (URL, settings) -> the Authorization header that a server received ("":
    none)."""
    (tmp_path / "bk").mkdir()
    fst_numpy.save_file({"a": numpy.zeros(3)}, tmp_path / "bk/m.safetensors")
    with web_server(tmp_path) as server:
        for name in ("AWS_ENDPOINT_URL", "STORAGE_EMULATOR_HOST", "HF_ENDPOINT"):
            monkeypatch.setenv(name, server.url)

        def ask(scheme: str, **settings: object) -> str:
            remote.configure(**settings)
            server.log.clear()
            address = f"{scheme}://bk/m.safetensors"
            if scheme == "hf":
                with pytest.raises(OSError, match="the object does not exist"):
                    Model("hf://bk/m/x.safetensors")
            else:
                Model(address).close()
            return server.log[0].headers.get("authorization", "")

        yield ask


def test_failed_credential_source_is_an_error(
    ask: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """A key without its secret, a token that is too long: no other credentials are used."""
    (tmp_path / ".aws").mkdir()
    profile = "[default]\naws_access_key_id=PROFILE\naws_secret_access_key=S\n"
    (tmp_path / ".aws/credentials").write_text(profile)
    assert "Credential=PROFILE/" in ask("s3")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ENVKEY")
    with pytest.raises(Exception, match="AWS_SECRET_ACCESS_KEY"):
        ask("s3")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "S")
    assert "Credential=ENVKEY/" in ask("s3")
    for bad in ("t" * 20000, "a\nb", "a\x01b"):
        monkeypatch.setenv("AWS_SESSION_TOKEN", bad)
        with pytest.raises(Exception, match="AWS_SESSION_TOKEN"):
            ask("s3")
        with pytest.raises(ValueError, match="control byte|line break"):
            remote.configure(bearer_token=bad)
        monkeypatch.setenv("GOOGLE_OAUTH_ACCESS_TOKEN", bad)
        with pytest.raises(Exception, match="GOOGLE_OAUTH_ACCESS_TOKEN"):
            ask("gs")


def test_profile_sets_region_and_endpoint(
    ask: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """A profile's region and endpoint are used also with keys from the environment, and without
    keys."""
    (tmp_path / ".aws").mkdir()
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    config = f"[default]\nregion=eu-west-9\nendpoint_url={endpoint}\n"
    (tmp_path / ".aws/config").write_text(config)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ENVKEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "S")
    assert "/eu-west-9/s3/" in ask("s3")
    assert "/eu-west-9/s3/" in ask("s3", access_key="A", secret_key="S")
    assert ask("s3", anonymous=True) == ""
    assert ask("s3", anonymous=True, access_key="A", secret_key="S") == ""


def test_credentials_go_only_to_their_store(
    ask: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3's keys, Google's HMAC keys, and the tokens of Google and the Hub."""
    s3 = {"access_key": "AKID", "secret_key": "S"}
    google = {"access_key": "GOOG1E", "secret_key": "S"}
    assert "AKID/" in ask("s3", **s3) and "GOOG1E/" in ask("gs", **google)
    assert ask("gs", **s3) == "" and ask("hf", **s3) == ""
    assert ask("hf", bearer_token="hf_x") == "Bearer hf_x" and ask("gs", bearer_token="hf_x") == ""
    assert ask("gs", bearer_token="ya29.x") == "Bearer ya29.x"
    assert ask("hf", bearer_token="ya29.x") == ""
    monkeypatch.setenv("GOOGLE_OAUTH_ACCESS_TOKEN", "ENVTOKEN")
    assert "GOOG1E/" in ask("gs", **google)  # explicit settings precede discovered ones
    assert ask("gs", **s3) == "Bearer ENVTOKEN"


@pytest.mark.parametrize(
    "endpoint",
    [
        "http://u:PW@127.0.0.1:1",
        "http://127.0.0.1:99999",
        "http://127.0.0.1:1?x=1",
        "http://a b",
        "ftp://127.0.0.1",
        "http://",
        "a\x01b",
    ],
)
def test_invalid_endpoints(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Invalid endpoints, from the caller or the environment, are argument errors without the
    password."""
    with pytest.raises(ValueError, match="endpoint") as caught:
        remote.configure(endpoint=endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    remote.configure(anonymous=True)
    with pytest.raises(ValueError, match="endpoint|AWS_ENDPOINT_URL") as found:
        Model("s3://bk/m.safetensors")
    assert "PW" not in str(caught.value) + str(found.value)


ECHOES = ["SECRETBEARER12", "SECRETBEARER", "x-SECRETBEARER12-y", "a b", "ü", "A" * 100]


@pytest.mark.parametrize("echo", ECHOES)
def test_a_server_that_echoes_secrets(tmp_path: pathlib.Path, echo: str) -> None:
    """A server that echoes secrets does not get them into messages: request IDs and codes must be
    well-formed."""
    raw = echo.encode("latin-1", "replace").decode("latin-1")

    def fault(request: Request, answer: Answer) -> Answer:
        body = f"<Error><Code>{raw}</Code></Error>".encode("latin-1")
        return Answer("403 Forbidden", {"x-request-id": raw}, body)

    with web_server(tmp_path, fault) as server:
        remote.configure(endpoint=server.url, bearer_token="SECRETBEARER12")
        with pytest.raises(PermissionError) as caught:
            Model("gs://bk/m.safetensors")
        assert "(status 403, credentials: a token)" in str(caught.value)
        url = server.url + "m.safetensors?a=1&X-Amz-Signature=SECRETBEARER12"
        with pytest.raises(PermissionError) as caught:
            Model(url)
        assert "(status 403, credentials: none)" in str(caught.value)


SECRET_QUERY = "?X-Amz-Signature=S3CR3T"


@pytest.mark.parametrize("scheme", ["http://127.0.0.1:1/", "s3://b/"])
def test_save_messages_have_no_query(scheme: str) -> None:
    """Saves to URLs that cannot be saved to are an error in one sentence, without the query."""
    url = scheme + "m.safetensors" + SECRET_QUERY
    with pytest.raises(Exception, match="or the Hub|queries are not supported") as caught:
        fst_numpy.save_file({"a": numpy.zeros(3)}, url)
    assert "S3CR3T" not in str(caught.value)


def test_path_objects_of_urls(tmp_path: pathlib.Path) -> None:
    """pathlib removes a slash of a URL. The error says so, without the query."""
    path = pathlib.Path("http://127.0.0.1:1/m.safetensors" + SECRET_QUERY)
    with pytest.raises(Exception, match="must be a str, not a path object") as caught:
        fst_numpy.load_file(path)
    assert "S3CR3T" not in str(caught.value)


def command(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    return subprocess.run(
        [sys.executable, "-m", "fastsafetensors", *words],
        capture_output=True,
        text=True,
        check=False,
    )


def test_command_output_has_no_query(tmp_path: pathlib.Path) -> None:
    """verify prints no query, as text and JSON, for valid and invalid models and manifests."""
    fst_numpy.save_file({"a": numpy.zeros(3)}, tmp_path / "m.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"x" * 100)
    with web_server(tmp_path) as server:
        for name in ("m", "bad", "none"):
            url = f"{server.url}{name}.safetensors{SECRET_QUERY}"
            for words in (["verify"], ["verify", "--json"], ["verify", "--manifest", url]):
                told = command(*words, url)
                assert f"{name}.safetensors" in told.stdout + told.stderr
                assert "S3CR3T" not in told.stdout + told.stderr


@pytest.mark.parametrize("words", ["hash", "hash --manifest", "edit --set a=b", "bench", "clean"])
def test_file_commands_refuse_urls(words: str) -> None:
    """Commands for local files reject URLs in one sentence, and send no request."""
    told = command(*words.split(), "http://127.0.0.1:1/m.safetensors" + SECRET_QUERY)
    assert told.returncode == 3 and "local files only" in told.stderr
    assert "S3CR3T" not in told.stderr + told.stdout
    if words.startswith("edit"):
        told = command(*words.split(), "http://127.0.0.1:1/m.safetensors", "local.safetensors")
        assert told.returncode == 3 and "local files only" in told.stderr


def test_compressed_models_count_requests(tmp_path: pathlib.Path) -> None:
    """Requests of compressed loads are counted like all others."""
    plain, packed = tmp_path / "m.safetensors", tmp_path / "c.safetensors"
    fst_numpy.save_file({"a": numpy.arange(300000, dtype=numpy.float32)}, plain)
    assert command("convert", "--compress", str(plain), str(packed)).returncode == 0
    with (
        web_server(tmp_path) as server,
        closing(Model(server.url + "c.safetensors")) as model,
        closing(model.load()) as loader,
    ):
        loader.wait()
        stats = loader.stats()
        assert stats["network_requests"] == len(server.log) > 0
        # The server counts a response after it was sent, which may be after its arrival here.
        deadline = time.monotonic() + 120
        while server.sent_bytes < int(str(stats["network_bytes"])) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert int(str(stats["network_bytes"])) == server.sent_bytes


def test_no_more_connections_than_allowed(tmp_path: pathlib.Path) -> None:
    """connections_max limits all connections of the process to a host, with every kind of
    request."""
    data = numpy.random.default_rng(1).integers(0, 256, 24 << 20, numpy.uint8)
    fst_numpy.save_file({"a": data}, tmp_path / "m.safetensors")
    with web_server(tmp_path) as server:
        remote.configure(connections_max=1)
        loaded = fst_numpy.load_file(server.url + "m.safetensors")["a"]
        assert loaded.tobytes() == data.tobytes()
        assert len(server.log) > 4 and server.connections == 1
