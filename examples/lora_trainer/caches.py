# SPDX-License-Identifier: Apache-2.0
"""Cached embeddings of the texts, one file each, and the dataset that reads them."""

import json
import pathlib

import torch
from utils.fast_loading import (
    load_embeddings_safetensors,
    load_safetensors,
    save_embeddings_safetensors,
)

LENGTH = 64
INDEX = "cache.json"


class CacheError(ValueError):
    """A cache that can't be used."""


def encode(text):
    """Bytes of a text as token numbers, all of one length; -100 is not learned."""
    data = text.encode()[:LENGTH]
    tokens = torch.zeros(LENGTH, dtype=torch.long)
    tokens[: len(data)] = torch.tensor(list(data))
    labels = torch.full((LENGTH,), -100)
    labels[: len(data)] = tokens[: len(data)]
    return tokens, labels


@torch.no_grad()
def make_caches(settings, model, digest):
    """Compute and save the embeddings of every text, once; CacheError for another model's."""
    folder = pathlib.Path(settings.cache_dir)
    index = folder / INDEX
    if index.exists():
        known = json.loads(index.read_text()).get("base_model")
        if known != digest:
            raise CacheError(
                f"{folder} holds embeddings of another base model ({known}, this one is {digest}): "
                "choose another cache_dir, or remove it")
        return
    folder.mkdir(parents=True, exist_ok=True)
    texts = [line for line in pathlib.Path(settings.texts).read_text().splitlines() if line.strip()]
    if not texts:
        raise CacheError(f"{settings.texts} has no texts")
    embed = model.get_input_embeddings()
    for number, text in enumerate(texts):
        tokens, labels = encode(text)
        item = {"prompt_embeds": embed(tokens.to(settings.device)).cpu(), "labels": labels}
        save_embeddings_safetensors(item, folder / f"{number:05d}.safetensors")
    # Last: a cache that was cut short is made again.
    index.write_text(json.dumps({"base_model": digest, "count": len(texts)}))


class CachedEmbeddings(torch.utils.data.Dataset):
    """The items of a cache folder: NAME.safetensors, or NAME.pt where that is all there is."""

    def __init__(self, folder, use_fastsafetensors=True, num_threads=8):
        """List the items. CacheError when there are none."""
        folder = pathlib.Path(folder)
        fast = {path.stem: path for path in folder.glob("*.safetensors")}
        old = {path.stem: path for path in folder.glob("*.pt")}
        both = sorted(fast.keys() & old.keys())
        if both:
            print(f"{folder}: {len(both)} items as .safetensors and .pt; .safetensors is read")
        found = {**old, **fast}
        self.paths = [found[name] for name in sorted(found)]
        if not self.paths:
            raise CacheError(f"{folder} holds no cached embeddings")
        self._fast, self._threads = use_fastsafetensors, num_threads

    def __len__(self):
        """Return the number of items."""
        return len(self.paths)

    def __getitem__(self, number):
        """Load an item: {"prompt_embeds": [length, hidden], "labels": [length]}."""
        path = self.paths[number]
        try:
            if path.suffix == ".pt":
                item = torch.load(path, map_location="cpu", weights_only=True)
            elif self._fast:
                item = load_embeddings_safetensors(path)
            else:
                item = load_safetensors(path, self._threads)
        except (OSError, RuntimeError, ValueError) as error:
            raise CacheError(f"{path} can't be read: {error}") from error
        except Exception as error:  # safetensors' own class, whichever package raised it
            raise CacheError(f"{path} is damaged: {error}") from error
        missing = {"prompt_embeds", "labels"} - set(item)
        if missing:
            raise CacheError(f"{path} lacks {', '.join(sorted(missing))}")
        return item
