# SPDX-License-Identifier: Apache-2.0
"""Compare the library's declarations of the drivers' functions with the vendors' headers.

The table FSTI_GPU_FUNCTIONS and the numbers are read from the sources. A C++ program compares each
function's parameters and result with the header's: how many, and the size and kind of each.
"""

import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
PRIVATE = ROOT / "src/gpu/gpu_private.h"

PROGRAM = """\
#include <cstdint>
#include <cstddef>
#include <cstdio>
#include <type_traits>
{includes}
struct kind {{ int size; bool is_pointer; }};
template <class T> kind kind_of() {{ return {{(int)sizeof(T), std::is_pointer<T>::value}}; }}
template <class F> struct signature;
template <class R, class... A> struct signature<R(A...)> {{
  static constexpr int count = sizeof...(A) + 1;
  static void fill(kind *out) {{
    kind all[] = {{kind_of<R>(), kind_of<A>()...}};
    for (int i = 0; i < count; i++) out[i] = all[i];
  }}
}};
template <class R, class... A> struct signature<R(A...) noexcept> : signature<R(A...)> {{}};
static int differences, compared;
template <class Ours, class Theirs> void compare(const char *name) {{
  kind ours[24], theirs[24];
  compared++;
  if (signature<Ours>::count != signature<Theirs>::count) {{
    printf("%s: %d parameters, in the header %d\\n", name, signature<Ours>::count - 1,
           signature<Theirs>::count - 1);
    differences++;
    return;
  }}
  signature<Ours>::fill(ours);
  signature<Theirs>::fill(theirs);
  for (int i = 0; i < signature<Ours>::count; i++)
    if (ours[i].size != theirs[i].size) {{
      printf("%s: parameter %d has %d bytes, in the header %d\\n", name, i, ours[i].size,
             theirs[i].size);
      differences++;
    }}
}}
static void compare_number(const char *name, long ours, long theirs) {{
  compared++;
  if (ours == theirs) return;
  printf("%s is %ld, in the header %ld\\n", name, ours, theirs);
  differences++;
}}
int main() {{
{body}
  printf("%d compared, %d differences\\n", compared, differences);
  return differences != 0;
}}
"""

# Our names of numbers, and the headers'.
NUMBERS = {
    "cuda": {
        "CUDA_INTEGRATED": "CU_DEVICE_ATTRIBUTE_INTEGRATED",
        "CUDA_MAJOR": "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR",
        "CUDA_MINOR": "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR",
        "GPU_NO_BINARY": "CUDA_ERROR_NO_BINARY_FOR_GPU",
        "GPU_OUT_OF_MEMORY": "CUDA_ERROR_OUT_OF_MEMORY",
        "GPU_NO_DEVICE": "CUDA_ERROR_NO_DEVICE",
        "GPU_INVALID_DEVICE": "CUDA_ERROR_INVALID_DEVICE",
        "GPU_NOT_READY": "CUDA_ERROR_NOT_READY",
        "GPU_CAPTURE_RELAXED": "CU_STREAM_CAPTURE_MODE_RELAXED",
        "GPU_HOST_REGISTER_PORTABLE": "CU_MEMHOSTREGISTER_PORTABLE",
        "GPU_STREAM_NON_BLOCKING": "CU_STREAM_NON_BLOCKING",
        "GPU_EVENT_BLOCKING": "CU_EVENT_BLOCKING_SYNC",
        "GPU_EVENT_NO_TIMING": "CU_EVENT_DISABLE_TIMING",
    },
    "hip": {
        "HIP_INTEGRATED": "hipDeviceAttributeIntegrated",
        "HIP_MAJOR": "hipDeviceAttributeComputeCapabilityMajor",
        "HIP_MINOR": "hipDeviceAttributeComputeCapabilityMinor",
        "GPU_NO_BINARY": "hipErrorNoBinaryForGpu",
        "GPU_OUT_OF_MEMORY": "hipErrorOutOfMemory",
        "GPU_NO_DEVICE": "hipErrorNoDevice",
        "GPU_INVALID_DEVICE": "hipErrorInvalidDevice",
        "GPU_NOT_READY": "hipErrorNotReady",
        "GPU_CAPTURE_RELAXED": "hipStreamCaptureModeRelaxed",
        "GPU_HOST_REGISTER_PORTABLE": "hipHostRegisterPortable",
        "GPU_STREAM_NON_BLOCKING": "hipStreamNonBlocking",
        "GPU_EVENT_BLOCKING": "hipEventBlockingSync",
        "GPU_EVENT_NO_TIMING": "hipEventDisableTiming",
    },
}
INCLUDES = {
    "cuda": "#include <cuda.h>",
    "hip": "#define __HIP_PLATFORM_AMD__ 1\n#define __HIP_PLATFORM_HCC__ 1\n"
           "#include <hip/hip_runtime_api.h>\n"
           "#if __has_include(<hip/hiprtc.h>)\n#include <hip/hiprtc.h>\n#endif",
}
# The fields of fsti_hip_compiler, in their order.
COMPILER = ("hiprtcCreateProgram", "hiprtcCompileProgram", "hiprtcGetCodeSize", "hiprtcGetCode",
            "hiprtcDestroyProgram", "hiprtcGetProgramLogSize", "hiprtcGetProgramLog")


