# SPDX-License-Identifier: Apache-2.0
"""dtype= on load: bit-exact against torch's own conversion."""

import struct

import pytest
from conftest import write_raw

import fastsafetensors.torch

from fastsafetensors import _core
from fastsafetensors.torch import load_file

FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
          "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz",
          "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu"}
WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
INTEGERS = {"I8": "int8", "U8": "uint8", "I16": "int16", "U16": "uint16", "I32": "int32",
            "U32": "uint32", "I64": "int64"}


def every_input(torch, name):
    """All values of a type of at most 16 bits; a dense sample of the others."""
    width = WIDTHS.get(name, 1)
    generator = torch.Generator().manual_seed(3)
    if width <= 2:
        return torch.arange(1 << (8 * width)).to(torch.int16 if width == 2 else torch.uint8)
    high = torch.arange(1 << 16).repeat_interleave(8)
    low = torch.randint(0, 1 << 16, high.shape, generator=generator)
    low[::4] = torch.tensor([0, 1 << 15, (1 << 15) - 1, 1 << 12]).repeat(len(low) // 16)
    bits = (high << 16 | low)
    if width == 4:
        return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32)
    more = torch.randint(0, 1 << 32, high.shape, generator=generator)
    more[::2] = 0
    return (torch.where(bits >= 1 << 31, bits - (1 << 32), bits) << 32) | more


def write_bits(tmp_path, name, bits):
    data = bits.numpy().tobytes()
    width = WIDTHS.get(name, 1)
    header = (f'{{"a":{{"dtype":"{name}","shape":[{len(data) // width}],'
              f'"data_offsets":[0,{len(data)}]}}}}')
    return write_raw(tmp_path / f"{name}.safetensors", header, data)


@pytest.mark.parametrize("source", FLOATS)
def test_floats_like_torch(tmp_path, torch, source):
    if not hasattr(torch, FLOATS[source]):
        pytest.skip(f"this torch has no {FLOATS[source]}")
    bits = every_input(torch, source)
    path = write_bits(tmp_path, source, bits)
    values = bits.view(getattr(torch, FLOATS[source]))
    for target, torch_name in FLOATS.items():
        if target == source or not hasattr(torch, torch_name):
            continue
        dtype = getattr(torch, torch_name)
        ours = load_file(path, dtype=dtype)["a"]
        theirs = values.to(torch.float32).to(dtype) if source == "F64" else values.to(dtype)
        assert ours.dtype == dtype
        a, b = ours.to(torch.float32), theirs.to(torch.float32)
        # NaN payloads differ between torch's own scalar and vector paths: a NaN is a NaN.
        same = (a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())
        wrong = (~same).nonzero().flatten()
        assert not len(wrong), (target, values[wrong[:5]].to(torch.float32), a[wrong[:5]],
                                b[wrong[:5]])


@pytest.mark.parametrize("source", INTEGERS)
def test_integers_widen(tmp_path, torch, source):
    from safetensors.torch import save_file

    dtype = getattr(torch, INTEGERS[source])
    values = torch.tensor([torch.iinfo(dtype).min, torch.iinfo(dtype).max, 0, 1, 7]).to(dtype)
    save_file({"a": values}, tmp_path / "m")
    for name in INTEGERS.values():
        target = getattr(torch, name)
        holds = target is dtype or (torch.iinfo(target).bits > torch.iinfo(dtype).bits
                                    and torch.iinfo(target).min <= torch.iinfo(dtype).min)
        if not holds:
            with pytest.raises(ValueError, match="a is .*, which can't become "):
                load_file(tmp_path / "m", dtype=target)
            continue
        ours = load_file(tmp_path / "m", dtype=target)["a"]
        assert ours.dtype == target
        assert ours.tolist() == values.tolist()


def test_impossible_dtype_is_an_error(tmp_path, torch):
    """Only tensors of another kind stay unchanged: ids, if the requested dtype is a float."""
    import fastsafetensors.numpy
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup
    from fastsafetensors.st_types import DType

    path = write_raw(tmp_path / "f6", '{"s":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}}',
                     b"abc")
    save_floats = fastsafetensors.torch.save_file
    save_floats({"w": torch.ones(3), "ids": torch.arange(3)}, tmp_path / "m")
    for device in ("cpu", "meta"):
        with pytest.raises(ValueError, match="F6_E2M3, which can't become.*can't be converted"):
            load_file(path, device, dtype="F32")
        with pytest.raises(ValueError, match="w is F32, which can't become .*: floats become"):
            load_file(tmp_path / "m", device, dtype=torch.int8, names=["w"])
        with pytest.raises(ValueError, match="ids is I64"):
            load_file(tmp_path / "m", device, dtype=torch.bool)
        assert load_file(tmp_path / "m", device, dtype="bf16")["ids"].dtype == torch.int64
    with pytest.raises(ValueError, match="w is F32"):
        fastsafetensors.numpy.load_file(tmp_path / "m", dtype="int8", names=["w"])
    with SafeTensorsFileLoader(SingleGroup(), "cpu") as loader:
        loader.add_filenames({0: [str(tmp_path / "m")]})
        with pytest.raises(ValueError, match="can't become"):
            loader.copy_files_to_device(dtype=DType.I8)
    assert load_file(tmp_path / "m", dtype="bf16")["w"].dtype == torch.bfloat16
    assert load_file(tmp_path / "m", dtype="fp16")["w"].dtype == torch.float16
    with pytest.raises(ValueError, match="unknown dtype 'bfloat'; expected one of: BOOL"):
        load_file(tmp_path / "m", dtype="bfloat")


