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
    """A cache that is empty, damaged or of another base model."""


def encode(text):
    """Convert a text to (tokens, labels) of LENGTH bytes; the loss ignores labels of -100."""
    data = text.encode()[:LENGTH]
    tokens = torch.zeros(LENGTH, dtype=torch.long)
    tokens[: len(data)] = torch.tensor(list(data))
    labels = torch.full((LENGTH,), -100)
    labels[: len(data)] = tokens[: len(data)]
    return tokens, labels


@torch.no_grad()
def make_caches(settings, model, digest):
    """Compute and save the embeddings of every text, unless they are there.

    CacheError if those of another base model are there.
    """
    folder = pathlib.Path(settings.cache_dir)
    index = folder / INDEX
    if index.exists():
        known = json.loads(index.read_text()).get("base_model")
        if known != digest:
            raise CacheError(
                f"{folder} holds embeddings of another base model ({known}, this one is {digest}): "
                "choose another cache_dir or delete it")
        return
    folder.mkdir(parents=True, exist_ok=True)
    texts = [line for line in pathlib.Path(settings.texts).read_text().splitlines() if line.strip()]
    if not texts:
        raise CacheError(f"{settings.texts} contains no text")
    embed = model.get_input_embeddings()
    for number, text in enumerate(texts):
        tokens, labels = encode(text)
        item = {"prompt_embeds": embed(tokens.to(settings.device)).cpu(), "labels": labels}
        save_embeddings_safetensors(item, folder / f"{number:05d}.safetensors")
    # Written last, so that an interrupted cache is computed again.
    index.write_text(json.dumps({"base_model": digest, "count": len(texts)}))


class CachedEmbeddings(torch.utils.data.Dataset):
    """The items of a cache folder: NAME.safetensors, else NAME.pt."""

    def __init__(self, folder, use_fastsafetensors=True, num_threads=8):
        """List the items. CacheError for an empty folder."""
        folder = pathlib.Path(folder)
        fast = {path.stem: path for path in folder.glob("*.safetensors")}
        old = {path.stem: path for path in folder.glob("*.pt")}
        both = sorted(fast.keys() & old.keys())
        if both:
            print(f"{folder}: {len(both)} items as .safetensors and .pt; .safetensors is read")
        found = {**old, **fast}
        self.paths = [found[name] for name in sorted(found)]
        if not self.paths:
            raise CacheError(f"{folder} contains no cached embeddings")
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
        except Exception as error:  # SafetensorError of either package
            raise CacheError(f"{path} is damaged: {error}") from error
        missing = {"prompt_embeds", "labels"} - set(item)
        if missing:
            raise CacheError(f"{path} lacks {', '.join(sorted(missing))}")
        return item
