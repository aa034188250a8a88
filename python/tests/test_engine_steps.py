# SPDX-License-Identifier: Apache-2.0
"""A set of files is replaced, by deltas or by saves, while an engine loads it again and again: no
load returns weights of two steps."""

import collections
import dataclasses
import logging
import sys
import threading
import time
import types

import pytest

torch = pytest.importorskip("torch")

from fastsafetensors import SafetensorError, deltas, fast_loading, sglang, vllm  # noqa: E402
from fastsafetensors._engine_weights import EngineOptions, begun, iterate  # noqa: E402

LOGGER = logging.getLogger("test")
NAMES = [f"layers.{i}.w" for i in range(12)]
STEPS = 60
SHARD_BYTES = 3 * 64 * 512 * 4


def state(step):
    """Return a state whose values all say which step it is of."""
    return {name: torch.full((64, 512), float(step)) for name in NAMES}


def save(folder, step):
    """Save a state as a set of four files."""
    fast_loading.save_safetensors_sharded(state(step), folder, max_shard_size=SHARD_BYTES)


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    """Return a folder of deltas of STEPS versions."""
    folder = tmp_path_factory.mktemp("versions")
    save(folder / "base", 0)
    for step in range(1, STEPS + 1):
        save(folder / "next", step)
        deltas.make(folder / "base", folder / "next", folder / f"published/{step:06d}",
                    version=str(step), base_version=str(step - 1), durable=False)
        save(folder / "base", step)
    return folder / "published"


def files_of(folder):
    """Return the paths of a checkpoint's files, as engines list them before a load."""
    return [str(path) for path in sorted(folder.glob("*.safetensors"))]


def read_by_sglang(folder, options):
    """Read by the function that replaces SGLang's iterator."""
    before, sglang._state.options = sglang._state.options, options
    try:
        return sglang._iterate(files_of(folder))
    finally:
        sglang._state.options = before


@dataclasses.dataclass
class LoadConfig:
    """The fields of vLLM's configuration that the plug-in uses."""

    model_loader_extra_config: dict
    load_format: str = "fastsafetensors"
    use_tqdm_on_load: bool = False


class DefaultModelLoader:
    """Stands in for vLLM's class: it lists the files, and iterates over the sources."""

    def __init__(self, load_config):
        self.load_config = load_config

    def _prepare_weights(self, folder, *_):
        return folder, files_of(folder), True, None

    def get_all_weights(self, folder, model):
        source = types.SimpleNamespace(
            model_or_path=folder, subfolder=None, revision=None, fall_back_to_pt=False,
            allow_patterns_overrides=None, is_unused_weight=None, prefix="")
        yield from self._get_weights_iterator(source)


def read_by_vllm(folder, options):
    """Read by the plug-in's loader for vLLM."""
    place = "vllm.model_executor.model_loader"
    modules = {"vllm.logger": {"init_logger": logging.getLogger},
               f"{place}.default_loader": {"DefaultModelLoader": DefaultModelLoader},
               f"{place}.sharded_state_loader": {"ShardedStateLoader": object}}
    before = dict(sys.modules)
    for name, contents in modules.items():
        for end in (len("vllm"), *(at for at, letter in enumerate(name) if letter == ".")):
            sys.modules.setdefault(name[:end], types.ModuleType(name[:end]))
        sys.modules[name] = types.SimpleNamespace(**contents)
    try:
        kind = vllm._make_loaders()["fastsafetensors"]
    finally:
        for name in set(sys.modules) - set(before):
            del sys.modules[name]
        sys.modules.update(before)
    given = {"mode": options.mode, "progress": False}
    return kind(LoadConfig(given)).get_all_weights(folder, torch.nn.Module())


READERS = {"sglang": read_by_sglang, "vllm": read_by_vllm,
           "both": lambda folder, options: begun(iterate(files_of(folder), options, LOGGER,
                                                         device="cpu"))}


def load(folder, options, reader="both"):
    """Load as the plug-ins do. Return the steps whose weights were found."""
    weights = dict.fromkeys(NAMES)
    for name, tensor in READERS[reader](folder, options):
        weights[name] = torch.empty(64, 512).copy_(tensor)
    return {value for tensor in weights.values() for value in tensor.unique().tolist()}


def load_until(done, found, folder, options, reader="both"):
    """Load until `done` is set, and once more. Count in `found` how many loads were of which step.
    Return how many raised an error."""
    errors, is_last = 0, False
    while not is_last:
        is_last = done.is_set()
        try:
            steps = load(folder, options, reader)
        except (SafetensorError, OSError) as error:
            assert not is_last, error
            errors += 1
            continue
        assert len(steps) == 1, f"a load returned weights of the steps {sorted(steps)}"
        found[steps.pop()] += 1
    return errors


