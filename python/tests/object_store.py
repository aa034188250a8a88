# SPDX-License-Identifier: Apache-2.0
"""In-memory object stores for tests: S3, Google's XML dialect of it, and Azure. They check
signatures."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import itertools
import pathlib
import re
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from xml.sax.saxutils import escape

from web_server import DATE, Answer, Fault, Request, WebServer

from fastsafetensors import remote

KEY, SECRET = "AKIDEXAMPLE", "wJalrXUtnFEMI+K7MDENG"
PART_BYTES_MIN = 5 << 20
# For each kind of store, its credentials and the URL of box/m/. The last line has all kinds.
SETTINGS: dict[str, dict[str, object]] = {
    "s3": {"anonymous": True},
    "gs": {"bearer_token": "ya29.x"},
    "az": {"account": "acct", "sas_token": "sv=1&sig=x"},
}
PLACES = {"s3": "/box/m/", "gs": "/box/m/", "az": "/acct/box/m/"}
KINDS = list(SETTINGS)


def signature(request: Request, secret: str) -> str:
    """Return what is wrong with the Authorization header by the specification; "" if it is
    valid."""
    fields = dict(
        part.split("=", 1) for part in request.headers["authorization"].split(" ", 1)[1].split(",")
    )
    names = fields["SignedHeaders"].split(";")
    pairs = sorted(urllib.parse.parse_qsl(request.query, keep_blank_values=True))
    query = "&".join(
        f"{urllib.parse.quote(k, safe='-_.~')}={urllib.parse.quote(v, safe='-_.~')}"
        for k, v in pairs
    )
    digest = request.headers["x-amz-content-sha256"]
    if digest != "UNSIGNED-PAYLOAD" and digest != hashlib.sha256(request.body).hexdigest():
        return "XAmzContentSHA256Mismatch"
    lines = [request.method, request.path, query]
    lines += [f"{name}:{request.headers[name]}" for name in names]
    lines += ["", ";".join(names), digest]
    scope = fields["Credential"].split("/", 1)[1]
    told = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    text = "\n".join(["AWS4-HMAC-SHA256", request.headers["x-amz-date"], scope, told])
    key = b"AWS4" + secret.encode()
    for part in scope.split("/"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    expected = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    return "" if expected == fields["Signature"] else "SignatureDoesNotMatch"


def failure(status: str, code: str) -> Answer:
    """Return an error response in the store's format."""
    return Answer(status, {}, f"<Error><Code>{code}</Code></Error>".encode())


def mark(data: bytes) -> str:
    """Return the ETag of some bytes."""
    return '"' + hashlib.md5(data).hexdigest() + '"'


