# SPDX-License-Identifier: Apache-2.0
"""Compressed files: every interface returns the saved tensors, bit for bit."""

import hashlib
import json
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import threading

import pytest
from conftest import zstd_or_skip

torch = pytest.importorskip("torch")
import fake_gpu  # noqa: E402
import numpy as np  # noqa: E402
import safetensors.torch as stock  # noqa: E402

import fastsafetensors.numpy as fst_numpy  # noqa: E402
import fastsafetensors.torch as fst_torch  # noqa: E402
from fastsafetensors import (  # noqa: E402
    SafetensorError,
    SignedBy,
    safe_open,
    sign_folder,
    write_manifest,
)
from fastsafetensors._core import Model  # noqa: E402

zstd_or_skip()


def weights() -> dict[str, "torch.Tensor"]:
    """Tensors of many dtypes and odd sizes, some larger than a chunk."""
    torch.manual_seed(0)
    return {
        "layer.0.weight": (torch.randn(1500, 701) * 0.02).bfloat16(),
        "layer.0.half": (torch.randn(300, 333) * 0.1).half(),
        "layer.1.float": torch.randn(517, 300),
        "layer.1.double": torch.randn(30, 517, dtype=torch.float64),
        "f8": torch.randn(701, 500).to(torch.float8_e4m3fn),
        "f8b": torch.randn(701, 500).to(torch.float8_e5m2),
        "complex": torch.randn(200, 100, dtype=torch.complex64),
        "numbers": torch.arange(70000),
        "bools": torch.arange(9999) % 3 == 0,
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 7),
        "zeros": torch.zeros(333, 1000),
    }


def same(one: dict[str, "torch.Tensor"], other: dict[str, "torch.Tensor"]) -> bool:
    """Whether two sets of tensors agree, bit for bit."""

    def raw(tensor: "torch.Tensor") -> bytes:
        return bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())

    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and raw(one[name]) == raw(other[name])
        for name in one
    )


@pytest.fixture(name="pair", scope="module")
def make_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Return the paths of a plain file and of its compressed form."""
    folder = tmp_path_factory.mktemp("packed")
    plain, packed = str(folder / "plain.safetensors"), str(folder / "packed.safetensors")
    fst_torch.save_file(weights(), plain, {"format": "pt"})
    fst_torch.save_file(weights(), packed, {"format": "pt"}, compress=True)
    return plain, packed


def read_header(path: str) -> dict[str, object]:
    """The file's JSON header."""
    data = pathlib.Path(path).read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    assert isinstance(header, dict)
    return header


def test_a_compressed_file_is_smaller_and_stock_safetensors_opens_it(pair):
    """A compressed file is smaller, and the safetensors package can open it."""
    plain, packed = pair
    assert pathlib.Path(packed).stat().st_size < 0.8 * pathlib.Path(plain).stat().st_size
    seen = stock.load_file(packed)
    assert "layer.0.weight" not in seen
    assert seen["__packed__.layer.0.weight"].dtype == torch.uint8
    assert torch.equal(seen["numbers"], weights()["numbers"])
    assert read_header(packed)["__metadata__"] == {"format": "pt", "fst.packed": "1"}


@pytest.mark.parametrize("mode", [None, "load"])
def test_load_file_returns_the_saved_tensors(pair, mode):
    """load_file() returns the saved tensors."""
    assert same(fst_torch.load_file(pair[1], mode=mode), weights())


def test_views_are_refused_where_they_are_demanded(pair):
    """mode="map" is an error for compressed files."""
    with pytest.raises(RuntimeError, match="compressed"):
        fst_torch.load_file(pair[1], mode="map")


def test_numpy_returns_the_saved_arrays(pair):
    """The NumPy API returns the saved arrays."""
    loaded = fst_numpy.load_file(pair[1])
    assert np.array_equal(loaded["layer.0.half"], weights()["layer.0.half"].numpy())
    assert np.array_equal(loaded["numbers"], weights()["numbers"].numpy())


def test_safe_open_shows_names_metadata_and_slices(pair):
    """safe_open() returns the original names, metadata and slices."""
    all_weights = weights()
    with safe_open(pair[1], "pt") as file:
        assert sorted(file.keys()) == sorted(all_weights)
        assert file.metadata() == {"format": "pt"}
        for name in all_weights:
            assert same({name: file.get_tensor(name)}, {name: all_weights[name]})
        part = file.get_slice("layer.0.weight")
        assert part.get_shape() == [1500, 701]
        whole = all_weights["layer.0.weight"]
        for index in (
            np.s_[3:1400],
            np.s_[:, 5:99],
            np.s_[100:1300:1, 300:],
            np.s_[749:751, :],
            np.s_[1499:, 700:],
        ):
            assert torch.equal(part[index], whole[index])


