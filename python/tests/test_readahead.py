# SPDX-License-Identifier: Apache-2.0
"""Readahead: the bytes read and held, for each access pattern."""

import os
import random
import signal

import pytest

from fastsafetensors import live_allocation_bytes, safe_open
from fastsafetensors._loading.readahead import ReadAhead
from fastsafetensors.torch import save_file

COUNT = 64
SIZE = 1 << 20


class _Load:
    """A fake load, which is closed when its last reference is dropped."""

    held = 0

    def __init__(self, size):
        self.size = size
        _Load.held += size

    def close(self):
        """Do nothing, because a fake load has no threads."""

    def __del__(self):
        _Load.held -= self.size


class _Model:
    """A fake model of 64 tensors of 1 MiB that counts the bytes read."""

    def __init__(self):
        self.windows = []
        self.bytes_read = 0

    def names(self):
        return [str(i) for i in range(COUNT)]

    def nbytes(self, index):
        return SIZE

    def cached_view(self, index, begin, end):
        return None

    def load(self, names, threads=0, **options):
        self.windows.append((int(names[0]), len(names)))
        self.bytes_read += len(names) * SIZE
        return _Load(len(names) * SIZE)


def _request(indices, eager=False):
    """Return (bytes read, peak of bytes held) of a program that keeps no tensor."""
    model = _Model()
    ahead = ReadAhead(model, {}, eager=eager)
    most = 0
    for index in indices:
        if ahead.take(index) is None:
            model.bytes_read += SIZE
        most = max(most, _Load.held)
    ahead.close()
    del ahead
    assert _Load.held == 0
    return model.bytes_read, most


@pytest.mark.parametrize("step", [2, 3, 4, 8, 16])
def test_every_nth_tensor(step):
    asked = range(0, COUNT, step)
    assert _request(asked) == (len(asked) * SIZE, 0)


def test_backwards():
    assert _request(reversed(range(COUNT))) == (COUNT * SIZE, 0)


