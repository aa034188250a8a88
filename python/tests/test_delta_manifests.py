# SPDX-License-Identifier: Apache-2.0
"""Manifests that wait for the end of an update: no process drops that of another one, and no
later version is applied before the files were compared with it."""

import errno
import fcntl
import json
import os
import subprocess
import sys

import pytest
from delta_folders import expect, kill_in_a_write, make_states, read_checkpoint, same, write_chain
from delta_folders import write_checkpoint, write_delta
from test_delta_hostile_folders import damage, fresh, source  # noqa: F401 - fixtures
from test_delta_recovery_and_folders import kill_while_applying

from fastsafetensors import SafetensorError, check_manifest, deltas, write_manifest
from fastsafetensors._deltas import delta_manifest
from fastsafetensors._verify.digests import Problem

pytest.importorskip("zstandard", reason="needs the zstandard package")


@pytest.fixture
def version(source):  # noqa: F811
    """The folder of the version 000001, in which its manifest is."""
    return next(source.iterdir())


@pytest.fixture
def manifest(version):
    return version / "model.manifest"


def waiting(checkpoint):
    return list((checkpoint / ".weight_sync").glob("manifest-*"))


def installed(checkpoint, manifest):
    path = checkpoint / "model.manifest"
    return path.exists() and path.read_bytes() == manifest.read_bytes()


def run(program, *arguments):
    """Run a program that kills itself."""
    start = ("import os, resource, signal, sys\nfrom fastsafetensors import deltas\n"
             "from fastsafetensors._deltas import delta_manifest\n"
             "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n")
    done = subprocess.run([sys.executable, "-c", start + program, *arguments], check=False)
    assert done.returncode < 0


def kill_in_the_middle(checkpoint, version, manifest):
    """Kill apply(manifest=) while it changes files."""
    kill_in_a_write(checkpoint, "deltas.apply(*sys.argv[1:3], manifest=sys.argv[3], "
                    "version='000000', threads=1)", version, manifest)
    assert waiting(checkpoint)


def kill_before_the_comparison(checkpoint, version, manifest):
    run("delta_manifest.finish_manifest = lambda *_: os.kill(os.getpid(), 9)\n"
        "deltas.apply(*sys.argv[1:3], manifest=sys.argv[3])", checkpoint, version, manifest)
    assert waiting(checkpoint)


def patch_update(monkeypatch, before=lambda: None, after=lambda: None):
    """Do something before and after the library's call of this process."""
    real = deltas._core.delta_apply

    def apply(*arguments):
        before()
        stats = real(*arguments)
        after()
        return stats

    monkeypatch.setattr(deltas._core, "delta_apply", apply)


# ---- several processes ----

