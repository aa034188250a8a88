#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write docs/compatibility.md: what programs for the originals use, and the test of each.

A row without a test shows as such; a row whose test does not exist is an error. With --check the
page must be what would be written.
"""

import pathlib
import re
import runpy
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/compatibility.md"

# (section, [(what, test or "")])
ROWS = [
    ("fastsafetensors 0.5: SafeTensorsFileLoader", [
        ("SingleGroup, None; add_filenames, copy_files_to_device, get_tensor, close",
         "test_vllm_of_05"),
        ("buffer never closed (SGLang)", "test_vllm_of_05"),
        ("path, num_threads, load()", "test_first_documented_example"),
        ("get_keys, get_shape, set_tensor_filter", "test_filter"),
        ("copy_files_to_device(dtype, use_buf_register, max_copy_block_size)", "test_tgis"),
        ("copy_file_to_device", "test_comfyui_and_scripts"),
        ("allow_inflight", "test_inflight"),
        ("reset, close, use after close", "test_empty_loader"),
        ("wrong arguments", "test_refusals"),
        ("FASTSAFETENSORS_ODIRECT, FASTSAFETENSORS_DEBUG, debug_log, max_threads",
         "test_environment_and_logs"),
        ("process_extension_config", "test_configuration"),
        ("torch ProcessGroup of several ranks (gloo), uneven files", "test_ranks"),
        ("one rank fails, requests something else, exits", "test_mistakes_of_one_rank"),
        ("one rank dies or never joins", "test_missing_rank"),
        ("ranks on two hosts", "test_two_hosts"),
        ("device cuda, a torch.device, a number; nogds; strict",
          "test_loaders_of_05_load_to_the_gpu"),
    ]),
    ("fastsafetensors 0.5: FilesBufferOnDevice", [
        ("key_to_rank_lidx, get_filename, get_shape", "test_comfyui_and_scripts"),
        ("get_sharded, get_multi_cols, push_tensor, as_dict, iter_local_tensors", "test_tgis"),
        ("unknown, filtered names", "test_filter"),
        ("a name in two files", "test_a_name_in_two_files"),
        ("TensorBase", "test_wrapped_tensors"),
        ("get_tensor, get_sharded, push_tensor between ranks", "test_ranks"),
    ]),
    ("fastsafetensors 0.5: fastsafe_open", [
        ("list, tuple, {rank: [...]}; keys, get_tensor, in, len, iteration", "test_atom"),
        ("metadata by file, __exit__ by hand in another thread", "test_caches"),
        ("the example of its documentation", "test_first_documented_example"),
    ]),
    ("fastsafetensors 0.5: ParallelLoader, PipelineParallel", [
        ("vLLM's loop", "test_vllm"),
        ("fallback on errors that say gds", "test_vllm_falls_back_on_gds_errors"),
        ("early break, second iteration, close in between",
         "test_leaving_the_loop_stops_everything"),
        ("max_batch_bytes, use_chunk_budget_as_allocation_size", "test_chunks"),
        ("device_memory_budget", "test_memory_budget"),
        ("BudgetInfeasibleError, accumulate_resident", "test_budget_too_small_for_any_tensor"),
        ("tensor_filter, all_local", "test_expert_parallel"),
        ("settings that contradict each other, empty list", "test_parallel_refusals"),
        ("a given loader, enable_tqdm", "test_pipeline_over_a_given_loader"),
        ("progress", "test_progress_bar"),
        ("async for", "test_async"),
    ]),
    ("fastsafetensors 0.5: AutoLoader, configuration, expert parallelism", [
        ("AutoLoader(pg, files, device)", "test_rtp_llm"),
        ("FASTSAFETENSORS_CONFIG, ./fastsafetensors.json, LoaderConfig", "test_configuration"),
        ("owned_expert_range, expert_parallel_filter", "test_expert_parallel"),
        ("expert_parallel_filter_from_env", "test_expert_filter_from_env"),
    ]),
    ("fastsafetensors 0.5: savers", [
        ("ParallelSaver.save, shard metadata, validate_shard_set", "test_parallel_saver"),
        ("save_sharded, plan_shards, write_shards, per_entry_fill, tensor_fill",
         "test_custom_fill"),
        ("a fill that fails, no space", "test_a_fill_that_fails_leaves_nothing"),
        ("wrong entries", "test_saver_refusals"),
    ]),
    ("fastsafetensors 0.5: headers, types, counters, readers, frameworks", [
        ("SafeTensorsMetadata, TensorFrame", "test_metadata_and_frames"),
        ("tags of header errors", "test_errors_of_bad_files_have_tags"),
        ("DType, Device, DTYPE_SIZES", "test_types"),
        ("live_allocation_count, live_allocation_bytes", "test_a_name_in_two_files"),
        ("from_cuda_buffer", "test_memory_at_an_address"),
        ("register_copier_constructor, CopierInterface", "test_custom_reader"),
        ("framework paddle (simulated)", "test_fastdeploy"),
        ("import without a framework", "test_import_is_light"),
        ("LazyTensorFactory, SharedDeviceAllocation", "test_one_file_by_hand"),
        ("fastsafetensors.cpp", "test_low_level_names"),
    ]),
    ("safetensors: safe_open", [
        ("keys, offset_keys, metadata, get_tensor, get_tensors, get_slice, backend",
         "test_open_has_every_member"),
        ("slices of torch", "test_slices_of_torch"),
        ("slices of numpy", "test_slices_of_numpy"),
        ("errors", "test_refusals_of_open"),
        ("threads, fork", "test_from_many_threads_and_after_fork"),
        ("spawn", "test_spawn"),
        ("0.9: get_tensor_meta, prefetch (without a GPU)", "test_meta_prefetch_and_handles"),
    ]),
    ("safetensors: torch, numpy, others", [
        ("load_file", "test_same_as_safetensors"),
        ("load, deserialize", "test_bytes"),
        ("save_file, save: bytes", "test_bytes_are_the_reference_writers"),
        ("save_file: refusals", "test_refusals"),
        ("save_model, storage_ptr, storage_size", "test_save_model"),
        ("load_model", "test_strict_errors"),
        ("numpy", "test_numpy"),
        ("flax", "test_jax"),
        ("tensorflow, mlx, paddle: not installed",
         "test_missing_package_errors_say_what_to_install"),
        ("serialize, serialize_file, TensorSpec", "test_specs"),
        ("except safetensors.SafetensorError, pickle", "test_errors_are_caught_by_their_name"),
        ("compat.install, compat.uninstall", "test_compat"),
        ("_safe_open_handle", "test_meta_prefetch_and_handles"),
    ]),
    ("fast_loading", [
        ("load_safetensors, save_safetensors", "test_lora_round_trips"),
        ("load_safetensors_mmap", "test_mmap"),
        ("save_safetensors_sharded", "test_files_and_index_equal_hugging_face"),
        ("load_safetensors_sharded: faults", "test_faults_of_a_sharded_folder"),
        ("save_embeddings_safetensors, load_embeddings_safetensors", "test_embeddings"),
        ("caches written by other programs", "test_embeddings_of_other_programs"),
    ]),
]


def find_tests() -> dict[str, str]:
    """The file of each test function."""
    found = {}
    for path in sorted((ROOT / "python/tests").glob("test_*.py")):
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M):
            found.setdefault(name, path.name)
    return found


def make_page() -> str:
    """The page; SystemExit for a test that does not exist."""
    tests = find_tests()
    lines = ["# Compatibility", "",
             "Functions that programs for fastsafetensors 0.5 and safetensors use, each with its",
             "test. Made by tools/make_compatibility.py. A row without a test is not done.", ""]
    for section, rows in ROWS:
        lines += [f"## {section}", "", "| what | test |", "|---|---|"]
        for what, test in rows:
            if test and test not in tests:
                raise SystemExit(f"{what}: there is no test {test}")
            lines.append(f"| {what} | {f'`{tests[test]}::{test}`' if test else '**none**'} |")
        lines.append("")
    return "\n".join(lines + list_differences())


def list_differences() -> list[str]:
    """The lists by which test_api_surface.py compares all names and signatures."""
    lists = runpy.run_path(str(ROOT / "python/tests/surface_differences.py"))
    lines = ["## Names and signatures", "",
             "`test_api_surface.py` compares every public name, parameter and default with those",
             "of the installed fastsafetensors 0.5.0, and of safetensors 0.8.0 and 0.9.0rc1 (with",
             "`compat.install()`), and fails on any difference that is not here.", ""]
    for title, key in (("fastsafetensors 0.5.0", "V05"), ("safetensors", "SAFETENSORS")):
        lines += [f"| {title} | why it differs |", "|---|---|"]
        lines += [f"| `{name}` | {why} |" for name, why in lists[key].items()]
        lines.append("")
    return lines


def main() -> int:
    """Write the page, or check it."""
    page = make_page()
    if "--check" in sys.argv:
        if PAGE.read_text() == page:
            return 0
        print("docs/compatibility.md is stale: run tools/make_compatibility.py")
        return 1
    PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
