# SPDX-License-Identifier: Apache-2.0
"""Weight deltas in folders of others: links, FIFOs, damaged deltas, and files that differ from the
version's manifest."""

import logging
import os
import subprocess
import sys

import pytest
from delta_folders import expect, read_checkpoint, same, write_chain
from test_delta_recovery_and_folders import kill_while_applying

from fastsafetensors import SafetensorError, deltas, write_manifest

pytest.importorskip("zstandard", reason="needs the zstandard package")


@pytest.fixture
def source(tmp_path, states):
    """A folder with one version, and the manifest of that version."""
    folder = tmp_path / "source"
    folder.mkdir()
    (version,) = write_chain(folder, states[:2])
    deltas.apply(tmp_path / "local", version)
    write_manifest(tmp_path / "local", version / "model.manifest")
    subprocess.run(["rm", "-rf", tmp_path / "local"], check=True)
    return folder


@pytest.fixture
def fresh(tmp_path, local, source, states):
    """The checkpoint in its first state again."""
    from delta_folders import write_checkpoint

    write_checkpoint(local, states[0])
    return local


def test_a_planted_link_is_not_written_through(tmp_path, fresh, source):
    target = tmp_path / "profile"
    target.write_text("precious")
    for name in ("model.manifest.tmp", "model.manifest"):
        os.symlink(target, fresh / name)
    assert deltas.pull(fresh, source) is not None
    assert target.read_text() == "precious"
    assert not (fresh / "model.manifest").is_symlink()


def damage(folder):
    """Change the last bit of a file and keep its times, so that only its content differs."""
    path = min(folder.glob("*.safetensors"))
    times = path.stat()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_a_failed_comparison_is_not_forgotten(fresh, source, states, monkeypatch):
    """Each call reports it until the files are right."""
    real = deltas._core.delta_apply

    def apply(*arguments):
        stats = real(*arguments)
        damage(fresh)
        return stats

    with monkeypatch.context() as patch:
        patch.setattr(deltas._core, "delta_apply", apply)
        expect("DigestMismatch", lambda: deltas.pull(fresh, source))
    for _ in range(2):
        expect("DigestMismatch", lambda: deltas.pull(fresh, source))
        expect("DigestMismatch", lambda: deltas.recover(fresh))
        with pytest.raises(SafetensorError), deltas.reading(fresh):
            pass
    damage(fresh)  # the same bit again: right
    with deltas.reading(fresh):
        assert same(read_checkpoint(fresh), states[1])
    assert (fresh / "model.manifest").exists()
    assert not list((fresh / ".weight_sync").glob("manifest-*"))


@pytest.mark.parametrize("call", ["pull", "recover", "reading"])
def test_a_kill_before_the_comparison_is_made_up_for(call, fresh, source):
    program = ("import os, sys\nfrom fastsafetensors import deltas\n"
               "from fastsafetensors._deltas import delta_manifest\n"
               "delta_manifest.finish_manifest = lambda *_: os.kill(os.getpid(), 9)\n"
               "deltas.pull(*sys.argv[1:])\n")
    done = subprocess.run([sys.executable, "-c", program, fresh, source])
    assert done.returncode == -9 and not (fresh / "model.manifest").exists()
    if call == "reading":
        with deltas.reading(fresh):
            pass
    else:
        deltas.pull(fresh, source) if call == "pull" else deltas.recover(fresh)
    assert (fresh / "model.manifest").read_bytes() == \
        next(source.glob("*/model.manifest")).read_bytes()


def test_an_update_that_fails_leaves_no_manifest_behind(fresh, source):
    version = next(source.iterdir())
    with pytest.raises(SafetensorError):
        deltas.apply(fresh, version, version="000007", manifest=version / "model.manifest")
    assert not list((fresh / ".weight_sync").glob("manifest-*"))


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_the_lock_is_a_file(kind, tmp_path, local):
    """A link is not followed, and a FIFO does not block."""
    (local / ".weight_sync").mkdir()
    lock = local / ".weight_sync/lock"
    os.symlink(tmp_path / "made", lock) if kind == "link" else os.mkfifo(lock)
    with pytest.raises(OSError), deltas.reading(local):
        pass
    (local / ".weight_sync/journal").touch()  # of an update to be finished
    with pytest.raises(OSError, match="lock"):
        deltas.recover(local)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("kind", ["fifo", "large"])
def test_an_index_is_a_file_of_bounded_size(kind, fresh, source):
    other = source / "zzz"
    other.mkdir()
    index = other / "model.safetensors.index.json"
    if kind == "fifo":
        os.mkfifo(index)
    else:
        index.touch()
        os.truncate(index, 3 << 30)
    assert deltas.pull(fresh, source) is not None


def test_a_damaged_delta_does_not_undo(tmp_path, states, local):
    """The old bytes come back, or the folder stays marked as interrupted."""
    (folder,) = write_chain(tmp_path, states[:2], shards=1)
    shard = next(folder.glob("*.safetensors"))
    good, undone, refused = shard.read_bytes(), 0, 0
    start = 8 + int.from_bytes(good[:8], "little")
    for at in range(start + 50, len(good) // 2, max(1, (len(good) // 2 - start) // 12)):
        with open(shard, "r+b") as file:  # the same file, as the journal knows it
            file.write(good)
        subprocess.run(["rm", "-rf", local], check=True)
        from delta_folders import write_checkpoint

        write_checkpoint(local, states[0])
        kill_while_applying(local, folder)
        with open(shard, "r+b") as file:
            file.seek(at)
            file.write(bytes([good[at] ^ 1]))
        try:
            deltas.recover(local, roll_back=True)
            undone += 1
            assert same(read_checkpoint(local), states[0]), at
        except SafetensorError:
            refused += 1
            assert deltas.version_of(local).interrupted
    assert refused > 0 or undone > 0


def test_versions_are_printed_without_control_characters(fresh, source, caplog):
    from fastsafetensors._base.errors import printable, refuse

    with pytest.raises(SafetensorError) as caught:
        refuse("version \x1b]0;owned\x07\u202e", "VersionMismatch")
    assert str(caught.value) == "version ?]0;owned??"
    assert printable("a\x1bb") == "a?b"
    with caplog.at_level(logging.INFO), pytest.raises(SafetensorError) as caught:
        deltas.pull(fresh, source, until="9\x1b[31m")
    assert "\x1b" not in str(caught.value)


def test_a_forked_child_has_no_part_in_its_parents_lock(fresh, source):
    """It leaves the `with` block first, and lives on when its parent is killed."""
    engine = subprocess.Popen([sys.executable, "-c", """
import os, sys, time
from fastsafetensors import deltas
with deltas.reading(sys.argv[1]):
    leaves = os.fork()
    if leaves:
        os.waitpid(leaves, 0)
        if os.fork() == 0:
            print(os.getpid(), flush=True)
        time.sleep(60)
""", str(fresh)], stdout=subprocess.PIPE, text=True)
    child = int(engine.stdout.readline())
    version = sorted(path for path in source.iterdir() if path.is_dir())[0]
    with pytest.raises(TimeoutError, match="updating or reading"):
        deltas.apply(fresh, version)
    engine.kill()
    engine.wait()
    try:
        assert deltas.apply(fresh, version)["tensors"] > 0
    finally:
        os.kill(child, 9)
