# SPDX-License-Identifier: Apache-2.0
"""The command's answers about targets and numbers: dry runs, whole files, errors of one kind."""

import json
import os
import pathlib
import shutil
import subprocess

import pytest
from conftest import has_libcurl

from fastsafetensors.torch import load_file, save_file


@pytest.fixture
def path(tmp_path, torch):
    save_file({"a": torch.arange(4.0), "b": torch.ones(2)}, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


@pytest.fixture
def run(command, tmp_path):
    """Run the command in the test's folder: (exit code, output, errors)."""
    def run_command(*arguments):
        done = subprocess.run([command, *map(str, arguments)], capture_output=True, text=True,
                              cwd=tmp_path)
        return done.returncode, done.stdout, done.stderr
    return run_command


def error_of(answer):
    """The error object of a JSON answer."""
    return json.loads(answer[1])["error"]


@pytest.mark.parametrize("arguments", [
    ["convert", "m.safetensors", "no/x"], ["extract", "--select", "a", "m.safetensors", "no/x"],
    ["merge", "m.safetensors", "no/x"], ["rescue", "m.safetensors", "no/x"],
    ["edit", "--set", "k=v", "m.safetensors", "no/x"],
    ["hash", "--embed", "no/x", "m.safetensors"],
    ["convert", "m.safetensors", "m.safetensors/x"],
], ids=" ".join)
def test_a_dry_run_refuses_a_missing_folder(arguments, path, run):
    """A dry run has the exit code and the kind of error of the command itself."""
    real, dry = run(*arguments, "--json"), run(*arguments, "--dry-run", "--json")
    assert real[0] == dry[0] == 2
    assert error_of(real)["kind"] == error_of(dry)["kind"] == "FileNotFound"
    assert "does not exist" in error_of(dry)["message"]


def test_split_makes_its_folder_and_refuses_a_file(path, run, tmp_path):
    for more in ([], ["--dry-run"]):
        answer = run("split", "--json", "--count", "1", path, path, *more)
        assert answer[0] == 2 and error_of(answer)["kind"] == "Unsupported"
        assert "is a file, and split writes a folder" in error_of(answer)["message"]
        assert run("split", "--count", "1", path, tmp_path / "new/folder", *more)[0] == 0


def test_a_whole_file_is_rescued_as_a_copy(path, run, tmp_path):
    code, _, errors = run("rescue", path, "copy")
    assert code == 0 and "the file is complete" in errors
    assert load_file(tmp_path / "copy").keys() == load_file(path).keys()


def test_a_folder_without_a_model_is_invalid(path, run, tmp_path):
    (tmp_path / "empty").mkdir()
    for arguments in (["verify"], ["inspect"], ["load"], ["hash"], ["bench"]):
        code, _, errors = run(*arguments, "empty")
        assert code == 1 and "no *.safetensors file in the folder" in errors, arguments


def test_clean_of_a_missing_path(run):
    answer = run("clean", "--json", "nope")
    error = error_of(answer)
    assert answer[0] == 2
    assert (error["kind"], error["file"], error["errno"]) == ("FileNotFound", "nope", 2)


def test_numbers(path, run):
    assert " 1 thread\n" in run("load", "--threads", "0", path)[1]
    for wrong in ("-1", "x", "1001"):
        code, _, errors = run("show", "--first", wrong, path, "a")
        assert code == 3 and f"--first must be a number up to 1000, not '{wrong}'" in errors


def test_two_models_in_one_file_each_need_two_folders(path, run, tmp_path):
    """A folder without an index is one model of all its files."""
    one = ("split", "--json", "--count", "1", path, tmp_path / "f", "--stem")
    assert run(*one, "a")[0] == 0
    assert run(*one, "a")[0] == 0
    for more in ([], ["--dry-run"]):
        answer = run(*one, "b", *more)
        assert answer[0] == 2 and error_of(answer)["kind"] == "Unsupported"
        assert "holds 'a.safetensors'" in error_of(answer)["message"]
    assert [file.name for file in (tmp_path / "f").iterdir()] == ["a.safetensors"]
    assert run("split", "--count", "2", path, tmp_path / "f", "--stem", "b")[0] == 0


def as_other_user(folder):
    """Arguments of subprocess for which a folder without write permission is not writable."""
    folder.mkdir()
    folder.chmod(0o555)
    if os.geteuid() != 0:
        return {}
    for outer in [folder, *folder.parents][:4]:
        if outer.stat().st_uid == 0 and outer != folder:
            outer.chmod(outer.stat().st_mode | 0o055)
    return {"user": 65534, "group": 65534, "extra_groups": []}


def test_a_dry_run_refuses_what_the_command_refuses(path, command, run, tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    os.symlink("folder", tmp_path / "link")
    for words in (["convert"], ["merge"], ["edit", "--set", "k=v"]):
        for target in ("folder", "pipe", "link", "/dev/null"):
            answers = [run(*words, "--json", *more, path, target) for more in ([], ["--dry-run"])]
            assert [code for code, *_ in answers] == [2, 2], (words, target)
            assert {error_of(answer)["kind"] for answer in answers} == {"NotRegularFile"}
            assert "not a regular file but a" in error_of(answers[1])["message"]
    user = as_other_user(tmp_path / "fixed")
    shutil.copy(path, tmp_path / "fixed/m.safetensors")
    (tmp_path / "readable").write_bytes(b"")
    (tmp_path / "readable").chmod(0o444)
    for words in (["convert", path, "fixed/x"], ["split", "--count", "2", path, "fixed"],
                  ["split", "--count", "2", path, "fixed/new/er"], ["convert", path, "readable"],
                  ["hash", "--write", "fixed/m.safetensors"]):
        answers = [subprocess.run([command, *words, "--json", *more], capture_output=True,
                                  text=True, cwd=tmp_path, **user) for more in ([], ["--dry-run"])]
        kinds = [error_of((0, answer.stdout))["kind"] for answer in answers]
        assert kinds == ["PermissionDenied"] * 2, words


@pytest.mark.parametrize("words, code, kind", [
    (["convert", "http://h/m"], 2, "Unsupported"), (["convert", "foo://h/m"], 2, "Unsupported"),
    (["edit", "--set", "k=v", "s3://box/m"], 2, "Unsupported"),
    (["split", "--count", "2", "foo://h/m"], 2, "Unsupported"),
    (["split", "--count", "2", "--stem", "a/b", "new"], 3, "Usage"),
    (["split", "--count", "2", "--stem", ".hidden", "new"], 3, "Usage"),
])
def test_a_dry_run_refuses_other_targets_than_files(words, code, kind, path, run):
    *words, target = words
    if target == "http://h/m" and not has_libcurl():
        pytest.skip("without libcurl the missing library is the error")
    for more in ([], ["--dry-run"]):
        answer = run(*words, "--json", *more, path, target)
        assert (answer[0], error_of(answer)["kind"]) == (code, kind), more


def test_split_says_what_it_replaces_and_deletes(path, run, tmp_path):
    folder = tmp_path / "own"
    folder.mkdir()
    shutil.copy(path, folder / "model.safetensors")
    shutil.copy(path, folder / "models.txt")
    for count, replaced, deleted in (
            (2, [], ["model.safetensors"]),
            (2, ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
                 "model.safetensors.index.json"], []),
            (1, [], ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
                     "model.safetensors.index.json"]),
            (1, ["model.safetensors"], [])):
        words = ("split", "--count", count, path, folder)
        before = set(os.listdir(folder))
        answer = json.loads(run(*words, "--json", "--dry-run")[1])
        text = run(*words, "--dry-run")[1]
        assert (answer["replaced"], answer["deleted"]) == (replaced, deleted)
        assert all(f"  deletes {name}\n" in text for name in deleted)
        assert all(f"  replaces {name}\n" in text for name in replaced)
        assert set(os.listdir(folder)) == before
        assert run(*words)[0] == 0
        assert before - set(os.listdir(folder)) == set(deleted)


