# SPDX-License-Identifier: Apache-2.0
"""Compares loads from servers on the loopback interface, interleaved, each run in a separate
process.

    python benchmarks/compare_remote.py [--mib 1024] [--runs 3] [--only http,https,seaweed,slow]
                                        [--peers PYTHON]

Servers: nginx (http and https), SeaweedFS, and nginx behind a relay with 60 MB/s per connection
after a delay of 30 ms ("slow"). Contenders: load_file; Run:ai's model streamer (default settings, 1
x 32 MiB, and 2 connections); s3torchconnector with safetensors; plain parallel ranges by libcurl
alone. Other packages run under `--peers`, a Python that has them (and safetensors, torch). Missing
packages have no row. Figures: GB/s, median [lowest-highest], and peak memory. Bytes are checked by
their digest.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import hmac
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python" / "tests"))

OURS = """
import sys
from fastsafetensors import remote
from fastsafetensors.numpy import load_file
url, ca = sys.argv[1:3]
if ca:
    remote.configure(ca_file=ca)
def load():
    return load_file(url)
"""
STREAMER = """
import os, sys
from runai_model_streamer import SafetensorsStreamer
url, ca = sys.argv[1:3]
def load():
    out = {}
    with SafetensorsStreamer() as streamer:
        streamer.stream_file(url)
        for name, tensor in streamer.get_tensors():
            out[name] = tensor.clone().numpy()
    return out
"""
CONNECTOR = """
import os, sys
from s3torchconnector import S3Checkpoint, S3ClientConfig
from safetensors.torch import load as load_bytes
url, ca = sys.argv[1:3]
client = S3Checkpoint(region="us-east-1", endpoint=os.environ["AWS_ENDPOINT_URL"],
                      s3client_config=S3ClientConfig(force_path_style=True))
def load():
    with client.reader(url) as reader:
        return {name: t.numpy() for name, t in load_bytes(reader.read()).items()}
"""
MEASURE = """
import hashlib, json, resource, time
begin = time.perf_counter()
tensors = load()
seconds = time.perf_counter() - begin
digest = hashlib.blake2b()
for name in sorted(tensors):
    digest.update(memoryview(tensors[name]).cast("B"))
print(json.dumps([seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
                  digest.hexdigest() if tensors else ""]))
