# SPDX-License-Identifier: Apache-2.0
"""Failures of one rank of a group: an error on all ranks, soon, and a usable group."""

import subprocess
import sys
import textwrap

import pytest
from torch_processes import run_together

COMMON = textwrap.dedent("""
    import datetime, os, sys, time
    import torch
    import torch.distributed as dist
    from fastsafetensors import ParallelLoader, RankError, SafeTensorsFileLoader
    from fastsafetensors.st_types import DType

    folder, store, rank, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size,
                            timeout=datetime.timedelta(seconds=900))
    files = [f"{folder}/{i}.safetensors" for i in range(4)]
    WORLD = dist.group.WORLD

    def load(files=files, **options):
        loader = SafeTensorsFileLoader(WORLD, "cpu", timeout=900)
        loader.add_filenames({r: files[r::size] for r in range(size)})
        return loader, loader.copy_files_to_device(**options)

    def fails(what, *words, own=RankError):
        '''Every rank raises, and none by its time limit, which would be the program's end;
        rank 1 its own error, which names the cause.'''
        try:
            what()
        except (own if rank == 1 else RankError) as error:
            for word in words:
                assert word in str(error), (rank, word, str(error))
        else:
            raise AssertionError("no error on rank %d" % rank)
        again()

    def again():
        '''The group still works.'''
        loader, buffer = load()
        for name in buffer.key_to_rank_lidx:
            assert buffer.get_tensor(name).eq(int(name[1])).all()
        buffer.close()
        loader.close()

    def finish():
        dist.destroy_process_group()
        os._exit(0)
""")

MISTAKES = COMMON + textwrap.dedent("""
    again()
    mine = rank == 1
    missing = [*files[:3], f"{folder}/none.safetensors"]
    fails(lambda: load(missing if mine else files), "none.safetensors", own=FileNotFoundError)
    fails(lambda: load(files[::-1] if mine else files), "ranks differ in the load", "for rank")
    fails(lambda: load(files[:3] if mine else files), "ranks differ in the load", "nothing")
    fails(lambda: load([*files[:3], f"{folder}/other/3.safetensors"] if mine else files),
          "ranks differ in the load", "3.safetensors", "header")
    fails(lambda: load(dtype=DType.F16 if mine else DType.AUTO), "dtype F16", "dtype AUTO")
    fails(lambda: load(max_copy_block_size=0 if mine else 1), "max_copy_block_size must be",
          own=ValueError)

    def filtered():
        loader = SafeTensorsFileLoader(WORLD, "cpu")
        loader.add_filenames({0: files})
        if mine:
            loader.set_tensor_filter(lambda name: name.endswith("0"))
        loader.copy_files_to_device()
    fails(filtered, "filter")

    loader, buffer = load()
    fails(lambda: buffer.get_tensor("nope" if mine else "t0.a"), "nope", own=ValueError)
    fails(lambda: buffer.get_tensor("t1.a" if mine else "t0.a"), "t1.a", "t0.a", "rank 1")
    fails(lambda: buffer.get_sharded("t0.a", 1 if mine else 0), "get_sharded('t0.a', 1)")
    fails(lambda: buffer.push_tensor("t0.a", 99 if mine else 0), "rank 99", own=ValueError)
    fails(lambda: buffer.push_tensor("t0.a", 0) if mine else buffer.get_tensor("t0.a"),
          "push_tensor", "get_tensor")
    assert buffer.get_tensor("t0.a").eq(0).all()  # and this buffer is as good as before
    buffer.close()

    # A file that is cut off between open and read, by the rank that has to read it.
    import shutil
    cut = [*files[:1], f"{folder}/cut-{size}.safetensors", *files[2:]]
    if rank == 0:
        shutil.copy(files[1], cut[1])
    dist.barrier()

    def short():
        loader = SafeTensorsFileLoader(WORLD, "cpu")
        loader.add_filenames({r: cut[r::size] for r in range(size)})
        dist.barrier()
        if mine:
            os.truncate(cut[1], os.path.getsize(cut[1]) - 100)
        dist.barrier()
        loader.copy_files_to_device()
    from fastsafetensors import SafetensorError
    fails(short, "cut", own=(SafetensorError, OSError))

    # Iterations.
    def iterate(files=files, stop=None, error=None, **options):
        loader = ParallelLoader(WORLD, files, use_tqdm_on_load=False, timeout=900, **options)
        for count, (name, tensor) in enumerate(loader.iterate_weights()):
            if mine and count == error:
                raise ZeroDivisionError("the consumer's own")
            if mine and count == stop:
                break
        loader.close()
        if mine and stop is not None:
            raise RankError("(rank 1 left, and has no error) it broke out of its loop")

    iterate()
    fails(lambda: iterate(missing if mine else files), "none.safetensors", own=FileNotFoundError)
    fails(lambda: iterate(files[::-1] if mine else files), "ranks differ in the plan")
    fails(lambda: iterate(broadcast_run_tensors=3 if mine else 5), "ranks differ in the plan")
    fails(lambda: iterate(stop=2, broadcast_run_tensors=1), "it broke out of its loop")
    fails(lambda: iterate(error=2, broadcast_run_tensors=1), own=ZeroDivisionError)
    fails(lambda: iterate(max_batch_bytes=1 if mine else None), "max_batch_bytes", own=ValueError)

    def closes():
        loader = ParallelLoader(WORLD, files, use_tqdm_on_load=False, broadcast_run_tensors=1)
        iterator = loader.iterate_weights()
        next(iterator)
        if mine:
            loader.close()
            raise RankError("closed")
        for _ in iterator:
            pass
    fails(closes, "closed")

    # One breaks off when it has had everything: the others have, too.
    loader = ParallelLoader(WORLD, files, use_tqdm_on_load=False)
    total = 4 * 6
    for count, _ in enumerate(loader.iterate_weights(), 1):
        if mine and count == total:
            break
    loader.close()
    again()
    # All break off at once.
    loader = ParallelLoader(WORLD, files, use_tqdm_on_load=False)
    for _ in loader.iterate_weights():
        break
    loader.close()
    again()

    # The group is destroyed while a buffer is open.
    loader, buffer = load()
    dist.barrier()
    dist.destroy_process_group()
    for call in (lambda: buffer.get_tensor("t0.a"), lambda: buffer.get_sharded("t0.a", 0)):
        try:
            call()
        except RankError as error:
            assert f"rank {rank} of {size}" in str(error)
        else:
            raise AssertionError("no error")
    os._exit(0)
""")