def test_split_keeps_tensors_that_are_not_selected(path, run, tmp_path):
    folder = tmp_path / "own"
    folder.mkdir()
    shutil.copy(path, folder / "model.safetensors")
    os.symlink("own", tmp_path / "link")
    (tmp_path / "named").mkdir()
    os.symlink("../own/model.safetensors", tmp_path / "named/own.safetensors")
    words = ("split", "--json", "--count", "1", "--select", "a")
    for target in ("own", "own/", "link", tmp_path / "own"):
        for more in ([], ["--dry-run"]):
            for source in ("own/model.safetensors", "named", "named/own.safetensors"):
                code, out, _ = run(*words, *more, source, target)
                assert code == 3 and "other tensors would be lost" in error_of((0, out))["message"]
    assert load_file(folder).keys() == {"a", "b"}
    assert run(*words[:-1], "*", "own/model.safetensors", "other")[0] == 0
    assert run(*words[:2], "--count", "2", "own/model.safetensors", "own")[0] == 0
    assert load_file(folder).keys() == {"a", "b"}
    assert run(*words, "own", "own")[0] == 3


def test_answers_to_odd_words(path, run):
    code, _, errors = run("split", "--count", "99", path, "many")
    assert code == 0 and "2 files instead of 99, because there are only 2 tensors" in errors
    for command in ("inspect", "verify", "hash"):
        code, out, _ = run(command, "--json", "")
        assert code == 3 and error_of((0, out))["message"] == "the path of a model is empty"
    for words in (["bogus", "--json"], ["help", "bogus", "--json"], ["--json", "bogus"]):
        code, out, _ = run(*words)
        assert code == 3 and "unknown command 'bogus'" in error_of((0, out))["message"]