def test_modules_are_filled(pair, tmp_path):
    """load_model() fills modules from compressed files."""
    del pair
    model, other = torch.nn.Linear(512, 700), torch.nn.Linear(512, 700)
    path = str(tmp_path / "module.safetensors")
    fst_torch.save_file(model.state_dict(), path, compress=True)
    assert "__packed__.weight" in read_header(path)
    fst_torch.load_model(other, path)
    assert torch.equal(model.weight, other.weight) and torch.equal(model.bias, other.bias)


def test_conversion_while_loading(pair):
    """Tensors are converted while they are decompressed."""
    loaded = fst_torch.load_file(pair[1], dtype=torch.float32)
    assert torch.equal(loaded["layer.0.weight"], weights()["layer.0.weight"].float())
    assert same(loaded, fst_torch.load_file(pair[0], dtype=torch.float32))


def test_sets_with_an_index(tmp_path):
    """Sharded compressed models with an index load like plain ones."""
    from fastsafetensors import fast_loading

    state = weights()
    index = fast_loading.save_safetensors_sharded(state, tmp_path, "1MB", compress=True)
    assert index.endswith(".index.json")
    assert any("__packed__" in read_header(str(path)) for path in tmp_path.glob("*.safetensors"))
    assert same(fst_torch.load_file(str(tmp_path)), state)