ABSENT = COMMON + textwrap.dedent("""
    again()
    loader, buffer = load()
    came = os.path.join(folder, "came")
    try:
        if rank == 1:
            if sys.argv[5] == "dies":
                os._exit(0)
            if sys.argv[5] == "dies midway":  # it has agreed, and does not send
                loader.pg.begin_broadcast = lambda *arguments: os._exit(0)
                buffer.get_tensor("t1.a")
            if sys.argv[5] == "leaves":
                dist.destroy_process_group()
                os._exit(0)
            while not os.path.exists(came):  # until rank 0 has its error
                time.sleep(0.05)
            os._exit(0)
        loader.pg._timeout = datetime.timedelta(seconds=2)
        buffer.get_tensor("t1.a")
    except RankError as error:
        assert "get_tensor('t1.a')" in str(error) and f"rank {rank} of {size}" in str(error), error
        open(came, "w").close()
        os._exit(0)
    os._exit(1)
""")


@pytest.fixture
def folder(tmp_path, torch):
    """Return a folder of four files whose values are their numbers."""
    from fastsafetensors.torch import save_file

    (tmp_path / "other").mkdir()
    for number in range(4):
        tensors = {f"t{number}.{c}": torch.full((10, 6), number) for c in "abcdef"}
        save_file(tensors, tmp_path / f"{number}.safetensors")
        save_file(tensors, tmp_path / f"other/{number}.safetensors", {"is": "another"})
    return tmp_path


# Before the programs of ranks. Threads of gloo outlive a group that a mesh still holds, and one
# that frees a tensor while the interpreter shuts down aborts the process (PyTorch's pull request
# 179291). This function is registered first, hence runs last: after the exit functions of the
# package and the threads that are no daemons.
LEAVE_BEFORE_SHUTDOWN = """
import atexit, os, sys

def leave():
    sys.stdout.flush()
    os._exit(1 if hasattr(sys, "last_value") else 0)

atexit.register(leave)
"""


def run_ranks(code, folder, size, *words):
    """Run a program on every rank; all must end well, in time."""
    code = LEAVE_BEFORE_SHUTDOWN + code
    ended = run_together(code, [[folder, folder / "store", rank, size, *words]
                                for rank in range(size)], 600)
    assert [one.status for one in ended] == [0] * size, "\n".join(one.stderr for one in ended)


@pytest.mark.parametrize("size", [2, 4])
def test_mistakes_of_one_rank(folder, size):
    run_ranks(MISTAKES, folder, size)


@pytest.mark.parametrize("way", ["dies", "dies midway", "leaves", "sleeps"])
def test_missing_rank(folder, way):
    run_ranks(ABSENT, folder, 2, way)