def test_unconverted_tensors(model, torch):
    path, tensors = model
    loaded = load_file(path, dtype=torch.float16)
    for name, tensor in tensors.items():
        expected = torch.float16 if tensor.dtype.is_floating_point else tensor.dtype
        assert loaded[name].dtype == expected, name
    assert torch.equal(loaded["large"], tensors["large"].half())
    assert loaded["empty"].shape == (0, 7) and loaded["scalar"].item() == 3.5
    by_name = load_file(path, dtype="BF16")
    assert torch.equal(by_name["large"], tensors["large"].bfloat16())


@pytest.mark.parametrize("engine", ["auto", "pread", "direct", "uring", "mmap"])
@pytest.mark.parametrize("shift", [0, 1, 2, 3])
def test_units_across_blocks(tmp_path, torch, engine, shift):
    """Elements at odd places of the file lie across the borders of reads."""
    count = 5_000_001
    values = torch.randn(count, generator=torch.Generator().manual_seed(1))
    data = bytes(shift) + values.numpy().tobytes()
    pad = f'"p":{{"dtype":"U8","shape":[{shift}],"data_offsets":[0,{shift}]}},' if shift else ""
    header = (f'{{{pad}"a":{{"dtype":"F32","shape":[{count}],'
              f'"data_offsets":[{shift},{len(data)}]}}}}')
    path = write_raw(tmp_path / "m", header + " " * (-len(header) % 8), data)
    try:
        loader = _core.Model(path).load(mode="load", engine=engine, dtype="BF16")
    except RuntimeError as error:
        pytest.skip(str(error))
    from fastsafetensors.torch import export

    assert torch.equal(export(loader)["a"], values.bfloat16())
    stats = loader.stats()
    assert stats["bytes_converted"] == 4 * count
    assert stats["bytes_read"] == len(data)


def test_slices_and_sub_byte(tmp_path, torch):
    path = tmp_path / "m"
    whole = torch.randn(64, 100, generator=torch.Generator().manual_seed(1))
    from safetensors.torch import save_file

    save_file({"a": whole}, path)
    model = _core.Model(path)
    from fastsafetensors.torch import export

    loader = model.load([("a", (3, 10), (9, 51))], dtype="F64", mode="load")
    assert torch.equal(export(loader)["a"], whole[3:9, 10:51].double())
    codes = bytes(range(256))
    path.write_bytes(b"")
    write_raw(path, '{"f":{"dtype":"F4","shape":[512],"data_offsets":[0,256]}}', codes)
    table = [0, .5, 1, 1.5, 2, 3, 4, 6, -0.0, -.5, -1, -1.5, -2, -3, -4, -6]
    expected = [table[n] for c in codes for n in (c & 15, c >> 4)]
    assert load_file(path, dtype=torch.float32)["f"].tolist() == expected
    write_raw(path, '{"f":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}',
              struct.pack("<3f", 1, 2, 3))
    with pytest.raises(ValueError, match="fill whole bytes"):
        load_file(path, dtype="F4")
    with pytest.raises(ValueError, match="unknown dtype"):
        load_file(path, dtype="F33")
    with pytest.raises(ValueError, match="mapped tensors"):
        load_file(path, dtype="F16", mode="map")
    with pytest.raises(ValueError, match="unknown dtype torch.complex128"):
        load_file(path, dtype=torch.complex128)


def test_conversion_rule_is_the_same_on_ranks(tmp_path, torch):
    """st_types.converted() says for every pair what a load really does."""
    from fastsafetensors._core import DTYPES, Model
    from fastsafetensors.st_types import DTYPE_SIZES, DType, converted

    for source in DTYPES:
        nbytes = int(8 * DTYPE_SIZES[DType(source)])
        header = ('{"a":{"dtype":"%s","shape":[8],"data_offsets":[0,%d]}}' % (source, nbytes))
        path = tmp_path / "m"
        path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(nbytes))
        model = Model(path)
        for wanted in DTYPES:
            loader = model.load(mode="load", dtype=wanted)
            assert loader.item(0).dtype == converted(DType(source), DType(wanted)).value, (
                source, wanted)
            loader.close()