def declared(driver):
    """Yield name and parameters of each function of a driver that the library calls."""
    text = PRIVATE.read_text()
    table = text[text.index("#define FSTI_GPU_FUNCTIONS(X)"):text.index("typedef struct fsti_gpu")]
    rows = re.findall(r'X\(\w+,\s*(\([^()]*\)),\s*("\w+"|NULL),\s*("\w+"|NULL)\)',
                      table.replace("\\\n", " "))
    assert len(rows) == table.count("\n    X(")
    for parameters, cuda, hip in rows:
        name = (cuda if driver == "cuda" else hip).strip('"')
        if name != "NULL":
            yield name, parameters
    if driver == "hip":
        struct = text[text.index("typedef struct fsti_hip_compiler"):]
        fields = re.findall(r"int \(\*\w+\)(\([^()]*\));", struct[:struct.index("}")])
        assert len(fields) == len(COMPILER)
        yield from zip(COMPILER, fields, strict=True)


def number(name):
    """Return the value of one of the library's enumerators."""
    for path in (ROOT / "src/gpu").glob("*.[ch]"):
        found = re.search(rf"\b{name} = (\d+)", path.read_text())
        if found:
            return int(found[1])
    raise AssertionError(name)


def compare(driver, folders, target):
    """Compile and run the comparison; return its output and the names that the headers lack."""
    headers = "\n".join(path.read_text(errors="replace") for folder in folders
                        for name in ("cuda.h", "hip_runtime_api.h", "hiprtc.h")
                        for path in pathlib.Path(folder).rglob(name))
    body, missing = [], []
    for name, parameters in declared(driver):
        # cuda.h maps the plain names to those with a version.
        plain = name if driver == "hip" else re.sub(r"_v\d$", "", name)
        if not re.search(rf"\b{plain}\b", headers):
            missing.append(name)
            continue
        body.append(f'  compare<int{parameters}, std::remove_pointer_t<decltype(&{plain})>>'
                    f'("{name}");')
        if plain != name:
            body.append(f'#ifndef {plain}\n  printf("{plain} is not {name}\\n");'
                        f' differences++;\n#endif')
    for ours, theirs in NUMBERS[driver].items():
        body.append(f'  compare_number("{ours}", {number(ours)}, (long){theirs});')
    source = target / f"{driver}.cpp"
    source.write_text(PROGRAM.format(includes=INCLUDES[driver], body="\n".join(body)))
    build = ["g++", "-std=c++17", "-w", "-D__HIP_DISABLE_CPP_FUNCTIONS__",
             *[f"-I{folder}" for folder in folders], str(source), "-o", str(target / driver),
             "-Wl,--unresolved-symbols=ignore-all"]
    done = subprocess.run(build, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr[:3000]
    done = subprocess.run([target / driver], text=True, capture_output=True, timeout=60)
    return done.stdout, missing
