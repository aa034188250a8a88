# SPDX-License-Identifier: Apache-2.0
"""Small models in the format of published ones: folders with config.json and random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from fastsafetensors import write_manifest
from fastsafetensors.torch import load_file, save_file

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD, INNER, VOCABULARY, EXPERTS = 4, 128, 4, 2, 32, 256, 256, 8


def _config(kind: str, **more: Any) -> dict[str, Any]:
    return {
        "architectures": [kind], "hidden_size": HIDDEN, "intermediate_size": INNER,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "vocab_size": VOCABULARY,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "bos_token_id": 0, "eos_token_id": 1, "attention_bias": False, **more,
    }


def _attention(prefix: str, norms: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}.self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
        f"{prefix}.self_attn.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
        f"{prefix}.self_attn.v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
        f"{prefix}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
        f"{prefix}.input_layernorm.weight": (HIDDEN,),
        f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
    }
    if norms:
        shapes[f"{prefix}.self_attn.q_norm.weight"] = (HEAD,)
        shapes[f"{prefix}.self_attn.k_norm.weight"] = (HEAD,)
    return shapes


def _mlp(prefix: str) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}.gate_proj.weight": (INNER, HIDDEN),
            f"{prefix}.up_proj.weight": (INNER, HIDDEN),
            f"{prefix}.down_proj.weight": (HIDDEN, INNER)}


def _save(folder: Path, shapes: dict[str, tuple[int, ...]], config: dict[str, Any],
          dtype: Any, seed: int) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator).to(dtype)
               for name, shape in shapes.items()}
    names = list(tensors)
    parts = [names[: len(names) // 2], names[len(names) // 2 :]]
    index: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
        index.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps(
        {"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def _ends(tied: bool) -> dict[str, tuple[int, ...]]:
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    return shapes if tied else {**shapes, "lm_head.weight": (VOCABULARY, HIDDEN)}


def llama(folder: Path, dtype: Any = torch.bfloat16, tied: bool = False, seed: int = 1) -> str:
    """A Llama."""
    shapes = _ends(tied)
    for layer in range(LAYERS):
        shapes.update(_attention(f"model.layers.{layer}", norms=False))
        shapes.update(_mlp(f"model.layers.{layer}.mlp"))
    config = _config("LlamaForCausalLM", model_type="llama", tie_word_embeddings=tied)
    return _save(folder, shapes, config, dtype, seed)


def qwen3_moe(folder: Path, dtype: Any = torch.bfloat16, seed: int = 1) -> str:
    """A mixture of experts, each of them named."""
    shapes = _ends(False)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes.update(_attention(prefix, norms=True))
        shapes[f"{prefix}.mlp.gate.weight"] = (EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            shapes.update(_mlp(f"{prefix}.mlp.experts.{expert}"))
    config = _config(
        "Qwen3MoeForCausalLM", model_type="qwen3_moe", num_experts=EXPERTS, num_experts_per_tok=2,
        moe_intermediate_size=INNER, norm_topk_prob=True, decoder_sparse_step=1,
        mlp_only_layers=[], router_aux_loss_coef=0.0, shared_expert_intermediate_size=0,
    )
    return _save(folder, shapes, config, dtype, seed)


def granite_moe(folder: Path, dtype: Any = torch.bfloat16, seed: int = 1) -> str:
    """A mixture whose experts are one tensor of three dimensions."""
    shapes = _ends(True)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes.update(_attention(prefix, norms=False))
        moe = f"{prefix}.block_sparse_moe"
        shapes[f"{moe}.input_linear.weight"] = (EXPERTS, 2 * INNER, HIDDEN)
        shapes[f"{moe}.output_linear.weight"] = (EXPERTS, HIDDEN, INNER)
        shapes[f"{moe}.router.layer.weight"] = (EXPERTS, HIDDEN)
    config = _config(
        "GraniteMoeForCausalLM", model_type="granitemoe", num_local_experts=EXPERTS,
        num_experts_per_tok=2, tie_word_embeddings=True, embedding_multiplier=1.0,
        logits_scaling=1.0, residual_multiplier=1.0, attention_multiplier=1.0,
    )
    return _save(folder, shapes, config, dtype, seed)


def compressed(folder: Path, plain: str) -> str:
    """The same model in compressed files."""
    folder.mkdir()
    for path in Path(plain).iterdir():
        if path.suffix == ".safetensors":
            save_file(load_file(path), folder / path.name, {"format": "pt"}, compress=True)
        else:
            (folder / path.name).write_bytes(path.read_bytes())
    return str(folder)


def sealed(folder: str) -> str:
    """The same folder with a manifest."""
    write_manifest(folder)
    return folder
