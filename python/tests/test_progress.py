# SPDX-License-Identifier: Apache-2.0
"""Progress of loads: callbacks, bars, and cancellation from a callback."""

import os
import signal
import sys
import types

import pytest

from fastsafetensors._base import progress
from fastsafetensors import live_allocation_count
from fastsafetensors import numpy as fst_numpy
from fastsafetensors import torch as fst_torch


class Terminal:
    """Stands in for stderr on a terminal."""

    def __init__(self):
        self.text = ""

    def isatty(self):
        return True

    def write(self, text):
        self.text += text

    def flush(self):
        pass


@pytest.fixture
def bars(monkeypatch):
    """Bars that were made: a stand-in for tqdm."""
    made = []

    class Bar:
        def __init__(self, total, desc, **options):
            self.total, self.desc, self.n, self.closed, self.text = total, desc, 0, False, ""
            made.append(self)

        def update(self, count):
            self.n += count

        def set_postfix_str(self, text, refresh=True):
            self.text = text

        def close(self):
            self.closed = True

    module = types.ModuleType("tqdm")
    auto = types.ModuleType("tqdm.auto")
    auto.tqdm = Bar
    module.auto = auto
    monkeypatch.setitem(sys.modules, "tqdm", module)
    monkeypatch.setitem(sys.modules, "tqdm.auto", auto)
    return made


@pytest.mark.parametrize("load_file", [fst_torch.load_file, fst_numpy.load_file])
def test_callback(tmp_path, load_file, torch):
    path = tmp_path / "m"
    fst_torch.save_file({"a": torch.ones(1000), "b": torch.ones(10)}, path)
    seen = []
    load_file(path, mode="load", progress=lambda *numbers: seen.append(numbers))
    assert seen[-1] == (4040, 4040, 2, 2)
    assert seen == sorted(seen)


def test_an_exception_of_the_callback_ends_the_load(model, torch):
    before = live_allocation_count()

    def stop(*numbers):
        raise ZeroDivisionError("enough")

    with pytest.raises(ZeroDivisionError, match="enough"):
        fst_torch.load_file(model[0], mode="load", progress=stop)
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            fst_torch.load_file(model[0], mode="load",
                                progress=lambda *numbers: os.kill(os.getpid(), signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, old)
    assert live_allocation_count() == before


def test_bar_of_a_long_load(model, bars, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    fst_torch.load_file(model[0], mode="load")
    assert not bars  # it was quick
    bar = progress.LoadBar(3)
    monkeypatch.setattr(progress, "_DELAY_SECONDS", 0.0)
    bar(10, 100, 1, 5)
    bar(60, 100, 3, 5)
    assert (bars[0].total, bars[0].n, bars[0].text) == (100, 60, "3/5 tensors")
    assert bars[0].desc == "Loading 3 files"
    bar.close()
    assert bars[0].closed


def test_no_bar_without_a_terminal(model, bars, monkeypatch):
    monkeypatch.setattr(progress, "_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(progress.LoadBar, "__call__", lambda self, *n: bars.append(n))
    fst_torch.load_file(model[0], mode="load")  # not a terminal
    monkeypatch.setattr(sys, "stderr", None)
    fst_torch.load_file(model[0], mode="load")
    monkeypatch.setattr(sys, "stderr", Terminal())
    fst_torch.load_file(model[0], mode="load", progress=False)
    monkeypatch.setattr(progress, "is_first_rank", lambda: False)
    fst_torch.load_file(model[0], mode="load")
    assert not bars
    monkeypatch.setattr(progress, "is_first_rank", lambda: True)
    fst_torch.load_file(model[0], mode="load")
    assert bars


def test_bar_of_batches(sharded, bars, monkeypatch):
    from fastsafetensors import ParallelLoader

    monkeypatch.setattr(sys, "stderr", Terminal())
    paths = sorted(str(p) for p in sharded[0].glob("*.safetensors"))
    list(ParallelLoader(None, paths).iterate_weights())
    assert len(bars) == 1
    assert (bars[0].total, bars[0].n, bars[0].closed) == (3, 3, True)
    assert bars[0].desc == "Loading fastsafetensors checkpoint shards"
    assert bars[0].text.endswith(" GB/s")
    list(ParallelLoader(None, paths, use_tqdm_on_load=False).iterate_weights())
    assert len(bars) == 1
