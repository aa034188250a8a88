# SPDX-License-Identifier: Apache-2.0
"""Differences from the interfaces of fastsafetensors 0.5 and safetensors, each with its reason.

{pattern of a name: reason}. Names are as test_api_surface.py gives them; a pattern that matches
nothing is an error.
"""

V05 = {
    "*.__exit__(*)": "Python passes the three arguments by position",
    "*.__getitem__(*)": "Python passes the key by position",
    "*.fstcpp": "0.5's own import of its extension; fastsafetensors.cpp is that module here",
    "fastsafetensors.version": "a module of 0.5's packaging; use fastsafetensors.__version__",
    "*.SafeTensorsMetadata(*)": "create it with from_file, from_fd or from_buffer",
    "*.init_numa": "loads place their memory and threads by themselves",
    "*.gl_set_numa": "a global variable of 0.5; see init_numa",
    "*.loaded_library": "a global variable of 0.5; drivers are opened when a load needs them",
    "fastsafetensors.copier.dstorage": "DirectStorage is Windows; this package is Linux",
    "fastsafetensors.copier.example_copier": "an example, which no program imports",
    "*.DLManagedTensor.as_py": "an internal step of from_cuda_buffer",
    "*.DLTensor.itemsize": "an internal step of from_cuda_buffer; STDataToDL has the sizes in bits",
    "*CopierType": "a name of type checking; any reader's name is a str",
    "*CopierConstructFunc": "a name of type checking",
    "fastsafetensors.copier.fgds.*": "constants and probes of a private NVIDIA library",
    "*.ODIRECT_HINT": "a text of 0.5's messages, in fastsafetensors.common",
    "fastsafetensors.cpp.*fgds*": "a private NVIDIA library that this package does not use",
    "fastsafetensors.cpp.dma_*": "internal steps of 0.5's loads",
    "fastsafetensors.cpp.memcpy_h2d_async": "an internal step of 0.5's loads",
    "fastsafetensors.cpp.cufile_version": "`fastsafetensors engines` says whether cuFile works",
    "fastsafetensors.cpp.gds_device_cache_size": "a setting of cuFile that loads do not change",
    "fastsafetensors.cpp.get_device_pci_bus": "an internal step of common.get_device_numa_node",
    "fastsafetensors.cpp.is_hipfile_memory_budget_supported": "a probe of 0.5's own planner",
    "fastsafetensors.cpp.*.wait_read_prefix": "tensors are waited for one by one by the loads",
    "fastsafetensors.frameworks.[A-Z]*": "names that 0.5 imports for type checking",
    "fastsafetensors.frameworks.dataclass": "a name that 0.5 imports for itself",
    "fastsafetensors.frameworks.gds_device_buffer": "in fastsafetensors.cpp",
}

SAFETENSORS = {
    "*.__exit__(*)": "Python passes the three arguments by position",
    "*.safe_open(*)": "Rust's signature shows no defaults; ours are the documented ones",
    "safetensors.PrefetchLoader(*)": "made by safe_open.prefetch()",
    "safetensors.PySafeSlice(*)": "made by safe_open.get_slice()",
    "safetensors.TensorMeta(*)": "made by safe_open.get_tensor_meta()",
    "safetensors.flax.numpy": "a module that safetensors imports for itself",
}
