# SPDX-License-Identifier: Apache-2.0
"""Ranks of one engine agree on the version of the weights before they apply deltas."""

import json
import shutil
import textwrap

import pytest
from delta_folders import make_states, read_checkpoint, same, write_chain, write_checkpoint
from torch_processes import run_together

from fastsafetensors import deltas

pytest.importorskip("torch")
pytest.importorskip("zstandard", reason="needs the zstandard package")

CODE = textwrap.dedent("""
    import datetime, json, logging, os, pathlib, sys, time
    import torch.distributed as dist
    from fastsafetensors._engine_weights import EngineOptions, begun, iterate

    folder, rank, size = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank,
                            world_size=size, timeout=datetime.timedelta(seconds=60))
    local, source = json.loads((folder / "places").read_text())[rank]
    files = [str(path) for path in pathlib.Path(local).glob("*.safetensors")]
    options = EngineOptions(progress=False, deltas=source)
    for round in range(int(sys.argv[4])):
        try:
            weights = begun(iterate(files, options, logging.getLogger("rank"), device="cpu"))
            sums = {name: int(t.contiguous().view(-1).view(__import__("torch").uint8).sum())
                    for name, t in weights}
            print(json.dumps(sums, sort_keys=True), flush=True)
        except Exception as error:
            print(type(error).__name__, error, flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads may abort an ordinary exit
""")


@pytest.fixture
def hosts(tmp_path):
    """Return two hosts' checkpoints and the folders in which they see versions 1 to 3."""
    states = make_states(4)
    found = []
    for host in ("a", "b"):
        write_checkpoint(tmp_path / host / "local", states[0])
        (tmp_path / host / "source").mkdir()
        write_chain(tmp_path / host / "source", states)
        found.append((tmp_path / host / "local", tmp_path / host / "source"))
    return states, found


def load_on_ranks(tmp_path, places, rounds=1):
    """Load in one process for each place; return the lines that each printed."""
    (tmp_path / "ranks").unlink(missing_ok=True)
    (tmp_path / "places").write_text(json.dumps([[str(one) for one in pair] for pair in places]))
    ended = run_together(CODE, [[tmp_path, rank, len(places), rounds]
                                for rank in range(len(places))], 240)
    assert all(one.status == 0 for one in ended), ended
    return [one.stdout.splitlines() for one in ended]


def test_hosts_that_see_different_versions_load_the_same(tmp_path, hosts):
    states, ((local, source), (other, behind)) = hosts
    shutil.rmtree(behind / "weight_v000003")
    deltas.apply(other, behind / "weight_v000001", durable=False)
    first, second = load_on_ranks(tmp_path, [(local, source), (other, behind)])
    assert first == second and len(first) == 1
    for folder in (local, other):
        assert deltas.version_of(folder).version == "000002"
        assert same(read_checkpoint(folder), states[2])
    # Now both see everything.
    write_chain(tmp_path / "new", states)
    shutil.copytree(tmp_path / "new/weight_v000003", behind / "weight_v000003")
    first, second = load_on_ranks(tmp_path, [(local, source), (other, behind)])
    assert first == second and same(read_checkpoint(other), states[3])


def test_nothing_is_visible_to_one_rank_yet(tmp_path, hosts):
    states, ((local, source), (other, _)) = hosts
    first, second = load_on_ranks(tmp_path, [(local, source), (other, tmp_path / "nowhere")])
    assert first == second and "layers.0.weight" in first[0]
    assert same(read_checkpoint(local), states[0])


def test_an_error_of_one_rank_is_an_error_on_all(tmp_path, hosts):
    states, ((local, source), (other, behind)) = hosts
    shard = next((behind / "weight_v000001").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-9])
    first, second = load_on_ranks(tmp_path, [(local, source), (other, behind)])
    assert first[0].startswith("RankError") and "rank 1 failed" in first[0]
    assert second[0].startswith("SafetensorError")
    assert same(read_checkpoint(other), states[0])


def test_checkpoints_without_a_common_version(tmp_path, hosts):
    _, ((local, source), (other, behind)) = hosts
    chain = sorted(source.iterdir())
    deltas.apply(local, *chain, durable=False)
    shutil.rmtree(behind / "weight_v000003")
    first, second = load_on_ranks(tmp_path, [(local, source), (other, behind)])
    for line in (first[0], second[0]):
        assert line.startswith("RankError") and "(rank 0: 3; rank 1: 0 to 2)" in line


def test_ranks_of_one_host_share_the_checkpoint(tmp_path, hosts):
    states, ((local, source), _) = hosts
    waiting = tmp_path / "waiting"
    source.rename(waiting)
    source.mkdir()
    import threading
    import time

    def publish():
        for version in sorted(waiting.iterdir()):
            time.sleep(0.4)
            version.rename(source / version.name)

    publisher = threading.Thread(target=publish)
    publisher.start()
    outputs = load_on_ranks(tmp_path, [(local, source)] * 3, rounds=60)
    publisher.join()
    assert outputs[0] == outputs[1] == outputs[2]
    assert all(line.startswith("{") for line in outputs[0])


def test_pull_stops_at_a_version(hosts):
    states, ((local, source), _) = hosts
    deltas.pull(local, source, until="2", durable=False)
    assert deltas.version_of(local).version == "000002"
    assert deltas.pull(local, source, until="000002") is None
    with pytest.raises(Exception, match="version 9 does not follow the checkpoint's version 2"):
        deltas.pull(local, source, until="9")
    with pytest.raises(TypeError, match="^until must be a str"):
        deltas.pull(local, source, until=2)
    assert same(read_checkpoint(local), states[2])