SAVES = COMMON + textwrap.dedent("""
    import json
    from fastsafetensors.sharded_save import save_on_ranks
    from fastsafetensors.torch import load_file

    def tensors(plus=0):
        return {f"r{rank}.{c}": torch.full((100 + rank,), rank + plus) for c in "ab"}
    target = f"{folder}/saved"
    path = save_on_ranks(tensors(), target, WORLD, durable=True)
    assert path == f"{target}/model.safetensors.index.json"
    mine = rank == 1

    def check():
        dist.barrier()
        got = load_file(target)
        assert sorted(got) == sorted(f"r{r}.{c}" for r in range(size) for c in "ab")
        assert all(t.eq(int(name[1])).all() for name, t in got.items())
        names = sorted(os.listdir(target))
        assert len(names) == size + 1 and not any(n.startswith(".") for n in names), names
        dist.barrier()
    check()
    fails(lambda: save_on_ranks({**tensors(5), **({"x": 3} if mine else {})}, target, WORLD),
          own=ValueError)
    check()
    sparse = torch.eye(3).to_sparse()
    fails(lambda: save_on_ranks({**tensors(5), **({"x": sparse} if mine else {})}, target, WORLD),
          "sparse", own=ValueError)
    check()
    import fastsafetensors.sharded_save as saving
    real = saving.Writer
    def full(*arguments, **options):
        if mine:
            raise OSError(28, "No space left on device")
        return real(*arguments, **options)
    saving.Writer = full
    fails(lambda: save_on_ranks(tensors(5), target, WORLD), "No space left", own=OSError)
    saving.Writer = real
    check()
    try:
        save_on_ranks({**tensors(5), "same": torch.ones(2)}, target, WORLD)
    except ValueError as error:
        assert "duplicate tensor 'same' on ranks 0 and 1" in str(error)
    else:
        raise AssertionError("no error")
    check()
    # A failed save removes the folders that it has made, and no others.
    def leaves_nothing(call, *words, **kinds):
        fails(call, *words, **kinds)
        dist.barrier()
        assert not os.path.exists(f"{folder}/new")
    new = f"{folder}/new/deep"
    leaves_nothing(lambda: save_on_ranks({"x": 3} if mine else tensors(), new, WORLD),
                   own=ValueError)
    saving.Writer = full
    leaves_nothing(lambda: save_on_ranks(tensors(), new, WORLD), "No space left", own=OSError)
    if rank == 0:
        os.mkdir(f"{folder}/empty")
    dist.barrier()
    fails(lambda: save_on_ranks(tensors(), f"{folder}/empty", WORLD), "No space left", own=OSError)
    saving.Writer = real
    dist.barrier()
    assert os.listdir(f"{folder}/empty") == []
    try:
        save_on_ranks({"same": torch.ones(2)}, new, WORLD)
    except ValueError:
        dist.barrier()
    assert not os.path.exists(f"{folder}/new")
    dist.barrier()
    fails(lambda: save_on_ranks(tensors(5), target, WORLD, {"a": "1" if mine else "2"}), "metadata")
    check()
    fails(lambda: save_on_ranks(tensors(5), target, WORLD, manifest=mine), "manifest")
    check()
    from fastsafetensors import check_manifest
    save_on_ranks(tensors(), target, WORLD, manifest="blake3")
    assert not check_manifest(target)
    assert "blake3" in open(f"{target}/model.manifest").readline()
    load_file(target, verify=True)
    save_on_ranks(tensors(), target, WORLD)
    check()
    # ParallelSaver with a group: each rank writes shards of its own.
    from fastsafetensors import ParallelSaver
    from fastsafetensors.saver import validate_shard_set, KEY_SHARD_SET
    saver = ParallelSaver(num_shards=size + 2, group=WORLD, timeout=900)
    base = f"{folder}/set/model"
    paths = saver.save(tensors(), base, metadata={"k": "v"})
    assert len(paths) == size + 2
    dist.barrier()
    def whole():
        dist.barrier()
        got = load_file(paths)
        assert sorted(got) == sorted(f"r{r}.{c}" for r in range(size) for c in "ab")
        assert all(t.eq(int(name[1])).all() for name, t in got.items())
        metas = [_core.Model([p]).metadata(0) for p in paths]
        assert len({m[KEY_SHARD_SET] for m in metas}) == 1
        assert [m["fst.shard.index"] for m in metas] == [str(i) for i in range(size + 2)]
        assert len(os.listdir(f"{folder}/set")) == size + 2
        dist.barrier()
    from fastsafetensors import _core
    whole()
    fails(lambda: saver.save({**tensors(5), **({"x": 3} if mine else {})}, base), own=Exception)
    whole()
    fails(lambda: saver.save(tensors(5), base, metadata={"k": "1" if mine else "2"}), "metadata")
    whole()
    fails(lambda: saver.save(tensors(5), base if mine else f"{base}-other"), "called")
    whole()
    fails(lambda: saver.save(tensors(5), base, header_align=7 if mine else 8), "header_align",
          own=ValueError)
    whole()
    try:
        saver.save({**tensors(5), "same": torch.ones(2)}, base)
    except ValueError as error:
        assert "duplicate tensor 'same' on ranks 0 and 1" in str(error)
    else:
        raise AssertionError("no error")
    whole()
    try:
        ParallelSaver(num_shards=1, group=WORLD)
    except ValueError as error:
        assert "at least" in str(error)
    else:
        raise AssertionError("no error")

    if size == 2:  # one dies while the other writes
        def die(*arguments, **options):
            if mine:
                os._exit(0)
            return real(*arguments, **options)
        saving.Writer = die
        try:
            save_on_ranks(tensors(5), target, WORLD)
        except RankError:
            got = load_file(f"{target}/model.safetensors.index.json")
            assert all(t.eq(int(name[1])).all() for name, t in got.items())
            os._exit(0)
        os._exit(1)
    finish()
""")