"""


def build(folder: pathlib.Path) -> dict[str, str]:
    """Compile the yardstick and the relay; their paths."""
    made = {}
    for name in ("plain_ranges", "slow_relay"):
        made[name] = str(folder / name)
        subprocess.run([shutil.which("cc") or "gcc", "-O2", "-D_GNU_SOURCE", "-Isrc", "-Iinclude",
                        f"benchmarks/{name}.c", "-o", made[name], "-pthread",
                        *(["-l:libcurl.so.4"] if name == "plain_ranges" else [])],
                       cwd=ROOT, check=True)
    return made


@contextlib.contextmanager
def relay(program: str, url: str, delay_ms: int = 30, rate: int = 60_000_000):
    """Give each connection its own rate, and each first byte a delay."""
    upstream = url.rstrip("/").rsplit(":", 1)[1]
    with subprocess.Popen([program, upstream, str(delay_ms), str(rate)], stdout=subprocess.PIPE,
                          text=True) as process:
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/"
        finally:
            process.kill()


def run_words(words: list[str], environment: dict[str, str]):
    """Return the result of one run, (seconds, MiB, digest), or None and the reason."""
    try:
        done = subprocess.run(words, capture_output=True, text=True,
                              env={**os.environ, **environment}, check=False, timeout=60)
    except subprocess.TimeoutExpired:
        return None, "nothing for 60 s"
    if done.returncode != 0:
        return None, (done.stderr.strip().splitlines() or ["?"])[-1][:100]
    return json.loads(done.stdout.splitlines()[-1]), ""


def presigned(endpoint: str, path: str, key: str, secret: str) -> str:
    """An address of S3 that is signed for an hour."""
    host = endpoint.split("//")[1].rstrip("/")
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    scope = f"{now[:8]}/us-east-1/s3/aws4_request"
    fields = {"X-Amz-Algorithm": "AWS4-HMAC-SHA256", "X-Amz-Credential": f"{key}/{scope}",
              "X-Amz-Date": now, "X-Amz-Expires": "3600", "X-Amz-SignedHeaders": "host"}
    query = urllib.parse.urlencode(fields, quote_via=urllib.parse.quote, safe="")
    asked = f"GET\n{path}\n{query}\nhost:{host}\n\nhost\nUNSIGNED-PAYLOAD"
    text = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{hashlib.sha256(asked.encode()).hexdigest()}"
    mac = b"AWS4" + secret.encode()
    for part in [*scope.split("/"), text]:
        mac = hmac.new(mac, part.encode(), hashlib.sha256).digest()
    return f"http://{host}{path}?{query}&X-Amz-Signature={mac.hex()}"


@dataclass
class Place:
    """The URL of a file, and the bytes to compare with."""

    endpoint: str
    plain: str  # the address that libcurl alone asks
    file: pathlib.Path
    size: int
    program: str
    ca: str = ""
    is_s3: bool = False
    connections: tuple[int, ...] = (8,)


KEYS = {"AWS_ACCESS_KEY_ID": "KEY", "AWS_SECRET_ACCESS_KEY": "SECRET", "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true"}


def contenders(place: Place, peers: str | None):
    """(name, words, environment) of each."""
    endpoint, ca = place.endpoint, place.ca
    key = {**KEYS, "AWS_ENDPOINT_URL": endpoint}
    if ca:
        key["AWS_CA_BUNDLE"] = ca
    streamer = {**key, "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
                "RUNAI_STREAMER_S3_ENDPOINT": endpoint}
    address = "s3://bench/m.safetensors"
    rows = [("fastsafetensors", [sys.executable, "-c", OURS + MEASURE,
                                 address if place.is_s3 else place.plain, ca], key)]
    if peers:
        programs = {
            "model-streamer, as it comes": (STREAMER, streamer),
            "model-streamer, 1 x 32 MiB": (STREAMER, {
                **streamer, "RUNAI_STREAMER_CONCURRENCY": "1",
                "RUNAI_STREAMER_CHUNK_BYTESIZE": str(32 << 20)}),
            "model-streamer, 2": (STREAMER, {**streamer, "RUNAI_STREAMER_CONCURRENCY": "2"}),
            "s3torchconnector + safetensors": (CONNECTOR, key),
        }
        rows += [(name, [peers, "-c", program + MEASURE, address, ca], settings)
                 for name, (program, settings) in programs.items()]
    step = min(8 << 20, max(1 << 20, place.size // 16))
    for count in place.connections:
        rows.append((f"libcurl, {count} connections",
                     [place.program, place.plain, str(place.size), str(count), str(step),
                      str(place.file), ca], {}))
    return rows


def measure(title: str, rows: list, size: int, runs: int) -> list[str]:
    """Run all contenders, interleaved; return the lines of the table."""
    found: dict[str, list] = {row[0]: [] for row in rows}
    reasons: dict[str, str] = {}
    for _ in range(runs):
        for name, words, environment in rows:
            if name in reasons:
                continue  # a failed server is not waited for again
            result, why = run_words(words, environment)
            if result is None:
                reasons[name] = why
            else:
                found[name].append(result)
    digests = {result[2] for results in found.values() for result in results} - {""}
    assert len(digests) == 1, f"{title}: the contenders loaded different bytes"
    lines = []
    for name, results in found.items():
        if not results:
            lines.append(f"| {title} | {name} | - | - | {reasons.get(name, '')} |")
            continue
        speeds = sorted(size / 1e9 / seconds for seconds, _, _ in results)
        lines.append(f"| {title} | {name} | {statistics.median(speeds):.2f} "
                     f"[{speeds[0]:.2f}-{speeds[-1]:.2f}] | {max(r[1] for r in results)} | |")
    print("\n".join(lines), flush=True)
    return lines


def fetch(url: str) -> bytes:
    """All of an object."""
    with urllib.request.urlopen(url) as answer:
        return answer.read()


def make_certificate(folder: pathlib.Path) -> tuple[str, str]:
    """A certificate for localhost, and its key."""
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
                    "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost",
                    "-keyout", "key.pem", "-out", "cert.pem"], cwd=folder, check=True,
                   capture_output=True)
    return str(folder / "cert.pem"), str(folder / "key.pem")


def main() -> None:
    """Run the comparison."""
    import numpy
    from store_servers import find_program, nginx, seaweed

    from fastsafetensors import remote
    from fastsafetensors.numpy import load_file, save_file

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", default="http,https,seaweed,slow")
    parser.add_argument("--peers", help="a Python that has the peers")
    parser.add_argument("--folder", default=str(ROOT / "build" / "bench-remote"))
    given = parser.parse_args()
    folder = pathlib.Path(given.folder)
    (folder / "bench").mkdir(parents=True, exist_ok=True)
    file = folder / "bench" / "m.safetensors"
    generator = numpy.random.default_rng(0)
    save_file({f"layers.{i}.weight": generator.integers(0, 256, 4 << 20, numpy.uint8)
               for i in range(max(1, given.mib // 4))}, file)
    size = file.stat().st_size
    lines = ["| server | contender | GB/s | peak MiB | |", "|---|---|---|---|---|"]
    print("\n".join(lines))
    wanted = given.only.split(",")

    programs = build(folder)

    def compare(title: str, url: str, **more: Any) -> None:
        plain = more.pop("plain", f"{url}bench/m.safetensors")
        place = Place(url.rstrip("/"), plain, file, size, programs["plain_ranges"], **more)
        lines.extend(measure(title, contenders(place, given.peers), size, given.runs))

    if "http" in wanted or "slow" in wanted:
        with nginx(folder / "nginx", folder) as url:
            if "http" in wanted:
                compare("http", url)
            if "slow" in wanted:
                with relay(programs["slow_relay"], url) as far:
                    compare("slow", far, connections=(8, 48))
    if "https" in wanted:
        pair = make_certificate(folder)
        with nginx(folder / "tls", folder, pair) as url:
            compare("https", url, ca=pair[0])
    if "seaweed" in wanted and find_program("weed"):
        with seaweed(folder / "weed", "KEY", "SECRET") as url:
            remote.configure(endpoint=url, access_key="KEY", secret_key="SECRET")
            for _ in range(100):
                try:
                    save_file(load_file(file), "s3://bench/m.safetensors")
                    break
                except OSError:
                    time.sleep(0.1)
            stored = folder / "stored.safetensors"  # an object's tensors may lie in another order
            stored.write_bytes(fetch(presigned(url, "/bench/m.safetensors", "KEY", "SECRET")))
            file = stored
            compare("SeaweedFS", url + "/", is_s3=True,
                    plain=presigned(url, "/bench/m.safetensors", "KEY", "SECRET"))
            stored.unlink()
            file = folder / "bench" / "m.safetensors"
    file.unlink()
    (folder / "report.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
