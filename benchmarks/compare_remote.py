# SPDX-License-Identifier: Apache-2.0
"""Loads from servers on the loopback interface: ours beside the peers, in turns, a process a run.

    python benchmarks/compare_remote.py [--mib 1024] [--runs 3] [--only http,https,seaweed,slow]
                                        [--peers PYTHON]

Servers: nginx (http and https), SeaweedFS, and nginx behind a relay that gives a connection 60 MB/s
after 30 ms ("slow"). Contenders: load_file; Run:ai's model streamer (as it comes, and 1 x 32 MiB);
s3torchconnector with safetensors; plain parallel ranges by curl (-Z, 8 ranges, to memory). Peers
run under `--peers`, a Python that has them (and safetensors, torch); what is missing has no row.
Figures: GB/s, median [lowest-highest], and peak memory. Bytes are checked by their digest.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import select
import socket
import statistics
import subprocess
import sys
import threading
import time

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
CURL = """
import subprocess, sys
url, ca = sys.argv[1:3]
size = int(sys.argv[3])
def load():
    import tempfile
    step = -(-size // 8)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        words = ["curl", "-sfZ", "--parallel-immediate"]
        for i in range(8):
            span = f"{i * step}-{min(size, (i + 1) * step) - 1}"
            words += ["-r", span, url, "-o", f"{folder}/{i}"]
            words += ["--cacert", ca] if ca else []
            words += ["--next"] if i < 7 else []
        subprocess.run(words, check=True)
    return {}
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


def pump(source: socket.socket, target: socket.socket, rate: float | None) -> None:
    """Carry bytes one way until either side ends; `rate`: bytes a second."""
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            if rate is not None:
                time.sleep(len(data) / rate)
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def relay(port: int, delay_s: float = 0.03, rate: float = 60e6):
    """Give each connection its own rate, and each first byte a delay."""

    def serve(client: socket.socket) -> None:
        upstream = socket.create_connection(("127.0.0.1", port))
        threading.Thread(target=pump, args=(client, upstream, None), daemon=True).start()
        select.select([upstream], [], [])
        time.sleep(delay_s)
        pump(upstream, client, rate)

    listener = socket.create_server(("127.0.0.1", 0), backlog=128)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=serve, args=(client,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.close()


def run(python: str, program: str, words: list[str], environment: dict[str, str]):
    """One run: (seconds, MiB, digest), or None and why."""
    done = subprocess.run([python, "-c", program + MEASURE, *words], capture_output=True, text=True,
                          env={**os.environ, **environment}, check=False, timeout=120)
    if done.returncode != 0:
        return None, (done.stderr.strip().splitlines() or ["?"])[-1][:100]
    return json.loads(done.stdout.splitlines()[-1]), ""


KEYS = {"AWS_ACCESS_KEY_ID": "KEY", "AWS_SECRET_ACCESS_KEY": "SECRET", "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true"}


def contenders(peers: str | None, endpoint: str, plain: str, ca: str, size: int, is_s3: bool):
    """(name, python, program, words, environment) of each."""
    key = {**KEYS, "AWS_ENDPOINT_URL": endpoint}
    if ca:
        key["AWS_CA_BUNDLE"] = ca
    streamer = {**key, "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
                "RUNAI_STREAMER_S3_ENDPOINT": endpoint}
    address = "s3://bench/m.safetensors"
    rows = [("fastsafetensors", sys.executable, OURS, [address if is_s3 else plain, ca], key)]
    if peers:
        rows += [
            ("model-streamer, as it comes", peers, STREAMER, [address, ca], streamer),
            ("model-streamer, 1 x 32 MiB", peers, STREAMER, [address, ca],
             {**streamer, "RUNAI_STREAMER_CONCURRENCY": "1",
              "RUNAI_STREAMER_CHUNK_BYTESIZE": str(32 << 20)}),
            ("s3torchconnector + safetensors", peers, CONNECTOR, [address, ca], key),
        ]
    if not is_s3:
        rows.append(("curl, 8 ranges", sys.executable, CURL, [plain, ca, str(size)], {}))
    return rows


def measure(title: str, rows: list, size: int, runs: int) -> list[str]:
    """Run all in turns; return a table's lines."""
    found: dict[str, list] = {row[0]: [] for row in rows}
    reasons: dict[str, str] = {}
    for _ in range(runs):
        for name, python, program, words, environment in rows:
            result, why = run(python, program, words, environment)
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

    def compare(title: str, url: str, ca: str = "", is_s3: bool = False) -> None:
        rows = contenders(given.peers, url.rstrip("/"), f"{url}bench/m.safetensors", ca, size,
                          is_s3)
        lines.extend(measure(title, rows, size, given.runs))

    if "http" in wanted or "slow" in wanted:
        with nginx(folder / "nginx", folder) as url:
            if "http" in wanted:
                compare("http", url)
            if "slow" in wanted:
                with relay(int(url.rstrip("/").rsplit(":", 1)[1])) as port:
                    compare("slow", f"http://127.0.0.1:{port}/")
    if "https" in wanted:
        pair = make_certificate(folder)
        with nginx(folder / "tls", folder, pair) as url:
            compare("https", url, pair[0])
    if "seaweed" in wanted and find_program("weed"):
        with seaweed(folder / "weed", "KEY", "SECRET") as url:
            remote.configure(endpoint=url, access_key="KEY", secret_key="SECRET")
            for _ in range(100):
                try:
                    save_file(load_file(file), "s3://bench/m.safetensors")
                    break
                except OSError:
                    time.sleep(0.1)
            compare("SeaweedFS", url + "/", is_s3=True)
    file.unlink()
    (folder / "report.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
