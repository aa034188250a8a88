# SPDX-License-Identifier: Apache-2.0
"""Simulated crashes of saves: every state after a kill or a power failure.

A save runs with a log of its writes, syncs and names (tests/fakes/io_log.c). The log is replayed to
every prefix. A killed program leaves exactly that state. A power cut leaves the synced bytes with
none, all or some of the later ones, and the names at the last sync of their folder with any number
of the later changes, in order. Each such state must hold the complete old model or the complete new
one.
"""

import hashlib
import os
import random
import shutil
import subprocess
import sys

import pytest
from fake_gpu import fakes_folder

SAVE = """
import os, sys
kind, folder, seed, durable, engine, shard = sys.argv[1:7]
if kind == "edit":  # by the command, which it becomes
    quick = [] if durable == "1" else ["--quick"]
    os.execv(engine, [engine, "edit", *quick, "--set", "seed=" + seed,
                      folder + "/model.safetensors"])
import numpy  # and not torch, which takes longer to import than all of this
from fastsafetensors import _core
from fastsafetensors.numpy import save_file
generator = numpy.random.default_rng(int(seed))
tensors = {f"t{i}": generator.standard_normal(5000 + 700 * i, numpy.float32) for i in range(8)}
if kind == "packed":
    tensors = {"t0": generator.standard_normal(20000, numpy.float32)}
    save_file(tensors, folder + "/model.safetensors", {"seed": seed}, durable=durable == "1",
              engine=engine, compress=True)
    sys.exit()
rows = [(n, "F32", t.shape, t.ctypes.data, t.nbytes) for n, t in sorted(tensors.items())]
options = dict(promise="durable" if durable == "1" else "quick", engine=engine)
if kind == "file":
    writer = _core.Writer(folder + "/model.safetensors", rows, {"seed": seed}, **options)
else:
    files = int(shard)
    place = [i * files // len(rows) for i in range(len(rows))]
    writer = _core.Writer(folder, rows, {"seed": seed}, file_of=place, file_count=files,
                          **options)
writer.commit()
writer.close()
"""


def save(kind, folder, seed, durable, engine, shards=3, log=None):
    """Save in a separate process; with a log, record its system calls."""
    environment = dict(os.environ)
    if log is not None:
        environment |= {"LD_PRELOAD": os.path.join(fakes_folder(), "libio_log.so"),
                        "IO_LOG": os.fspath(log), "IO_LOG_FOLDER": os.fspath(folder)}
    subprocess.run([sys.executable, "-c", SAVE, kind, folder, str(seed), str(int(durable)), engine,
                    str(shards)], env=environment, check=True, timeout=600)


def read_log(path):
    """Return the log as [(letter, ...)], including the bytes of writes."""
    data, at, found = path.read_bytes(), 0, []
    while at < len(data):
        end = data.index(b"\n", at)
        letter, _, rest = data[at:end].decode().partition(" ")
        at = end + 1
        if letter == "w":
            inode, offset, size = map(int, rest.split())
            found.append(("w", inode, offset, data[at: at + size]))
            at += size
        elif letter in "tz":
            found.append((letter, *map(int, rest.split())))
        elif letter in "cl":
            inode, _, name = rest.partition(" ")
            found.append((letter, int(inode), name))
        elif letter == "r":
            found.append(("r", *rest.split("\t")))
        else:
            found.append((letter, int(rest) if letter in "ns" else rest))
    return found


class Disk:
    """Files by inode, and names, with the changes that have not reached the device yet."""

    def __init__(self, folder):
        """The initial state, all of it on the device."""
        self.synced = {}  # inode: bytes
        self.writes = {}  # inode: changes since the last sync
        self.names = {}
        self.changes = []  # changes of names since the last sync
        # current inode number: a unique number, because the kernel reuses inode numbers
        self.files = {}
        for path in folder.rglob("*"):
            if path.is_file():
                inode = path.stat().st_ino
                self.synced[inode] = path.read_bytes()
                self.names[os.fspath(path)] = inode

    def do(self, entry):
        """Apply one entry of the log."""
        letter = entry[0]
        if letter in "cn":
            self.files[entry[1]] = (entry[1], len(self.synced))
            self.synced[self.files[entry[1]]] = b""
        if letter in "cnlwtzs":
            entry = (letter, self.files.get(entry[1], entry[1]), *entry[2:])
        if letter in "wtz":
            self.writes.setdefault(entry[1], []).append(entry)
        elif letter == "s":
            self.synced[entry[1]] = self.content(entry[1], self.writes.pop(entry[1], []))
        elif letter == "S":
            self.names = self.named(len(self.changes))
            self.changes = []
        elif letter in "clru":
            self.changes.append(entry)

    def content(self, inode, writes):
        """Bytes of a file after some of its changes."""
        data = bytearray(self.synced[inode])
        for entry in writes:
            if entry[0] == "w":
                _, _, offset, piece = entry
                data.extend(bytes(max(0, offset + len(piece) - len(data))))
                data[offset: offset + len(piece)] = piece
            elif entry[0] == "t":
                data.extend(bytes(max(0, entry[2] - len(data))))
            else:
                data[entry[2]:] = b""
                data.extend(bytes(entry[2] - len(data)))
        return bytes(data)

    def named(self, count):
        """Names after the first `count` changes."""
        names = dict(self.names)
        for entry in self.changes[:count]:
            if entry[0] in "cl":
                names[entry[2]] = entry[1]
            elif entry[0] == "r":
                names[entry[2]] = names.pop(entry[1])
            else:
                names.pop(entry[1], None)
        return names

    def state(self, count, keep):
        """{path: bytes} after `count` changes of names, with the writes that `keep` chooses."""
        names = self.named(count)
        return {name: self.content(inode, keep(self.writes.get(inode, [])))
                for name, inode in names.items()}

    def after_kill(self):
        """Return the state that a killed program leaves."""
        return self.state(len(self.changes), lambda writes: writes)

    def after_power_cut(self, random_):
        """Return states that a power cut may leave."""
        for count in range(len(self.changes) + 1):
            yield self.state(count, lambda writes: [])
            yield self.state(count, lambda writes: writes)
            yield self.state(count, lambda writes: [w for w in writes if random_.random() < 0.5])