def test_a_process_without_the_lock_drops_no_manifest(fresh, version, manifest):  # noqa: F811
    kill_in_the_middle(fresh, version, manifest)
    with open(fresh / ".weight_sync/lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as the process that finishes the update
        with pytest.raises(TimeoutError):
            deltas.apply(fresh, version, manifest=manifest)
    deltas.recover(fresh)
    assert installed(fresh, manifest) and not waiting(fresh)


def test_a_slower_process_drops_no_manifest(fresh, version, manifest, monkeypatch):  # noqa: F811
    def before():
        kill_before_the_comparison(fresh, version, manifest)
        damage(fresh)

    with monkeypatch.context() as patch:
        patch_update(patch, before)
        expect("DigestMismatch", lambda: deltas.apply(fresh, version, manifest=manifest))
    with pytest.raises(SafetensorError), deltas.reading(fresh):
        pass
    damage(fresh)  # the same bit again
    assert deltas.apply(fresh, version, manifest=manifest)["recovered"] == 1
    assert installed(fresh, manifest) and not waiting(fresh)


@pytest.mark.parametrize("call", ["reading", "recover"])
def test_another_process_finishes_at_the_same_time(
    call, fresh, version, manifest, monkeypatch,  # noqa: F811
):
    kill_before_the_comparison(fresh, version, manifest)
    real = delta_manifest.check_manifest

    def check(checkpoint, path):
        os.replace(path, fresh / "model.manifest")
        return real(checkpoint, path)

    monkeypatch.setattr(delta_manifest, "check_manifest", check)
    if call == "recover":
        deltas.recover(fresh)
    else:
        with deltas.reading(fresh):
            pass
    assert installed(fresh, manifest)


def test_only_manifests_of_dead_processes_are_removed(fresh, version):  # noqa: F811
    folder = fresh / ".weight_sync"
    folder.mkdir()
    names = "manifest-0123456789abcdef-dead", "manifest-0123456789abcdef-live"
    for name in names:
        (folder / name).write_text("fastsafetensors-manifest ")
    with open(folder / names[1]) as live:
        fcntl.flock(live, fcntl.LOCK_EX)
        deltas.apply(fresh, version)
        assert waiting(fresh) == [folder / names[1]]
    deltas.recover(fresh)
    assert not waiting(fresh)


# ---- kills and errors ----

def test_the_same_call_after_a_kill_finishes(fresh, version, manifest, states):  # noqa: F811
    kill_in_the_middle(fresh, version, manifest)
    stats = deltas.apply(fresh, version, manifest=manifest, version="000000")
    assert stats["recovered"] == 1
    assert installed(fresh, manifest) and not waiting(fresh)
    assert same(read_checkpoint(fresh), states[1])


@pytest.mark.parametrize("new_files", [True, False])
def test_the_same_call_after_a_kill_before_the_comparison_finishes(
    new_files, fresh, version, manifest, tmp_path, states,  # noqa: F811
):
    kill_before_the_comparison(fresh, version, manifest)
    options = {"manifest": manifest, "new_files": new_files}
    expect("VersionMismatch", lambda: deltas.apply(fresh, version, version="7", **options))
    kill_before_the_comparison(fresh, version, manifest)
    stats = deltas.apply(fresh, version, version="0", **options)
    assert (stats["recovered"], stats["tensors"]) == (1, 0)
    assert installed(fresh, manifest) and not waiting(fresh)
    assert "already" in expect("VersionMismatch", lambda: deltas.apply(fresh, version))


@pytest.mark.parametrize("is_made", [False, True])
def test_an_error_drops_the_manifest_of_an_update_that_was_not_made(
    is_made, fresh, version, manifest, monkeypatch,  # noqa: F811
):
    """An update may be made in spite of an error: the last step failed."""
    renames = fresh / ".weight_sync/renames"

    def fail():
        if is_made:
            renames.touch()
        raise OSError("the disk failed")

    with monkeypatch.context() as patch:
        times = {"after": fail} if is_made else {"before": fail}
        patch_update(patch, **times)
        with pytest.raises(OSError, match="the disk failed"):
            deltas.apply(fresh, version, manifest=manifest)
    assert len(waiting(fresh)) == is_made
    renames.unlink(missing_ok=True)
    with deltas.reading(fresh):
        assert installed(fresh, manifest) == is_made


@pytest.mark.parametrize("call", ["apply", "chain", "Delta.apply"])
@pytest.mark.parametrize("is_right", [True, False])
def test_a_later_version_is_not_applied_before_the_comparison(
    call, is_right, tmp_path, fresh, version, manifest, states,  # noqa: F811
):
    second = write_chain(tmp_path / "all", states)[1]
    if not is_right:
        write_checkpoint(tmp_path / "other", states[2])
        write_manifest(tmp_path / "other", manifest := tmp_path / "other.manifest")
    kill_in_the_middle(fresh, version, manifest)

    def go_on():
        if call == "Delta.apply":
            return deltas.Delta(second).apply(fresh)
        return deltas.apply(fresh, *([version] if call == "chain" else []), second)

    if is_right:
        assert go_on()["recovered"] == 1
        assert installed(fresh, manifest)
        assert same(read_checkpoint(fresh), states[2])
    else:
        for _ in range(2):
            expect("DigestMismatch", go_on)
        assert same(read_checkpoint(fresh), states[1])


def test_the_library_applies_no_later_version(
    fresh, version, manifest, tmp_path, states,  # noqa: F811
):
    """The command does the same: neither knows manifests."""
    kill_before_the_comparison(fresh, version, manifest)
    second = deltas.Delta(write_chain(tmp_path / "all", states)[1])

    def apply():
        return deltas._core.delta_apply(second._delta, os.fsencode(fresh), 0, 0, None)

    assert "manifest of version 000001" in expect("VersionMismatch", apply)
    second.verify(fresh)
    deltas.recover(fresh)
    assert apply()["tensors"] == 3


def test_a_folder_without_a_note_keeps_its_manifest(
    fresh, version, manifest, tmp_path, states,  # noqa: F811
):
    """The version is taken to be the next delta's base, by Python and by the library."""
    kill_before_the_comparison(fresh, version, manifest)
    (fresh / ".weight_sync/state.json").unlink()
    second = deltas.Delta(write_chain(tmp_path / "all", states)[1])
    deltas.recover(fresh)
    (tmp_path / "only").mkdir()
    (tmp_path / "only/second").symlink_to(tmp_path / "all/weight_v000002")
    damage(fresh)
    expect("DigestMismatch", lambda: second.apply(fresh))
    expect("DigestMismatch", lambda: deltas.pull(fresh, tmp_path / "only"))
    damage(fresh)  # the same bit again
    expect("VersionMismatch", lambda: deltas._core.delta_apply(
        second._delta, os.fsencode(fresh), 0, 0, None))
    assert second.apply(fresh)["tensors"] == 3
    assert installed(fresh, manifest) and not waiting(fresh)


def test_a_version_of_another_spelling_is_compared(
    fresh, version, manifest, tmp_path, states,  # noqa: F811
):
    """1 is 000001."""
    write_manifest(fresh, manifest)  # wrong
    short = write_delta(tmp_path / "short", states[0], states[1], "1", "0")
    kill_while_applying(fresh, short)
    for _ in range(2):
        expect("DigestMismatch", lambda: deltas.apply(fresh, version, manifest=manifest))
    assert deltas.version_of(fresh).version == "1"
    second = deltas.Delta(write_chain(tmp_path / "all", states)[1])
    expect("VersionMismatch", lambda: deltas._core.delta_apply(
        second._delta, os.fsencode(fresh), 0, 0, None))


def test_other_kinds_of_files_are_no_manifests(
    fresh, version, tmp_path, states,  # noqa: F811
):
    deltas.apply(fresh, version)
    start = str(fresh / ".weight_sync" / delta_manifest._name_start("000001"))
    os.symlink("/nowhere", start + "link")
    os.mkdir(start + "folder")
    assert deltas.apply(fresh, write_chain(tmp_path / "all", states)[1])["tensors"] == 3


# ---- wrong manifests ----

@pytest.mark.parametrize("call", ["apply", "pull", "reading"])
@pytest.mark.parametrize("is_last", [True, False])
def test_the_manifest_that_was_given_last_decides(
    call, is_last, fresh, source, version, manifest, monkeypatch,  # noqa: F811
):
    """Several wait: of processes that run, or one was killed before it removed the others. The
    order of their names says nothing, and neither does the clock."""
    good = manifest.read_bytes()
    write_manifest(fresh, manifest)  # of the version before
    expect("DigestMismatch", lambda: deltas.pull(fresh, source))
    (wrong,) = waiting(fresh)
    wrong = wrong.rename(wrong.parent / (wrong.name[:-8] + ("aaaaaaaa" if is_last else "zzzzzzzz")))
    manifest.write_bytes(good)
    monkeypatch.setattr(delta_manifest.time, "time_ns", lambda: 1)
    with open(wrong) as live:
        fcntl.flock(live, fcntl.LOCK_EX)
        if call == "apply":
            deltas.apply(fresh, version, manifest=manifest)
        elif call == "pull":
            deltas.pull(fresh, source)
        else:
            right = wrong.parent / (wrong.name[:-8] + "mmmmmmmm")
            right.write_bytes(good)
            last = wrong.stat().st_mtime_ns + 1
            os.utime(right, ns=(last, last))
            with deltas.reading(fresh):
                pass
    assert installed(fresh, manifest) and not waiting(fresh)


def test_a_manifest_that_was_repaired_after_a_kill_is_compared(
    fresh, source, version, manifest,  # noqa: F811
):
    good = manifest.read_bytes()
    write_manifest(fresh, manifest)  # of the version before
    kill_in_the_middle(fresh, version, manifest)
    manifest.write_bytes(good)
    from fastsafetensors._deltas import delta_ranks

    assert delta_ranks._reachable(str(fresh), str(source)) == ["1"]
    deltas.pull(fresh, source)
    assert installed(fresh, manifest) and not waiting(fresh)


@pytest.mark.parametrize("call", ["apply", "pull"])
@pytest.mark.parametrize("kind", ["link", "folder", "fifo", "large", "own folder"])
def test_a_manifest_is_a_regular_file_of_usual_size(
    call, kind, fresh, source, version, manifest, states,  # noqa: F811
):
    own = fresh / "model.manifest"
    place = own if kind == "own folder" else manifest
    place.unlink(missing_ok=True)
    if kind == "link":
        place.symlink_to("nowhere")
    elif kind == "fifo":
        os.mkfifo(place)
    elif kind == "large":
        with open(place, "wb") as file:
            file.truncate((1 << 30) + 1)
    else:
        place.mkdir()

    def update():
        if call == "pull":
            return deltas.pull(fresh, source)
        return deltas.apply(fresh, version, manifest=manifest)

    for _ in range(2):
        with pytest.raises(OSError, match=str(place)):
            update()
    assert same(read_checkpoint(fresh), states[0])
    assert deltas.version_of(fresh) == (None, False)


@pytest.mark.parametrize("call", ["apply", "pull"])
@pytest.mark.parametrize("size", [30, -50, -1])
def test_an_invalid_manifest_changes_nothing(
    call, size, fresh, source, version, manifest, states,  # noqa: F811
):
    good = manifest.read_bytes()
    manifest.write_bytes(good[:size])

    def update():
        if call == "pull":
            return deltas.pull(fresh, source)
        return deltas.apply(fresh, version, manifest=manifest)

    assert str(manifest) in expect("InvalidManifest", update)
    assert same(read_checkpoint(fresh), states[0])
    assert deltas.version_of(fresh) == (None, False)
    assert os.listdir(fresh / ".weight_sync") == []
    manifest.write_bytes(good)
    assert update()["tensors"] == 3 and installed(fresh, manifest)


@pytest.mark.parametrize("call", ["apply", "pull"])
@pytest.mark.parametrize("is_invalid", [True, False])
def test_a_repaired_manifest_is_compared(
    call, is_invalid, fresh, source, version, manifest,  # noqa: F811
):
    good = manifest.read_bytes()
    write_manifest(fresh, manifest)  # of the version before
    expect("DigestMismatch", lambda: deltas.pull(fresh, source))
    tag = "DigestMismatch"
    if is_invalid:  # damaged while it waited
        waiting(fresh)[0].write_bytes(good[:-1])
        tag = "InvalidManifest"
    for wrong in range(2):
        message = expect(tag, lambda: deltas.recover(fresh))
        assert f"give the right one to apply() or pull(), or delete {waiting(fresh)[0]}" in message
        if not wrong:  # the old manifest stays until pull() finds the repaired one
            expect("DigestMismatch", lambda: deltas.pull(fresh, source))
            tag = "DigestMismatch"
    manifest.write_bytes(good)
    if call == "pull":
        assert deltas.pull(fresh, source) is None
    else:
        assert deltas.apply(fresh, version, manifest=manifest)["recovered"] == 1
    assert installed(fresh, manifest) and not waiting(fresh)


@pytest.mark.parametrize("is_right", [True, False])
def test_pull_compares_the_manifest_of_each_version(is_right, tmp_path, local, states):
    (tmp_path / "source").mkdir()
    chain = write_chain(tmp_path / "source", make_states(4))
    write_checkpoint(tmp_path / "second", make_states(4)[2 if is_right else 1])
    write_manifest(tmp_path / "second", manifest := chain[1] / "model.manifest")
    if is_right:
        deltas.pull(local, tmp_path / "source")
        assert installed(local, manifest)
    else:
        expect("DigestMismatch", lambda: deltas.pull(local, tmp_path / "source"))
    assert deltas.version_of(local).version == ("000003" if is_right else "000002")


# ---- folders that cannot be written or read ----

def test_a_manifest_that_cannot_be_installed_blocks_nothing(
    fresh, version, manifest, tmp_path, states, monkeypatch, caplog,  # noqa: F811
):
    def fail(*_):
        raise PermissionError(errno.EACCES, "denied")

    monkeypatch.setattr(os, "replace", fail)
    deltas.apply(fresh, version, manifest=manifest)
    assert not waiting(fresh) and not installed(fresh, manifest)
    assert f"{fresh}/model.manifest" in caplog.text and "old manifest" in caplog.text
    assert deltas.apply(fresh, write_chain(tmp_path / "all", states)[1])["tensors"] == 3


def test_files_that_cannot_be_read_are_an_error(
    fresh, version, manifest, monkeypatch,  # noqa: F811
):
    kill_before_the_comparison(fresh, version, manifest)

    def fail(*_):
        raise PermissionError(errno.EACCES, "denied")

    def report(*_):
        return [Problem("DigestMismatch", "a differs", "a"), Problem("PermissionDenied", "b", "b")]

    for check in (fail, report):
        with monkeypatch.context() as patch:
            patch.setattr(delta_manifest, "check_manifest", check)
            with pytest.raises(PermissionError), deltas.reading(fresh):
                pass
        assert waiting(fresh)


def test_new_files_of_dead_processes_are_removed(fresh, version):  # noqa: F811
    folder = fresh / ".weight_sync"
    folder.mkdir()
    names = "new-manifest-dead", "new-manifest-live"
    for name in names:
        (folder / name).touch()
    with open(folder / names[1]) as live:
        fcntl.flock(live, fcntl.LOCK_EX)
        deltas.apply(fresh, version)
        assert list(folder.glob("new-*")) == [folder / names[1]]
    deltas.recover(fresh)
    assert not list(folder.glob("new-*"))


def test_pull_removes_files_of_dead_processes_of_other_users(
    fresh, source, version, monkeypatch,  # noqa: F811
):
    """Also where nothing is to be applied. They can be read, but not written."""
    deltas.apply(fresh, version)
    folder = fresh / ".weight_sync"
    for name in "new-manifest-dead", "manifest-0123456789abcdef-dead", "undo":
        (folder / name).touch()
    real = os.open

    def open_file(path, flags, *more, **options):
        if "-dead" in str(path) and flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, "denied")
        return real(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", open_file)
    assert deltas.pull(fresh, source) is None
    assert sorted(os.listdir(folder)) == ["lock", "state.json"]


def test_a_new_file_that_was_taken_for_an_old_one_is_made_again(
    fresh, version, manifest, monkeypatch,  # noqa: F811
):
    """Another process may lock and remove it before its own process has locked it."""
    real, removed = fcntl.flock, []

    def flock(*arguments):
        if not removed:
            removed.extend((fresh / ".weight_sync").glob("new-*"))
            removed[0].unlink()
        real(*arguments)

    monkeypatch.setattr(fcntl, "flock", flock)
    deltas.apply(fresh, version, manifest=manifest)
    assert removed and installed(fresh, manifest)


# ---- publishing and removing manifests ----

def test_a_manifest_is_published_before_its_version(tmp_path, local, states):
    write_checkpoint(tmp_path / "new", states[1])
    folder = tmp_path / "source/weight_v000001"
    folder.mkdir(parents=True)
    write_manifest(tmp_path / "new", folder / "model.manifest")
    assert deltas.pull(local, tmp_path / "source") is None
    deltas.make(local, tmp_path / "new", folder, version="000001", base_version="000000")
    assert deltas.pull(local, tmp_path / "source") is not None
    assert installed(local, folder / "model.manifest") and check_manifest(local) == []


def test_nothing_is_pending_while_files_are_of_two_versions(tmp_path, states, local):
    (tmp_path / "source").mkdir()
    chain = write_chain(tmp_path / "source", states)
    deltas.apply(local, chain[0])
    kill_while_applying(local, chain[1])
    expect("VersionMismatch", lambda: deltas.pending(local, tmp_path / "source"))
    deltas.recover(local)
    assert deltas.pending(local, tmp_path / "source") == [str(chain[2])]


def test_pull_waits_for_an_update_that_has_just_begun(tmp_path, states, local, monkeypatch):
    """The note of the version is absent meanwhile: no version must be taken for the folder's."""
    (tmp_path / "source").mkdir()
    chain = write_chain(tmp_path / "source", make_states(4))
    deltas.apply(local, *chain[:2])
    (chain[1] / "model.safetensors.index.json").unlink()  # two chains: 0-1 and 2-3
    real, calls = deltas.version_of, []

    def version_of(checkpoint):
        calls.append(checkpoint)
        return deltas.VersionNote(None, True) if len(calls) in (2, 3) else real(checkpoint)

    monkeypatch.setattr(deltas, "version_of", version_of)
    assert deltas.pull(local, tmp_path / "source") is not None
    assert deltas.version_of(local).version == "000003"


def test_pull_removes_old_files_of_a_process_that_was_killed(fresh, source):  # noqa: F811
    deltas.pull(fresh, source)
    old = fresh / "model-00001-of-00002.safetensors.delta-tmp"
    old.touch()
    (fresh / ".weight_sync/copies").write_text(json.dumps(
        {"version": "0", "files": {"model-00001-of-00002.safetensors": [0, 0]}}))
    assert deltas.pull(fresh, source) is None
    assert not old.exists()