@pytest.mark.parametrize("size", [2, 3])
def test_saving_on_ranks(folder, size):
    run_ranks(SAVES, folder, size)


LOST = textwrap.dedent("""
    import datetime, os, signal, sys, time
    import torch.distributed as dist
    from fastsafetensors import RankError
    from fastsafetensors._ranks.agreement import Agreement
    from fastsafetensors._ranks.torch_group import TorchProcessGroup

    folder, store, rank, size, way = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:5]), sys.argv[5]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size,
                            timeout=datetime.timedelta(seconds=6))
    agreement = Agreement(TorchProcessGroup(dist.group.WORLD))
    agreement.agree("the first step")
    if rank == 1:
        if way == "ValueError":
            raise ValueError("of the program")
        if way == "exit":
            dist.destroy_process_group()
            sys.exit()
        if way == "sleeping":
            time.sleep(100)
        if way == "OSError":
            def refuse(*arguments, **options):
                raise OSError("refused")
            dist.all_gather = refuse
        else:
            os.kill(os.getpid(), signal.SIGKILL if way == "killed" else signal.SIGSTOP)
    for step in ("second", "third"):
        try:
            agreement.agree(f"the {step} step")
        except (RankError, OSError) as error:
            open(f"{folder}/said.{rank}", "a").write(str(error) + "\\n")
    # Those that are slower must not find that this one has ended, too.
    end = time.monotonic() + 30
    others = [f"{folder}/said.{other}" for other in (0, 2, 3)]
    while not all(map(os.path.exists, others)) and time.monotonic() < end:
        time.sleep(0.01)
    os._exit(0)  # without the output of an exit
""")


def run_without_rank_1(code, folder, way):
    """Run a program on 4 ranks, of which rank 1 is lost; the others must end well."""
    ended = run_together(code, [[folder, folder / "store", rank, 4, way] for rank in range(4)], 120,
                         lost=1)
    assert [ended[rank].status for rank in (0, 2, 3)] == [0, 0, 0], ended


@pytest.mark.parametrize("way, words", [
    ("killed", "rank 1 has ended"), ("stopped", "rank 1 is stopped"),
    ("ValueError", "rank 1 has ended"), ("exit", "rank 1 has ended"),
    ("sleeping", "rank 1 is late or stuck: all other ranks have given up"), ("OSError", "")])
def test_every_rank_names_the_lost_rank(tmp_path, way, words):
    """Only this one, in the first error and in later ones, which keep its reason."""
    run_without_rank_1(LOST, tmp_path, way)
    for rank in (0, 2, 3):
        first, second = (tmp_path / f"said.{rank}").read_text().splitlines()
        assert words in first and (words or way == "OSError"), first
        named = [first.count(f"rank {other} ") for other in {0, 1, 2, 3} - {rank}]
        assert sum(named) == bool(words), first
        reason = first.partition("second step: ")[2]
        assert f"an earlier wait has failed ({reason}): make a new group" in second


KILLED = textwrap.dedent("""
    import os, signal, socket
    from fastsafetensors._ranks.peers import IDENTITY_BYTES, describe_lost, own_identity

    missed = 0
    for _ in range(200):
        here, there = socket.socketpair()
        child = os.fork()
        if child == 0:
            here.close()
            there.send(own_identity())
            signal.pause()
        there.close()
        identity = here.recv(IDENTITY_BYTES)
        os.kill(child, signal.SIGKILL)
        assert here.recv(1) == b""
        missed += describe_lost([identity]) != f"rank 0 has ended (process {child})"
        os.waitpid(child, 0)
        here.close()
    assert missed == 0, missed
""")


def test_a_rank_is_named_as_soon_as_its_connection_closes():
    """The kernel closes sockets of a killed process before /proc shows that it has ended."""
    subprocess.run([sys.executable, "-c", KILLED], check=True, timeout=120)
