# SPDX-License-Identifier: Apache-2.0
"""Differences from the interfaces of fastsafetensors 0.5 and safetensors, each with its reason.

{pattern of a name: reason}. Names are as test_api_surface.py gives them; a pattern that matches
nothing is an error.
"""

V05 = {
    "*.__exit__(*)": "Python passes the three arguments by place",
    "*.__getitem__(*)": "Python passes the key by place",
    "*.fstcpp": "0.5's own import of its extension; fastsafetensors.cpp is that module here",
    "fastsafetensors.version": "a name of 0.5's packaging; __version__ says it",
    "*.SafeTensorsMetadata(*)": "made by from_file, from_fd and from_buffer; the table is C's here",
    "*.init_numa": "loads place their memory and threads by themselves",
    "*.gl_set_numa": "a global of 0.5's; see init_numa",
    "*.loaded_library": "a global of 0.5's: drivers are opened when a load needs them",
    "fastsafetensors.copier.dstorage": "DirectStorage is Windows; this package is Linux",
    "fastsafetensors.copier.example_copier": "an example; ours is in the docs and a test",
    "*.DLManagedTensor.as_py": "a step of from_cuda_buffer, which makes capsules in C here",
    "*.DLTensor.itemsize": "the same; STDataToDL has the bits",
    "*CopierType": "a name of type checking; any reader's name is a str",
    "*CopierConstructFunc": "a name of type checking",
    "fastsafetensors.copier.fgds.*": "constants and probes of a private NVIDIA library",
    "*.ODIRECT_HINT": "a text of 0.5's messages, in fastsafetensors.common",
    "fastsafetensors.cpp.*fgds*": "a private NVIDIA library that this package does not use",
    "fastsafetensors.cpp.dma_*": "steps of 0.5's own pipeline; loads are C's here",
    "fastsafetensors.cpp.memcpy_h2d_async": "a step of 0.5's own pipeline",
    "fastsafetensors.cpp.cufile_version": "`fastsafetensors engines` says what there is",
    "fastsafetensors.cpp.gds_device_cache_size": "a knob of cuFile's, which loads do not turn",
    "fastsafetensors.cpp.get_device_pci_bus": "common.get_device_numa_node asks torch",
    "fastsafetensors.cpp.is_hipfile_memory_budget_supported": "a probe of 0.5's own planner",
    "fastsafetensors.cpp.*.wait_read_prefix": "tensors are waited for one by one by the loads",
    "fastsafetensors.frameworks.[A-Z]*": "names that 0.5 imports for type checking",
    "fastsafetensors.frameworks.dataclass": "a name that 0.5 imports for itself",
    "fastsafetensors.frameworks.gds_device_buffer": "in fastsafetensors.cpp",
}

SAFETENSORS = {
    "*.__exit__(*)": "Python passes the three arguments by place",
    "*.safe_open(*)": "Rust's signature shows no defaults; ours are the documented ones",
    "safetensors.PrefetchLoader(*)": "made by safe_open.prefetch()",
    "safetensors.PySafeSlice(*)": "made by safe_open.get_slice()",
    "safetensors.TensorMeta(*)": "made by safe_open.get_tensor_meta()",
    "safetensors.flax.numpy": "a module that safetensors imports for itself",
}
