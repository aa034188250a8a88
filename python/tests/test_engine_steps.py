# SPDX-License-Identifier: Apache-2.0
"""A set of files is replaced, by deltas or by saves, while an engine loads it again and again: no
load returns weights of two steps."""

import collections
import logging
import threading
import time

import pytest

torch = pytest.importorskip("torch")

from fastsafetensors import SafetensorError, deltas, fast_loading  # noqa: E402
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


def load(folder, options):
    """Load as the plug-ins do. Return the steps whose weights were found."""
    files = [str(path) for path in sorted(folder.glob("*.safetensors"))]
    weights = dict.fromkeys(NAMES)
    for name, tensor in begun(iterate(files, options, LOGGER, device="cpu")):
        weights[name] = torch.empty(64, 512).copy_(tensor)
    return {value for tensor in weights.values() for value in tensor.unique().tolist()}


def load_until(done, folder, options):
    """Load until `done` is set, and once more. Return how many loads were of which step, and how
    many raised an error."""
    found, errors, is_last = collections.Counter(), 0, False
    while not is_last:
        is_last = done.is_set()
        try:
            steps = load(folder, options)
        except (SafetensorError, OSError) as error:
            assert not is_last, error
            errors += 1
            continue
        assert len(steps) == 1, f"a load returned weights of the steps {sorted(steps)}"
        found[steps.pop()] += 1
    return found, errors


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


def apply_each(folder, versions, **options):
    """Apply the versions one by one, each as soon as no engine reads the files."""
    for step in range(1, STEPS + 1):
        while True:
            try:
                deltas.apply(folder, versions / f"{step:06d}", durable=False, **options)
                break
            except TimeoutError:
                time.sleep(0.001)
        time.sleep(0.005)


@pytest.mark.parametrize("new_files", [False, True])
@pytest.mark.parametrize("mode", ["auto", "load"])
def test_files_that_deltas_change(tmp_path, versions, mode, new_files):
    folder = tmp_path / "local"
    save(folder, 0)
    (folder / ".weight_sync").mkdir()
    done = run_beside(lambda: apply_each(folder, versions, new_files=new_files))
    found, errors = load_until(done, folder, EngineOptions(mode=mode, progress=False))
    assert errors == 0 and found[STEPS] > 0
    assert len(found) > 5 and sum(found.values()) > 10, found


def test_engines_that_apply_deltas_themselves(tmp_path, versions):
    """Two engines of a host share the checkpoint, while a trainer publishes."""
    folder, source = tmp_path / "local", tmp_path / "source"
    save(folder, 0)
    source.mkdir()
    options = EngineOptions(progress=False, deltas=str(source))
    results = []

    def publish():
        for step in range(1, STEPS + 1):
            (versions / f"{step:06d}").rename(tmp_path / "made")
            (tmp_path / "made").rename(source / f"{step:06d}")
            time.sleep(0.01)

    done = run_beside(publish)
    other = threading.Thread(
        target=lambda: results.append(load_until(done, folder, options)))
    other.start()
    found, errors = load_until(done, folder, options)
    other.join()
    for path in source.iterdir():
        path.rename(versions / path.name)
    assert len(results) == 1, "the other engine failed"
    for seen, failed in ((found, errors), results[0]):
        assert failed == 0 and seen[STEPS] > 0 and len(seen) > 2, seen


@pytest.mark.parametrize("mode", ["auto", "load", "map"])
def test_files_that_saves_replace(tmp_path, mode):
    folder = tmp_path / "local"
    save(folder, 0)

    def replace():
        for step in range(1, 3 * STEPS + 1):
            save(folder, step)

    found, _ = load_until(run_beside(replace), folder, EngineOptions(mode=mode, progress=False))
    assert found[3 * STEPS] > 0 and len(found) > 2, found
