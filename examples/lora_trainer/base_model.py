# SPDX-License-Identifier: Apache-2.0
"""The base model: any causal language model of transformers, or a tiny one created here."""

import contextlib
import hashlib
import pathlib

import torch
import transformers

# Tokens are bytes, so the tiny model needs no tokenizer.
VOCABULARY = 256


def make_base(folder):
    """Save a tiny Llama with random weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=256)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def load_base(settings):
    """Load the base model, with fastsafetensors if the settings ask for it."""
    folder = pathlib.Path(settings.base_model)
    if not (folder / "config.json").exists():
        print(f"creating a tiny base model in {folder}")
        make_base(folder)
    switch = contextlib.nullcontext()
    if settings.use_fastsafetensors:
        try:
            from fastsafetensors.integrations import accelerate_from_pretrained

            switch = accelerate_from_pretrained(
                threads=settings.fastsafetensors_num_threads)
        except ImportError:
            print("fastsafetensors with accelerate_from_pretrained() is not installed: "
                  "safetensors loads the base model")
    with switch:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.to(settings.device)


def fingerprint(model):
    """Return a digest that identifies the base model: names, shapes and embedding values."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
    weight = model.get_input_embeddings().weight.detach().float().cpu().contiguous()
    digest.update(weight.numpy().tobytes())
    return digest.hexdigest()[:16]