def test_files_that_cannot_be_read_are_not_called_invalid(path, command, run, tmp_path):
    user = as_other_user(tmp_path / "fixed")
    shutil.copy(path, tmp_path / "fixed/m.safetensors")
    assert run("hash", "--manifest", "fixed/m.safetensors")[0] == 0
    for mode, code in ((0o444, 0), (0, 2)):
        (tmp_path / "fixed/m.safetensors").chmod(mode)
        for more in ([], ["--json"]):
            done = subprocess.run([command, "verify", "--manifest", *more, "fixed/m.safetensors"],
                                  capture_output=True, text=True, cwd=tmp_path, **user)
            assert done.returncode == code, done.stdout
    (tmp_path / "fixed/m.safetensors").unlink()
    assert run("verify", "--manifest", "fixed/m.safetensors")[0] == 1  # a file is missing
    code, _, errors = run("hash", "--manifest", "--algorithm", "xxh3", path)
    assert code == 3 and "xxh3-128, blake3 or sha256" in errors


def make_zeros(path):
    """A model of 256 MiB, which takes no room."""
    header = b'{"x":{"dtype":"U8","shape":[268435456],"data_offsets":[0,268435456]}}'
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + (256 << 20))


def hash_while(command, path, opened, change):
    """Run `hash --write`; stop it when it reads the contents of a file, change something, and let
    it go on. Return its process."""
    import signal
    import time

    process = subprocess.Popen([command, "hash", "--write", path], stderr=subprocess.PIPE,
                               text=True)
    own = pathlib.Path(f"/proc/{process.pid}")
    is_open, read_bytes = False, 0
    while process.poll() is None and not (is_open and read_bytes > 4 << 20):
        try:
            read_bytes = int((own / "io").read_text().split()[1])
            is_open = str(opened) in [os.readlink(path) for path in (own / "fd").iterdir()]
        except OSError:
            continue
    process.send_signal(signal.SIGSTOP)
    change()
    time.sleep(0.01)
    process.send_signal(signal.SIGCONT)
    process.said = process.communicate(timeout=60)[1]
    return process


def test_digests_are_written_next_to_the_model_that_was_read(command, tmp_path):
    """Also if a link in the path is pointed elsewhere while the model is read."""
    for name in "ab":
        (tmp_path / name).mkdir()
        make_zeros(tmp_path / name / "m.safetensors")
    (tmp_path / "now").symlink_to("a")

    def change():
        (tmp_path / "now").unlink()
        (tmp_path / "now").symlink_to("b")

    process = hash_while(command, tmp_path / "now/m.safetensors", tmp_path / "a/m.safetensors",
                         change)
    assert process.returncode == 0, process.said
    assert (tmp_path / "a/m.safetensors.digest").exists()
    assert not (tmp_path / "b/m.safetensors.digest").exists()


