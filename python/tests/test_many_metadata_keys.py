# SPDX-License-Identifier: Apache-2.0
"""As many metadata keys as tensors, as after `hash --embed`: linear cost, not quadratic."""

import json
import struct
import subprocess

COUNT = 120_000


def test_many_embedded_digests(command, tmp_path):
    """A linear search for each key would take minutes, and a search over all tensors for each key
    hours. The limit detects both."""
    def run(*words):
        return subprocess.run([command, *words], cwd=tmp_path, capture_output=True, text=True,
                              timeout=60, check=False)

    header = {f"t{i}": {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]}
              for i in range(COUNT)}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    data = bytes(range(256)) * (COUNT // 256 + 1)
    (tmp_path / "m").write_bytes(struct.pack("<Q", len(encoded)) + encoded + data[:COUNT])
    assert run("hash", "--embed", "kept", "m").returncode == 0
    assert run("verify", "--hash", "kept").returncode == 0
    assert f"{COUNT} tensors are the same" in run("diff", "kept", "kept").stdout
    assert run("inspect", "kept").stdout.count("\n") > COUNT
    done = run("convert", "kept", "made")
    assert done.returncode == 0, done.stderr
    with open(tmp_path / "made", "r+b") as file:  # the last byte is another one
        file.seek(-1, 2)
        file.write(b"\xff" if data[COUNT - 1] != 255 else b"\0")
    done = run("verify", "--hash", "made")
    assert done.returncode == 1 and "differs" in done.stdout
    done = run("diff", "kept", "m")
    assert done.returncode == 1 and "more keys like these" in done.stdout


def test_padding_with_many_metadata_keys(command, tmp_path):
    """The padding mark is the last of many keys. It must be searched for once, not once per
    tensor."""
    count = COUNT // 4
    header = {"__metadata__": {**{f"k{i}": "" for i in range(count)}, "__padding__": "64"}}
    header.update({f"__padding__.{i}" if i % 2 else f"t{i}": {
        "dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i in range(count)})
    encoded = json.dumps(header, separators=(",", ":")).encode()
    (tmp_path / "m").write_bytes(struct.pack("<Q", len(encoded)) + encoded + bytes(count))
    for words in (["inspect", "--json", "m"], ["diff", "m", "m"], ["convert", "m", "made"]):
        done = subprocess.run([command, *words], cwd=tmp_path, capture_output=True, timeout=60,
                              check=False)
        assert done.returncode == 0, done.stderr