class ObjectStore(WebServer):
    """Objects in memory: one table for all buckets, by path."""

    def __init__(self, fault: Fault | None = None, keys: dict[str, str] | None = None) -> None:
        """Serve on a free port. keys: the secrets of users with access; None: anyone has access."""
        super().__init__(pathlib.Path(), fault)
        self.keys = keys
        self.refuse: Callable[[Request], Answer | None] = lambda request: None
        self.objects: dict[str, tuple[bytes, str]] = {}
        self.dates: dict[str, str] = {}  # modification times of objects that were not saved at DATE
        self.uploads: dict[str, tuple[str, dict[int, bytes]]] = {}
        self.blocks: dict[str, dict[str, bytes]] = {}
        self.numbers = itertools.count(1)
        # generation numbers of objects, as Google has them
        self.generations: dict[str, int] | None = None
        self.knows_conditions = True
        self.lock = threading.Lock()

    def refusal(self, request: Request) -> Answer | None:
        """Return the response to an unauthorized request, or None."""
        if self.keys is None:
            return None
        found = re.search(r"Credential=([^/]*)/", request.headers.get("authorization", ""))
        if found is None:
            return failure("403 Forbidden", "AccessDenied")
        if found[1] not in self.keys:
            return failure("403 Forbidden", "InvalidAccessKeyId")
        code = signature(request, self.keys[found[1]])
        return failure("403 Forbidden", code) if code else None

    def content(self, path: str) -> tuple[bytes, str] | None:
        """Return (bytes, ETag) of an object, or None."""
        return self.objects.get(urllib.parse.unquote(path))

    def answer(self, request: Request) -> Answer:
        """Return the response of a store without faults."""
        with self.lock:
            answer = self.refuse(request) or self.refusal(request) or self.act(request)
            number = self.number(urllib.parse.unquote(request.path))
            if number != "0":
                answer.headers = {**answer.headers, "x-goog-generation": number}
            return answer

    def number(self, path: str) -> str:
        """The generation of an object, in stores that have them; "0" if it does not exist."""
        return str((self.generations or {}).get(path, 0)) if path in self.objects else "0"

    def differs(self, path: str, request: Request) -> bool:
        """Whether the object violates the conditions of a request that changes it."""
        wanted = request.headers.get("if-match")
        number = request.headers.get("x-goog-if-generation-match")
        if not self.knows_conditions:
            return False
        if request.headers.get("if-none-match") == "*" or number == "0":
            return path in self.objects
        if number is not None:
            return number != self.number(path)
        return wanted is not None and wanted != self.objects.get(path, (b"", ""))[1]

    def act(self, request: Request) -> Answer:
        """Return the response to an authorized request."""
        query = dict(urllib.parse.parse_qsl(request.query, keep_blank_values=True))
        path = urllib.parse.unquote(request.path)
        if query.get("comp") in ("block", "blocklist"):
            return self.take_block(path, query, request)
        if "list-type" in query or query.get("comp") == "list":
            return self.list(path, query)
        if request.method == "POST" and "uploads" in query:
            number = f"up/{next(self.numbers)}+="
            self.uploads[number] = (path, {})
            text = f"<InitiateMultipartUploadResult><UploadId>{number}</UploadId>"
            return Answer("200 OK", {}, (text + "</InitiateMultipartUploadResult>").encode())
        if "uploadId" in query:
            return self.take_part(path, query, request)
        if request.method == "PUT":
            return self.put(path, request.body, request)
        if request.method == "DELETE":
            if self.differs(path, request):
                return failure("412 Precondition Failed", "PreconditionFailed")
            self.objects.pop(path, None)
            return Answer("204 No Content", {})
        if request.method == "HEAD":
            found = self.objects.get(path)
            if found is None:
                return Answer("404 Not Found", {})
            head = {"ETag": found[1], "Last-Modified": self.dates.get(path, DATE)}
            return Answer("200 OK", {**head, "Content-Length": str(len(found[0]))})
        return super().answer(request)

    def put(self, path: str, data: bytes, request: Request, etag: str | None = None) -> Answer:
        """Store an object and return the response."""
        if self.differs(path, request):
            return failure("412 Precondition Failed", "PreconditionFailed")
        if self.generations is not None:
            self.generations[path] = next(self.numbers)
        self.objects[path] = (data, etag or mark(data))
        self.dates.pop(path, None)
        return Answer("200 OK", {"ETag": self.objects[path][1]})

    def take_part(self, path: str, query: dict[str, str], request: Request) -> Answer:
        """Handle the requests of a multipart upload."""
        number = query["uploadId"]
        if number not in self.uploads or self.uploads[number][0] != path:
            return failure("404 Not Found", "NoSuchUpload")
        parts = self.uploads[number][1]
        if request.method == "DELETE":
            del self.uploads[number]
            return Answer("204 No Content", {})
        if request.method == "PUT":
            parts[int(query["partNumber"])] = request.body
            return Answer("200 OK", {"ETag": mark(request.body)})
        listed = re.findall(
            rb"<Part><PartNumber>(\d+)</PartNumber><ETag>([^<]*)</ETag></Part>", request.body
        )
        wanted = [(int(n), tag.decode().replace("&quot;", '"')) for n, tag in listed]
        good = [n for n, _ in wanted] == sorted(parts)
        if not good or any(mark(parts[n]) != tag for n, tag in wanted):
            return failure("400 Bad Request", "InvalidPart")
        if any(len(parts[n]) < PART_BYTES_MIN for n, _ in wanted[:-1]):
            return failure("400 Bad Request", "EntityTooSmall")
        data = b"".join(parts[n] for n, _ in wanted)
        answer = self.put(path, data, request, f'"{hashlib.md5(data).hexdigest()}-{len(wanted)}"')
        if answer.status.startswith("200"):
            del self.uploads[number]
            answer.body = (
                f"<CompleteMultipartUploadResult><ETag>{escape(self.objects[path][1])}</ETag>"
                "</CompleteMultipartUploadResult>"
            ).encode()
        return answer

    def take_block(self, path: str, query: dict[str, str], request: Request) -> Answer:
        """Handle the upload of a blob's blocks and of its block list."""
        blocks = self.blocks.setdefault(path, {})
        if query["comp"] == "block":
            if any(len(name) != len(query["blockid"]) for name in blocks):
                return failure("400 Bad Request", "InvalidBlobOrBlock")
            blocks[query["blockid"]] = request.body
            return Answer("201 Created", {})
        names = re.findall(rb"<Latest>([^<]*)</Latest>", request.body)
        if not names or any(name.decode() not in blocks for name in names):
            return failure("400 Bad Request", "InvalidBlockList")
        data = b"".join(blocks[name.decode()] for name in names)
        answer = self.put(path, data, request)
        if answer.status.startswith("200"):
            del self.blocks[path]
            answer.status = "201 Created"
        return answer

    def list(self, path: str, query: dict[str, str], page: int = 1000) -> Answer:
        """Return the listing of a folder's keys."""
        start = path.rstrip("/") + "/"
        keys = sorted(p[len(start) :] for p in self.objects if p.startswith(start))
        prefix = query["prefix"]
        keys = [k for k in keys if k.startswith(prefix) and "/" not in k[len(prefix) :]]
        if query.get("comp") == "list":
            rows = "".join(f"<Blob><Name>{escape(k)}</Name></Blob>" for k in keys)
            text = f"<EnumerationResults><Blobs>{rows}</Blobs><NextMarker/></EnumerationResults>"
        else:
            rows = "".join(f"<Contents><Key>{escape(k)}</Key></Contents>" for k in keys)
            text = f"<ListBucketResult>{rows}</ListBucketResult>"
        return Answer("200 OK", {"Last-Modified": DATE}, text.encode())


@contextlib.contextmanager
def object_store(
    fault: Fault | None = None, keys: dict[str, str] | None = None
) -> Iterator[ObjectStore]:
    """Run a store during a `with` block."""
    server = ObjectStore(fault, keys)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def use_store(server: ObjectStore, kind: str = "s3") -> None:
    """Make URLs of a kind use this store."""
    if kind == "gs" and server.generations is None:
        server.generations = {}
    remote.configure(endpoint=server.url, retry_base_ms=2, tries_max=2, **SETTINGS[kind])
