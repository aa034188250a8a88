# SPDX-License-Identifier: Apache-2.0
"""Round trips of weight deltas with ModelExpress's own sender and receiver, by way of a server of
objects (moto)."""

import types
import urllib.request

import pytest
from delta_folders import INDEX, make_states, read_checkpoint, same, write_checkpoint
from store_servers import find_program, moto

from fastsafetensors import deltas, remote

pytest.importorskip("torch")
receiver = pytest.importorskip("modelexpress_rl.inference.receiver",
                               reason="needs modelexpress: make build/receivers/.ready")
pytest.importorskip("boto3", reason="needs boto3")
WORDS = ("v-a", "v-b", "v-c", "v-d")


@pytest.fixture
def server(tmp_path, own_home, monkeypatch):
    """Return the S3 client of ModelExpress, whose server has an empty bucket."""
    from modelexpress_rl.s3 import S3Client

    if find_program("moto_server") is None:
        pytest.skip("needs moto[server]: make build/servers/.ready")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SECRET")
    with moto() as url:
        urllib.request.urlopen(urllib.request.Request(f"{url}/bench", method="PUT")).close()
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
        remote.configure(endpoint=url, access_key="KEY", secret_key="SECRET")
        client = S3Client(endpoint_url=url, region_name="us-east-1")
        yield client
        client.close()


@pytest.fixture
def group(tmp_path):
    """Return a process group of one rank, which the sender needs."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def open_sender(server, group, base):
    """Return the package's sender; in place of its service a table says what a version is."""
    from modelexpress_rl import refit_pb2
    from modelexpress_rl.train.methods.canonical_delta import CanonicalDeltaPublicationMethod

    def describe(request, timeout):
        number = WORDS.index(request.uid)
        version = refit_pb2.WeightVersion(
            model_name="m", base_version_id=WORDS[number - 1],
            payload_format=refit_pb2.WEIGHT_PAYLOAD_FORMAT_XOR_DELTA)
        version.object_storage.storage_type = refit_pb2.OBJECT_STORAGE_TYPE_S3
        version.object_storage.uri = f"s3://bench/{request.uid}/{INDEX}"
        return refit_pb2.GetWeightVersionResponse(version=version)

    config = types.SimpleNamespace(initial_base_version_id=WORDS[0], uri_prefix="s3://bench")
    return CanonicalDeltaPublicationMethod(
        config=config, model_name="m", rpc_timeout_seconds=1, process_group=group, s3=server,
        service=lambda: types.SimpleNamespace(GetWeightVersion=describe),
        read_seed_tensor=lambda name: base[name])


def test_deltas_of_its_sender_are_applied(tmp_path, server, group):
    import torch
    from modelexpress_rl.version import WeightVersionRef

    def buckets(state):
        return [[(name, torch.from_numpy(value.copy()))] for name, value in state.items()]

    states = make_states(len(WORDS))
    sender = open_sender(server, group, states[0])
    sender.prepare_base(hf_tensor_iter=buckets(states[0]))
    for word, state in list(zip(WORDS, states))[1:]:
        version = WeightVersionRef(word)
        sender.publish(version=version, staged=sender.stage(version=version,
                                                            hf_tensor_iter=buckets(state)))
    chain = [f"s3://bench/{word}" for word in WORDS[1:]]
    write_checkpoint(tmp_path / "one", states[0])
    write_checkpoint(tmp_path / "all", states[0])
    deltas.apply(tmp_path / "one", chain[0], version=WORDS[0])
    assert same(read_checkpoint(tmp_path / "one"), states[1])
    deltas.verify(tmp_path / "one", *chain[1:])
    deltas.apply(tmp_path / "all", *chain, version=WORDS[0])
    assert same(read_checkpoint(tmp_path / "all"), states[-1])
    assert deltas.version_of(tmp_path / "all").version == WORDS[-1]
    live = {name: value.copy() for name, value in states[1].items()}
    deltas.Delta(*chain[1:]).prepare(live, version=WORDS[1]).commit()
    assert same(live, states[-1])


def test_its_receiver_applies_our_deltas(tmp_path, server):
    from modelexpress_rl.object_storage import ObjectStorageType

    states = make_states(len(WORDS))
    chain = []
    for number, word in enumerate(WORDS):
        write_checkpoint(tmp_path / word, states[number])
        if number == 0:
            continue
        folder = tmp_path / "made" / word
        deltas.make(tmp_path / WORDS[number - 1], tmp_path / word, folder, version=word,
                    base_version=WORDS[number - 1], dialect="modelexpress", durable=False)
        for path in sorted(folder.iterdir(), key=lambda path: path.name == INDEX):
            server.put(uri=f"s3://bench/{word}/{path.name}", data=path.read_bytes())
        chain.append(receiver._S3Version(word, WORDS[number - 1],
                                         receiver.WeightPayloadFormat.XOR_DELTA,
                                         f"s3://bench/{word}/{INDEX}"))
    config = receiver.ObjectStorageGeneratorConfig(
        storage_type=ObjectStorageType.S3, initial_base_version_id=WORDS[0],
        seed_checkpoint_path=tmp_path / WORDS[0], refit_checkpoint_dir=tmp_path / "cache")
    opened = receiver._LocalCheckpoint(model_name="m", config=config, s3=server)
    opened.initialize()
    for end in (1, 3):  # one version, and then two more
        prepared = opened.prepare_chain(tuple(chain[:end]))
        assert same(read_checkpoint(prepared.path), states[end])