def command(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    return subprocess.run(
        [sys.executable, "-m", "fastsafetensors", *words],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_compresses_and_gives_the_file_back(tmp_path, pair):
    """The command compresses a file and restores the original bytes."""
    source, packed, back = (str(tmp_path / name) for name in "abc")
    shutil.copyfile(pair[0], source)
    assert command("convert", "--compress=all", source, packed).returncode == 0
    assert command("convert", "--decompress", packed, back).returncode == 0
    digests = [hashlib.sha256(pathlib.Path(path).read_bytes()).digest() for path in (source, back)]
    assert digests[0] == digests[1]
    told = json.loads(command("inspect", "--json", packed).stdout)
    assert told["files"][0]["coder"] == "zstd"
    assert told["files"][0]["stored_bytes"] == pathlib.Path(packed).stat().st_size
    by_name = {tensor["name"]: tensor for tensor in told["tensors"]}
    assert by_name["numbers"]["stored_bytes"] < by_name["numbers"]["bytes"]
    assert "compressed (zstd)" in command("inspect", packed).stdout
    assert command("verify", packed).returncode == 0
    os.unlink(back)  # files that did not shrink are stored uncompressed, and are restored as well
    assert command("convert", "--decompress", source, back).returncode == 0
    assert pathlib.Path(back).read_bytes() == pathlib.Path(source).read_bytes()
    assert command("convert", "--compress", packed, back).returncode != 0
    assert command("convert", "--compress", "--decompress", packed, back).returncode == 3
    assert command("edit", "--set", "a=b", packed).returncode == 2
    for words in (["--dry-run", source, back], [source, "-"]):
        refused = command("convert", "--compress", *words)
        assert refused.returncode == 3
        assert "cannot be combined with standard output or --dry-run" in str(refused.stderr)


def test_sizes_are_near_the_entropy(tmp_path):
    """The size of Gaussian weights is near their exponents' entropy; noise does not shrink."""
    torch.manual_seed(0)
    values = torch.cat([torch.randn(1 << 17) * (0.005 * 1.5**i) for i in range(8)])
    blocks = values.view(-1, 128 * 128)
    scaled = (blocks / blocks.abs().amax(1, keepdim=True) * 448).to(torch.float8_e4m3fn)
    noise = torch.randint(-(2**31), 2**31 - 1, (1 << 19,), dtype=torch.int32).view(torch.bfloat16)
    path = tmp_path / "sizes"
    for tensor, most in ((values.bfloat16(), 0.665), (scaled, 0.837), (noise, 1.001)):
        fst_torch.save_file({"a": tensor}, str(path), compress=True)
        assert path.stat().st_size <= most * tensor.nbytes + 512


def test_damage_names_the_tensor(tmp_path, pair):
    """Errors of damaged chunks name the tensor."""
    path = tmp_path / "damaged.safetensors"
    data = bytearray(pathlib.Path(pair[1]).read_bytes())
    (size,) = struct.unpack("<Q", data[:8])
    entry = json.loads(data[8 : 8 + size])["__packed__.layer.0.weight"]
    data[8 + size + entry["data_offsets"][0] + 300000] ^= 4
    path.write_bytes(data)
    with pytest.raises(SafetensorError, match=r"damaged.*layer\.0\.weight"):
        fst_torch.load_file(str(path))
    result = command("verify", str(path))
    assert result.returncode != 0 and "layer.0.weight" in result.stdout + result.stderr


def test_missing_libzstd_is_named(pair):
    """Compressed files can be read without libzstd. Writing one is an error that names the package
    to install."""
    program = f"""
import sys
from fastsafetensors import safe_open, SafetensorError
import fastsafetensors.numpy as fst_numpy
with safe_open({pair[1]!r}, "np") as file:
    print(sorted(file.keys())[0], file.get_tensor("numbers")[5])
original, packed = fst_numpy.load_file({pair[0]!r}), fst_numpy.load_file({pair[1]!r})
print(all(original[name].tobytes() == packed[name].tobytes() for name in original), len(packed))
for work in (lambda: fst_numpy.save_file(original, {pair[0]!r} + ".other", compress=True),):
    try:
        work()
    except Exception as error:
        print(type(error).__name__, error)
"""
    # The first library found lacks the functions, as an old version does.
    folder = pathlib.Path(pair[1]).parent / "empty"
    folder.mkdir(exist_ok=True)
    source = folder / "nothing.c"
    source.write_text("int fastsafetensors_test_nothing;\n")
    for name in ("libzstd.so.1", "libzstd.so"):
        made = subprocess.run(["cc", "-shared", "-o", str(folder / name), str(source)], check=False)
        if made.returncode != 0:
            pytest.skip("no compiler")
    out = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "LD_LIBRARY_PATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    assert out.startswith("bools 5"), out
    assert "True" in out and out.count("libzstd") >= 1, out


def listed(path: pathlib.Path) -> None:
    """Write the manifest of the file's folder."""
    done = command("hash", "--manifest", str(path.parent))
    assert done.returncode == 0, done.stderr


def test_manifest_of_the_stored_file_checks_stored_bytes(tmp_path, pair):
    """Unchanged files load. A flipped bit in header, directory or chunks is an error."""
    path = tmp_path / "model.safetensors"
    shutil.copyfile(pair[1], path)
    listed(path)
    assert same(fst_torch.load_file(str(path), verify=True), weights())
    data = path.read_bytes()
    for at in [3, 90, len(data) - 1, *range(700, len(data), len(data) // 40)]:
        path.write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
        with pytest.raises(SafetensorError, match="digest|manifest"):
            fst_torch.load_file(str(path), verify=True)


def test_a_manifest_of_the_original_refuses_the_compressed_file(tmp_path, pair):
    """The manifest of the original does not match the compressed file, and the reverse."""
    path = tmp_path / "model.safetensors"
    for one, other in (pair, reversed(pair)):
        shutil.copyfile(one, path)
        listed(path)
        shutil.copyfile(other, path)
        with pytest.raises(SafetensorError, match="size does not match the manifest"):
            fst_torch.load_file(str(path), verify=True)


def test_truncated_compressed_file_is_not_rescued(tmp_path, pair):
    """`rescue` is an error that gives the reason, and writes no file."""
    path, out = tmp_path / "cut.safetensors", tmp_path / "out.safetensors"
    path.write_bytes(pathlib.Path(pair[1]).read_bytes()[:-100])
    told = command("verify", str(path))
    assert told.returncode == 1 and "fastsafetensors rescue" not in told.stdout + told.stderr
    told = command("rescue", str(path), str(out))
    assert told.returncode != 0 and "truncated" in told.stdout + told.stderr and not out.exists()


def test_many_threads_and_a_forked_child_read_one_open_file(pair):
    """Each thread, and the child, reads its rows correctly."""
    whole = weights()["layer.0.weight"]
    wrong = []
    with safe_open(pair[1], "pt") as file:

        def read(number: int) -> None:
            for turn in range(8):
                row = (number * 37 + turn * 211) % 1400
                if not torch.equal(
                    file.get_slice("layer.0.weight")[row : row + 50], whole[row : row + 50]
                ):
                    wrong.append(number)

        threads = [threading.Thread(target=read, args=(number,)) for number in range(64)]
        for thread in threads:
            thread.start()
        child = os.fork()
        if child == 0:
            rows = file.get_slice("layer.0.weight")[7:9]
            os._exit(0 if bool((rows == whole[7:9]).all()) else 1)
        for thread in threads:
            thread.join()
        assert os.waitpid(child, 0)[1] == 0 and not wrong


@pytest.mark.parametrize("content", [{}, {"a": torch.tensor(1.5)}], ids=["empty", "scalar"])
def test_decompressing_a_small_plain_file_copies_it(tmp_path, content):
    """Tensors that did not shrink are stored uncompressed, and restored with their exact size."""
    plain, packed, back = (tmp_path / f"{name}.safetensors" for name in ("a", "b", "c"))
    stock.save_file(content, plain)
    assert command("convert", "--compress", plain, packed).returncode == 0
    assert command("convert", "--decompress", packed, back).returncode == 0
    assert back.read_bytes() == packed.read_bytes() == plain.read_bytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_rank_rows_read_only_their_chunks(tmp_path, dtype):
    """One of eight ranks reads the bytes of its rows and at most one more chunk at either end."""
    path, rows = tmp_path / "packed.safetensors", 1024
    weight = (torch.randn(rows, 4000) * 0.02).to(dtype)
    fst_torch.save_file({"w": weight}, path, compress=True)
    entry = read_header(str(path))["__packed__.w"]
    assert isinstance(entry, dict)
    part, chunk = weight.nbytes // 8, 256 << 10
    for rank in (0, 3, 7):
        box = ("w", (rank * rows // 8, 0), ((rank + 1) * rows // 8, 4000))
        model = Model(path)
        loader = model.load([box], mode="load")
        loader.wait()
        stats = loader.stats()
        loader.close()
        model.close()
        chunks = -(-(rank + 1) * part // chunk) - rank * part // chunk
        chunks = min(chunks, -(-weight.nbytes // chunk))
        expected = entry["shape"][0] * min(chunks * chunk / weight.nbytes, 1)
        assert part * 0.6 < stats["stored_bytes"] <= 1.1 * expected


def test_other_rewrites_are_uncompressed_by_default(tmp_path, pair):
    """merge, split, extract and convert take compressed files like any other."""
    state = weights()
    more = tmp_path / "more.safetensors"
    fst_torch.save_file({"more": torch.ones(3)}, more)
    merged, small = str(tmp_path / "merged.safetensors"), str(tmp_path / "small.safetensors")
    assert command("merge", pair[1], str(more), merged).returncode == 0
    assert same(fst_torch.load_file(merged), {**state, "more": torch.ones(3)})
    assert "__packed__" not in read_header(merged)
    assert command("merge", "--compress", pair[1], str(more), small).returncode == 0
    assert same(fst_torch.load_file(small), {**state, "more": torch.ones(3)})
    assert "__packed__" in read_header(small)
    assert command("split", "--count", "2", pair[1], str(tmp_path / "set")).returncode == 0
    assert same(fst_torch.load_file(tmp_path / "set"), state)
    assert command("extract", "--select", "layer.1.*", pair[1], small).returncode == 0
    assert fst_torch.load_file(small).keys() == {"layer.1.float", "layer.1.double"}


def test_signed_folders_of_compressed_files(tmp_path, pair):
    """The stored bytes are signed; a load by key decodes bytes that it has verified."""
    folder, key, public = tmp_path / "model", tmp_path / "key.pem", tmp_path / "pub.pem"
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command, which makes keys, is not installed")
    folder.mkdir()
    shutil.copyfile(pair[1], folder / "model.safetensors")
    make = ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(key)]
    subprocess.run(make, check=True, capture_output=True)
    subprocess.run(["openssl", "ec", "-in", str(key), "-pubout", "-out", str(public)], check=True,
                   capture_output=True)
    write_manifest(folder, algorithm="sha256")
    sign_folder(folder, key)
    signed = SignedBy(public)
    assert same(fst_torch.load_file(folder / "model.safetensors", verify=signed), weights())
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(SafetensorError, match="digest"):
        fst_torch.load_file(folder / "model.safetensors", verify=signed)


def test_stand_in_gpus_get_the_decoded_bytes(pair):
    """Tensors for a GPU are decoded by the CPU."""
    code = f"""
torch = fake_gpu.give_torch_a_gpu()
import fastsafetensors.torch as fst
near, far = fst.load_file({pair[0]!r}), fst.load_file(path, device="cuda:0")
raw = lambda tensor: tensor.cpu().reshape(-1).view(torch.uint8)
same = all(torch.equal(raw(near[n]), raw(far[n])) for n in near if near[n].numel())
print(same, sorted(near) == sorted(far), len(fake_gpu.taken) > 0)
"""
    assert fake_gpu.run(code, path=pair[1]).split() == ["True"] * 3