def test_at_random():
    for seed in range(20):
        asked = random.Random(seed).sample(range(COUNT), COUNT // 4)
        read, held = _request(asked)
        assert read <= 2 * len(asked) * SIZE + (4 << 20)
        assert held <= 16 << 20


def test_a_rank_that_takes_a_run_of_experts_in_each_layer():
    asked = [layer * 16 + expert for layer in range(4) for expert in range(4)]
    read, held = _request(asked)
    assert read <= 2 * len(asked) * SIZE and held <= 2 * len(asked) * SIZE


@pytest.mark.parametrize("eager", [False, True])
def test_all_in_order_is_read_once(eager):
    read, _ = _request(range(COUNT), eager)
    assert read == COUNT * SIZE


def test_waits_do_not_exceed_reads():
    model = _Model()
    ahead = ReadAhead(model, {})
    for index in range(COUNT):
        ahead.take(index)
        assert _Load.held <= 2 * ((index + 1) * SIZE + (4 << 20))
    first = [window[0] for window in model.windows]
    assert first == sorted(first) and first[0] == 1 and len(first) < 16
    ahead.close()


def test_eager_programs_that_stop_reading():
    """The announcement of an eager program is ignored when it stops taking tensors."""
    model = _Model()
    model.nbytes = lambda index: 64 << 20
    ahead = ReadAhead(model, {}, eager=True)
    for index in range(0, COUNT, 16):
        ahead.take(index)
    assert len([n for first, count in model.windows for n in range(count)]) < COUNT // 2
    ahead.close()


@pytest.fixture
def large(tmp_path, torch):
    """(path, tensors) of a file that is not in the page cache."""
    tensors = {f"t{i:03d}": torch.full((SIZE // 4,), float(i)) for i in range(COUNT)}
    path = tmp_path / "m.safetensors"
    save_file(tensors, path, durable=True)
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    return path, tensors


def own_memory():
    """Return the bytes of anonymous memory in use."""
    with open("/proc/self/status", encoding="ascii") as status:
        rows = dict(line.split(":", 1) for line in status)
    return int(rows["RssAnon"].split()[0]) << 10


@pytest.mark.parametrize("mode", ["auto", "load"])
def test_memory_of_partial_readers(mode, large, torch):
    path, tensors = large
    before, own_before = live_allocation_bytes(), own_memory()
    with safe_open(path, "pt", mode=mode) as f:
        held = [f.get_tensor(f"t{i:03d}") for i in range(0, COUNT, 8)]
        # Views refer to the file's mapping, which is not anonymous memory.
        if mode == "load":
            assert live_allocation_bytes() - before <= len(held) * (SIZE + (1 << 16))
        assert own_memory() - own_before <= len(held) * SIZE + (8 << 20)
    assert [int(t[0]) for t in held] == list(range(0, COUNT, 8))


def _in_a_fork(work):
    """The child's exit status; a child that hangs is killed."""
    child = os.fork()
    if child == 0:
        signal.alarm(300)
        status = 1
        try:
            status = 0 if work() else 2
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("mode", ["auto", "load"])
def test_forked_workers_read_on(mode, eager, large, torch):
    path, tensors = large
    f = safe_open(path, "pt", mode=mode)
    if eager:
        f.read_ahead()
    taken = [f.get_tensor(f"t{i:03d}") for i in range(4)]

    def work():
        # Compared element by element, because torch's threads do not exist in a forked child.
        rest = [f.get_tensor(name) for name in sorted(tensors)]
        f.close()
        return all(int(t[0]) == int(t[-1]) == i for ts in (taken, rest) for i, t in enumerate(ts))

    assert _in_a_fork(work) == 0
    assert torch.equal(f.get_tensor("t004"), tensors["t004"])  # and here it continues
    f.close()


def test_nested_forks(large, torch):
    path, tensors = large
    f = safe_open(path, "pt", mode="load")
    names = sorted(tensors)

    def work(depth):
        for name in names[depth * 4 : depth * 4 + 3]:
            if int(f.get_tensor(name)[-1]) != int(name[1:]):
                return False
        return depth == 3 or _in_a_fork(lambda: work(depth + 1)) == 0

    assert work(0)
    f.close()


def test_a_load_ends_with_its_process(large, torch):
    from fastsafetensors import _core

    model = _core.Model(large[0])
    loader = model.load(mode="load", order="request", budget=2 * SIZE)  # waits to be emptied
    next(loader)

    def work():
        faults = []
        for use in (lambda: next(loader), lambda: loader.item(40), loader.stats, loader.cancel):
            try:
                use()
            except RuntimeError as error:
                faults.append("before fork()" in str(error))
        loader.close()
        loader.close()
        return faults == [True] * 4

    assert _in_a_fork(work) == 0
    assert sum(1 for _ in loader) == COUNT - 1
    loader.close()


def test_a_dropped_load_in_a_fork(large):
    from fastsafetensors import _core

    loaders = [_core.Model(large[0]).load(mode="load", budget=2 * SIZE)]

    def work():
        loaders.clear()  # no join with threads that are not here
        return True

    assert _in_a_fork(work) == 0
    loaders[0].close()


def test_parallel_loaders_end_with_their_process(large):
    from fastsafetensors import ParallelLoader

    weights = ParallelLoader(None, [large[0]], use_tqdm_on_load=False).iterate_weights()
    next(weights)

    def work():
        try:
            return len(list(weights)) == COUNT - 1  # all had been read
        except RuntimeError as error:
            return "before fork()" in str(error)

    assert _in_a_fork(work) == 0
    assert len(list(weights)) == COUNT - 1


def test_workers_of_a_dataset(large, torch):
    path, tensors = large

    class Weights(torch.utils.data.Dataset):
        def __init__(self):
            self.file = safe_open(path, "pt", mode="load")
            self.shapes = [self.file.get_tensor(n).shape for n in self.file.keys()[:3]]

        def __len__(self):
            return len(self.file)

        def __getitem__(self, index):
            return self.file.get_tensor(f"t{index:03d}")[:2]

    loader = torch.utils.data.DataLoader(Weights(), batch_size=4, num_workers=2,
                                         multiprocessing_context="fork", timeout=600)
    assert [int(b[0, 0]) for b in loader] == list(range(0, COUNT, 4))