def wait_for_another(*counters):
    """Wait until each counter, of loads or reads, has grown."""
    before = [counter.total() for counter in counters]
    deadline = time.monotonic() + 60
    while any(counter.total() == count for counter, count in zip(counters, before, strict=True)):
        assert time.monotonic() < deadline, "a reader has stopped"
        time.sleep(0.001)


def run_beside(work):
    """Run `work` in a thread. Return an event that is set at its end."""
    done = threading.Event()

    def run():
        try:
            work()
        finally:
            done.set()

    threading.Thread(target=run).start()
    return done


def apply_each(folder, versions, found, **options):
    """Apply the versions one by one, each as soon as no engine reads the files."""
    for step in range(1, STEPS + 1):
        if step % 5 == 1:
            wait_for_another(found)
        while True:
            try:
                deltas.apply(folder, versions / f"{step:06d}", durable=False, **options)
                break
            except TimeoutError:
                time.sleep(0.001)
        time.sleep(0.005)


@pytest.mark.parametrize("new_files", [False, True])
@pytest.mark.parametrize(("mode", "reader"), [
    ("auto", "sglang"), ("load", "sglang"), ("auto", "vllm"), ("load", "vllm")])
def test_files_that_deltas_change(tmp_path, versions, mode, new_files, reader):
    folder = tmp_path / "local"
    save(folder, 0)
    (folder / ".weight_sync").mkdir()
    found = collections.Counter()
    done = run_beside(lambda: apply_each(folder, versions, found, new_files=new_files))
    errors = load_until(done, found, folder, EngineOptions(mode=mode, progress=False), reader)
    assert errors == 0 and found[STEPS] > 0
    assert len(found) > 5 and sum(found.values()) > 10, found


def test_engines_that_apply_deltas_themselves(tmp_path, versions):
    """Two engines of a host share the checkpoint, while a trainer publishes."""
    folder, source = tmp_path / "local", tmp_path / "source"
    save(folder, 0)
    source.mkdir()
    options = EngineOptions(progress=False, deltas=str(source))
    found, errors = [collections.Counter(), collections.Counter()], []

    def publish():
        for step in range(1, STEPS + 1):
            if step % 20 == 1:
                wait_for_another(*found)
            (versions / f"{step:06d}").rename(tmp_path / "made")
            (tmp_path / "made").rename(source / f"{step:06d}")
            time.sleep(0.01)

    done = run_beside(publish)
    other = threading.Thread(
        target=lambda: errors.append(load_until(done, found[1], folder, options)))
    other.start()
    errors.append(load_until(done, found[0], folder, options))
    other.join()
    for path in source.iterdir():
        path.rename(versions / path.name)
    assert errors == [0, 0], "an engine failed"
    for seen in found:
        assert seen[STEPS] > 0 and len(seen) > 1, seen


@pytest.mark.parametrize(("mode", "reader"), [
    ("auto", "sglang"), ("load", "vllm"), ("map", "sglang")])
def test_files_that_saves_replace(tmp_path, mode, reader):
    folder = tmp_path / "local"
    save(folder, 0)

    found = collections.Counter()

    def replace():
        for step in range(1, 3 * STEPS + 1):
            if step % 45 == 1:
                wait_for_another(found)
            save(folder, step)

    options = EngineOptions(mode=mode, progress=False)
    load_until(run_beside(replace), found, folder, options, reader)
    assert found[3 * STEPS] > 0 and len(found) > 2, found


@pytest.mark.parametrize("new_files", [False, True])
def test_the_version_is_known_while_deltas_are_applied(tmp_path, versions, new_files):
    """version_of() takes no lock: what it reads before and after a change must not be mixed."""
    folder = tmp_path / "local"
    save(folder, 0)
    deltas.apply(folder, versions / "000001", durable=False)
    reads = collections.Counter()

    def apply():
        for step in range(2, STEPS + 1):
            deltas.apply(folder, versions / f"{step:06d}", durable=False, new_files=new_files)
            if step % 5 == 0:
                wait_for_another(reads)

    done = run_beside(apply)
    while not done.is_set():
        note = deltas.version_of(folder)
        assert note.interrupted or note.version is not None
        reads[note.version] += 1
    assert deltas.version_of(folder).version == str(STEPS) and len(reads) > 5, reads
