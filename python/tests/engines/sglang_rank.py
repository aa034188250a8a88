# SPDX-License-Identifier: Apache-2.0
"""One rank of a model with SGLang's classes, loaded by SGLang's loader and by ours.

All scenarios of one call have the same widths.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rank_program import (
    addresses,
    arguments,
    compare,
    disk_reads,
    refused,
    run_all,
    watch_stats,
)
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import parallel_state
from sglang.srt.layers import dp_attention
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs

import fastsafetensors.sglang


def load(scenario: dict[str, Any], load_format: str, extra: dict[str, Any]) -> tuple[Any, Any]:
    """(configuration, model with its weights)."""
    from sglang.srt.model_loader.loader import get_model_loader

    config = ModelConfig(scenario["folder"], dtype="bfloat16")
    dp_attention.init_dp_gathered_buffer(config)
    load_config = LoadConfig(load_format=load_format, model_loader_extra_config=extra)
    loader = get_model_loader(load_config, config)
    return config, loader.load_model(model_config=config, device_config=DeviceConfig("cpu"))


def reload(scenario: dict[str, Any]) -> dict[str, Any]:
    """Load, then update from another folder, only some names if the scenario has a filter."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    config, model = load(scenario, "fastsafetensors", scenario.get("extra", {}))
    before, only = addresses(model), scenario.get("only")
    updater = WeightUpdater(
        tp_rank=0, device="cpu", gpu_id=0, model_config=config, custom_weight_loaders={},
        get_model=lambda: model, update_model_fields=lambda *args, **kwargs: None,
        recapture_cuda_graph=lambda: None, get_model_runner=SimpleNamespace)
    def update(folder: str) -> tuple[bool, str]:
        return updater.update_weights_from_disk(
            folder, "fastsafetensors",
            weight_name_filter=None if only is None else lambda name: only in name)

    refusal = refused(scenario, update)
    if scenario.get("breaks") == 0:  # the old weights are untouched
        theirs = load(scenario, "safetensors", {})[1]
        return compare(scenario, theirs, model, same_addresses=before == addresses(model),
                       refusal=refusal)
    with disk_reads(scenario, scenario["reload"]):
        done, message = update(scenario["reload"])
    assert done, message
    plain = scenario.get("plain", scenario["reload"])
    other = load({**scenario, "folder": plain}, "safetensors", {})[1]
    untouched = load(scenario, "safetensors", {})[1]
    if only is not None:  # weights outside of the filter are unchanged
        old = dict(untouched.named_parameters())
        for name, parameter in other.named_parameters():
            if only not in name:
                parameter.data.copy_(old[name])
    told = compare(scenario, other, model, same_addresses=before == addresses(model),
                   refusal=refusal)
    if only is not None:
        told["bytes"] = sum(p.nbytes for n, p in model.named_parameters() if only in n)
    return told


def run(scenario: dict[str, Any]) -> dict[str, Any]:
    """Load both ways and compare."""
    if "reload" in scenario:
        return reload(scenario)
    plain = scenario.get("plain", scenario["folder"])
    theirs = load({**scenario, "folder": plain}, "safetensors", {})[1]
    with disk_reads(scenario, scenario["folder"]):
        ours = load(scenario, "fastsafetensors", scenario.get("extra", {}))[1]
    return compare(scenario, theirs, ours)


def main() -> None:
    """Run all scenarios."""
    rank, world, url, scenarios = arguments()
    watch_stats()
    fastsafetensors.sglang.register()
    fastsafetensors.sglang.register()
    HookRegistry.apply_hooks()
    first = scenarios[0]
    settings = ServerArgs(
        model_path=first["folder"], device="cpu", tp_size=first.get("tp", 1),
        pp_size=first.get("pp", 1), ep_size=first.get("ep", 1), skip_tokenizer_init=True,
        disable_cuda_graph=True,
    )
    publish(settings, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=rank))
    parallel_state.init_distributed_environment(world, rank, url, rank, "gloo")
    parallel_state.initialize_model_parallel(backend="gloo")
    dp_attention.initialize_dp_attention(settings)
    run_all(run, scenarios)


if __name__ == "__main__":
    main()