def describe(folder):
    """Return a digest of the names, bytes and metadata of the model in a folder."""
    from fastsafetensors import _core

    model = _core.Model(folder)
    digest = hashlib.sha256(repr(model.metadata(0)).encode())
    loader = model.load(mode="load", engine="pread")
    import ctypes

    for tensor in sorted(loader, key=lambda t: t.name):
        digest.update(tensor.name.encode() + ctypes.string_at(tensor.data_ptr, tensor.nbytes))
    loader.close()
    model.close()
    return digest.hexdigest()


class Judge:
    """Write states to a separate disk and find the model that they hold; equal states once."""

    def __init__(self, scratch, folder):
        """Write states to `scratch`. The paths in a state begin with `folder`."""
        self.scratch, self.folder, self.known = scratch, os.fspath(folder), {}

    @staticmethod
    def opened(path):
        """The digest of the model at a path; "none" if opening it fails."""
        from fastsafetensors import SafetensorError

        try:
            return describe(path)
        except (SafetensorError, OSError):
            return "none"

    def model(self, state, name):
        """The digest of the model in a state."""
        parts = sorted((path, hashlib.sha256(data).digest()) for path, data in state.items())
        key = hashlib.sha256(repr(parts).encode()).digest()
        if key not in self.known:
            shutil.rmtree(self.scratch, ignore_errors=True)
            os.makedirs(self.scratch)
            for path, data in state.items():
                target = self.scratch + path[len(self.folder):]
                with open(target, "wb") as file:
                    file.write(data)
            self.known[key] = self.opened(os.path.join(self.scratch, name))
        return self.known[key]


@pytest.mark.parametrize("kind, old, new", [("file", 1, 1), ("set", 3, 3), ("set", 3, 2),
                                            ("set", 2, 4), ("set", 1, 3), ("set", 3, 1),
                                            ("file", 0, 1), ("set", 0, 3), ("set", 0, 1),
                                            ("edit", 1, 1), ("packed", 1, 1)])
@pytest.mark.parametrize("durable, engine", [(True, "direct"), (True, "buffered"),
                                             (False, "buffered")])
def test_every_state_has_a_complete_model(tmp_path, torch, command, kind, old, new, durable,
                                         engine):
    """A quick save only promises to survive a kill of the program."""
    if kind == "edit" and engine == "direct":
        pytest.skip("an edit has no engine to choose")
    if kind == "packed" and (engine == "direct" or not durable):
        pytest.skip("compressed files are written by way of the cache, and a durable save has all")
    folder, log = tmp_path / "models", tmp_path / "log"
    folder.mkdir()
    name = {"set": "model.safetensors.index.json"}.get(kind, "model.safetensors")
    name = "." if kind == "set" and not {0, 1}.isdisjoint((old, new)) else name
    # if there was no old model, the folder must not open before the new one is complete
    before = "none"
    if old:
        save("file" if kind == "edit" else kind, folder, 1, True, "buffered", old)
        before = describe(os.path.join(folder, name))
    disk = Disk(folder)
    judge = Judge(os.fspath(tmp_path / "scratch"), folder)
    save(kind, folder, 2, durable, command if kind == "edit" else engine, new, log)
    after = describe(os.path.join(folder, name))
    assert before != after
    entries, random_, states = read_log(log), random.Random(5), 0
    assert {"w", "t"} <= {entry[0] for entry in entries}, "nothing was logged"
    seen = []
    for entry in [None, *entries]:
        if entry is not None:
            disk.do(entry)
        seen.append(judge.model(disk.after_kill(), name))
        assert seen[-1] in (before, after), entry
        for state in disk.after_power_cut(random_) if durable else []:
            states += 1
            assert judge.model(state, name) in (before, after), entry
    # Later states have the new model, too.
    assert seen == sorted(seen, key=[before, after].index) and seen[-1] == after
    assert "none" not in seen or not old
    if durable:
        assert disk.changes == [] or all(entry[0] == "u" for entry in disk.changes)
        assert states >= 20 and len(judge.known) >= 2
