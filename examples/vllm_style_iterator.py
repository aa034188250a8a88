# SPDX-License-Identifier: Apache-2.0
"""The weight iterator of an inference server: (name, tensor) of all files, with progress.

    python examples/vllm_style_iterator.py [FOLDER] [--device cuda:0]

Inference servers make this sequence of calls: they open a ParallelLoader over the sorted files,
iterate over it once and always close it. If GPUDirect Storage fails, they do the same without it.
"""

import argparse
import json
import pathlib
import sys
import tempfile

import torch

from fastsafetensors import ParallelLoader, SafetensorError, SingleGroup, safe_open


def weights(files, group, device, nogds=False):
    """Iterate over (name, tensor) of the files."""
    loader = first = None
    try:
        try:
            loader = ParallelLoader(pg=group, hf_weights_files=sorted(files), queue_size=0,
                                    use_tqdm_on_load=True, device=device, nogds=nogds)
            iterator = loader.iterate_weights()
            first = next(iterator, None)
        except RuntimeError as error:
            if nogds or "gds" not in str(error):
                raise
            print(f"GPUDirect Storage failed ({error}): loading without it")
            if loader is not None:
                loader.close()
            loader = ParallelLoader(pg=group, hf_weights_files=sorted(files), queue_size=0,
                                    use_tqdm_on_load=True, device=device, nogds=True)
            iterator = loader.iterate_weights()
            first = next(iterator, None)
        if first is not None:
            yield first
            yield from iterator
    finally:
        if loader is not None:
            loader.close()


def fill(model, iterator):
    """Copy weights into the parameters of the same names and return their number."""
    parameters = dict(model.named_parameters())
    count = 0
    with torch.no_grad():
        for name, tensor in iterator:
            parameters[name].copy_(tensor)
            count += 1
    return count


def list_files(folder):
    """Return the files of a model: those of its index, or all. Exits if one is missing.

    An iterator over files can't know that one of a set is missing: opening the folder tells.
    """
    try:
        with safe_open(folder, framework="pt"):
            pass
    except (OSError, SafetensorError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    names = {name for index in folder.glob("*.safetensors.index.json")
             for name in json.loads(index.read_text())["weight_map"].values()}
    files = sorted(folder / name for name in names) or sorted(folder.glob("*.safetensors"))
    return [str(path) for path in files]


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=pathlib.Path)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = arguments.folder
        if folder is None:
            from fastsafetensors.fast_loading import save_safetensors_sharded

            folder = pathlib.Path(made)
            model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(12)))
            save_safetensors_sharded(model.state_dict(), folder, max_shard_size="1MB")
            empty = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(12)))
            files = [str(path) for path in folder.glob("*.safetensors")]
            count = fill(empty.to(arguments.device),
                         weights(files, SingleGroup(), arguments.device))
            print(f"{count} tensors of {len(files)} files were loaded into the model")
            return
        files = list_files(folder)
        total = 0
        for name, tensor in weights(files, SingleGroup(), arguments.device):
            total += tensor.nbytes
            print(f"{name}: {tuple(tensor.shape)} {tensor.dtype}")
        print(f"{total / 1e6:.1f} MB of {len(files)} files")


if __name__ == "__main__":
    main()