def test_digests_of_a_model_that_was_replaced_are_not_written(command, tmp_path):
    """The header and the tensors would be of two models."""
    path = tmp_path / "m.safetensors"
    make_zeros(path)
    make_zeros(tmp_path / "next")
    process = hash_while(command, path, path, lambda: os.replace(tmp_path / "next", path))
    assert process.returncode == 2 and "was replaced or changed while it was read" in process.said
    assert not (tmp_path / "m.safetensors.digest").exists()


@pytest.mark.parametrize("words", [["--sums"], ["--manifest"], ["--manifest", "--output", "list"],
                                   ["--sums", "--output", "list"]])
def test_lists_in_a_folder_are_written_again(run, tmp_path, words):
    """A list that is replaced is no change of the folder."""
    torch = pytest.importorskip("torch")
    save_file({"a": torch.ones(4)}, tmp_path / "m.safetensors")
    words = [tmp_path / "list" if word == "list" else word for word in words]
    for _ in range(3):
        assert run("hash", *words, tmp_path)[0] == 0
        written = tmp_path / "list" if "--output" in words else None
        written = written or tmp_path / ("SHA256SUMS" if "--sums" in words else "model.manifest")
        assert run("verify", f"--manifest={written}", tmp_path)[0] == 0


@pytest.mark.parametrize("what", ["the index lists another tensor", "the file has another name"])
def test_digests_of_a_model_with_another_index_are_not_written(command, tmp_path, what):
    """Its file is the same one. Saves that run give files hidden names."""
    path = tmp_path / "model.safetensors.index.json"
    make_zeros(tmp_path / "a.safetensors")

    def write_index(tensor, file):
        (tmp_path / "new").write_text(json.dumps({"weight_map": {tensor: file}}))
        os.replace(tmp_path / "new", path)

    def change():
        if what == "the file has another name":
            os.rename(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
            write_index("x", "b.safetensors")
            return
        header = b'{"y":{"dtype":"U8","shape":[268435456],"data_offsets":[0,268435456]}}'
        with open(tmp_path / "a.safetensors", "r+b") as file:
            info = os.stat(tmp_path / "a.safetensors")
            file.write(len(header).to_bytes(8, "little") + header)
        os.utime(tmp_path / "a.safetensors", ns=(info.st_atime_ns, info.st_mtime_ns))
        write_index("y", "a.safetensors")

    write_index("x", "a.safetensors")
    process = hash_while(command, tmp_path, tmp_path / "a.safetensors", change)
    assert process.returncode == 2 and "changed while it was read" in process.said
    assert not (tmp_path.parent / f"{tmp_path.name}.digest").exists()


def test_a_model_that_is_being_published_has_no_digests(run, tmp_path):
    """Its files have temporary names, which the digests would state."""
    hidden = f".model-00001-of-00001.safetensors.{'0' * 16}.tmp"
    make_zeros(tmp_path / hidden)
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"x": hidden}}))
    code, _, errors = run("hash", tmp_path)
    assert code == 2 and "a save that publishes it runs, or was killed" in errors


def test_unfinished_digests_and_manifests_are_cleaned_up(run, tmp_path):
    """Those of a file: of killed `hash --write` and `hash --manifest`."""
    path = tmp_path / "m.safetensors"
    make_zeros(path)
    left = [tmp_path / f".m.safetensors.{kind}.{'0' * 16}.tmp" for kind in ("digest", "manifest")]
    other = tmp_path / f".n.safetensors.digest.{'0' * 16}.tmp"
    for words in (["clean", path], ["edit", "--set", "a=b", path]):
        for one in (*left, other):
            one.touch()
        assert run(*words)[0] == 0
        assert not any(one.exists() for one in left) and other.exists()


def test_warnings_of_the_library_are_printed(path, run, tmp_path):
    """A folder has the name of an old shard, which the save cannot delete."""
    (tmp_path / "out" / "model-00009-of-00009.safetensors").mkdir(parents=True)
    code, said, errors = run("split", "--count", 2, "--manifest", path, "out")
    assert code == 0 and "2 tensors" in said
    assert errors.startswith("fastsafetensors: warning: the save succeeded, with a problem: ")
    assert "model-00009-of-00009.safetensors: removing failed: Is a directory" in errors
    code, said, errors = run("split", "--count", 2, "--json", path, "out")
    assert code == 0 and json.loads(said) and "with a problem" in errors
