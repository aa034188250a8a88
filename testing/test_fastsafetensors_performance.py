# SPDX-License-Identifier: Apache-2.0
"""Load one file with safetensors and with fastsafetensors, from storage, and compare.

    sudo python testing/test_fastsafetensors_performance.py FILE [--device cpu|cuda:0]

Before each test the system's caches are dropped, which needs root; without it the file's own pages
are evicted, and the report says so. The time runs from the call to tensors of which every page
has been read, on the device: a mapping that nobody has touched has loaded nothing. See README.md.
"""

import argparse
import gc
import os
import pathlib
import sys
import time

RULE = "=" * 80
MIB = 1 << 20
# Runs closer than this are not told apart.
NOISE = 0.05
SCRIPT = "testing/test_fastsafetensors_performance.py"


def title(text):
    """A title between two rules."""
    print(f"\n{RULE}\n{text}\n{RULE}")


def clear_cache(path):
    """Drop page, dentry and inode caches; without root only the pages of the file."""
    print("\nClearing system file cache...")
    os.sync()
    try:
        pathlib.Path("/proc/sys/vm/drop_caches").write_text("3\n")
        print("✓ File cache cleared successfully")
    except PermissionError:
        print("✗ Permission denied. This script requires sudo privileges.")
        print(f"  Run: sudo python {SCRIPT} <file>")
        evict(path)
    except OSError as error:
        print(f"✗ The caches can't be dropped here: {error.strerror}.")
        evict(path)
    time.sleep(1)


def evict(path):
    """Ask the system to forget the pages of one file."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    print("  Continuing: the pages of this file are evicted; directory and inode caches stay warm.")


def release(torch, device):
    """Give back what the last test held."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def touch(torch, tensors, device):
    """Read every page of every tensor, and wait for the device."""
    for tensor in tensors.values():
        if tensor.numel():
            flat = tensor.contiguous().view(-1).view(torch.uint8)
            flat[::4096].max()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def run(torch, load, device):
    """Time a load; return (seconds, tensors)."""
    print("\nStarting load...")
    start = time.perf_counter()
    tensors = load()
    touch(torch, tensors, device)
    seconds = time.perf_counter() - start
    print("✓ Load completed successfully")
    print(f"  Time: {seconds:.3f}s")
    print(f"  Tensors: {len(tensors)}")
    print(f"  Total elements: {sum(tensor.numel() for tensor in tensors.values()):,}")
    return seconds


def test_standard(torch, path, device):
    """TEST 1."""
    from safetensors.torch import load_file

    clear_cache(path)
    title("TEST 1: Standard safetensors loading")
    way = "disk->cpu->gpu" if device.type == "cuda" else "disk->cpu"
    print(f"Method: {way} (standard safetensors)")
    print(f"Device: {device}")
    return run(torch, lambda: load_file(path, device=str(device)), device)


def planned_engine(path):
    """What a load of this file from storage is going to use."""
    from fastsafetensors._core import engines

    return next((name for name, usable, chosen, _ in engines(path) if usable and chosen), "?")


def way_of(engine, stats, device):
    """The path of a load, in words."""
    if device.type != "cuda":
        return f"disk->cpu ({engine})"
    if stats.get("gds_bytes"):
        return "disk->gpu (GPUDirect Storage)"
    return f"disk->cpu->gpu ({engine}, then a copy to the device)"


def test_fast(torch, path, device):
    """TEST 2."""
    from fastsafetensors import SafeTensorsFileLoader

    clear_cache(path)
    title("TEST 2: fastsafetensors with GPUDirect loading")
    loader = SafeTensorsFileLoader(path)

    def load():
        tensors = loader.load()
        if device.type == "cuda":
            tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        return tensors

    planned = way_of(planned_engine(path), {}, device)
    print(f"Method: {planned}")
    print(f"Device: {device}")
    seconds = run(torch, load, device)
    ran = way_of(loader.stats["engine"], loader.stats, device)
    if ran != planned:
        print(f"  Method that ran: {ran}")
    loader.close()
    return seconds


def verdict(standard, fast):
    """Print the last part of the report; only what is no slower is ticked."""
    ratio = standard / fast
    print(f"\nSpeedup: {ratio:.2f}x {'faster' if ratio >= 1 else 'of the speed'}")
    saved = standard - fast
    if saved >= 0:
        print(f"Time saved: {saved:.3f}s ({100 * saved / standard:.1f}% improvement)")
    else:
        print(f"Time lost: {-saved:.3f}s ({-100 * saved / standard:.1f}% slower)")
    if abs(saved) <= NOISE * standard:
        print("✓ fastsafetensors is SIMILAR")
    else:
        print("✓ fastsafetensors is FASTER" if saved > 0 else "✗ fastsafetensors is SLOWER")


def summary(path, device, standard, fast):
    """Print the comparison."""
    size = os.path.getsize(path) / MIB
    title("PERFORMANCE COMPARISON SUMMARY")
    print(f"File: {path.name}")
    print(f"Size: {size:.2f} MB ({size / 1024:.3f} GB)")
    print(f"Device: {device}")
    if device.type != "cuda":
        print("The table's names are fixed: on a CPU nothing goes by GPUDirect; the Method lines "
              "above say which way ran.")
    print(f"\n{'Method':<35} {'Time (s)':<15} {'Speed (MB/s)':<15}\n{'-' * 70}")
    rows = [("Standard safetensors", standard), ("fastsafetensors + GPUDirect", fast)]
    for name, seconds in rows:
        if seconds is not None:
            print(f"{name:<35} {seconds:<15.3f} {size / seconds:<15.2f}")
    if fast is not None:
        verdict(standard, fast)


def configuration(torch, path, device):
    """Print what is tested."""
    size = os.path.getsize(path) / MIB
    title("FASTSAFETENSORS PERFORMANCE TEST")
    print("\nTest Configuration:")
    print(f"  File: {path.name}")
    print(f"  Path: {path}")
    print(f"  Size: {size:.2f} MB ({size / 1024:.3f} GB)")
    print(f"  Device: {device}")
    print(f"  PyTorch: {torch.__version__}")
    print(f"  CUDA: {torch.version.cuda if torch.cuda.is_available() else 'not available'}")
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
    print(f"  GPU: {gpu}")


def is_available():
    """Tell whether fastsafetensors can be imported; say what to do if not."""
    try:
        import fastsafetensors  # noqa: F401
    except ImportError:
        print("\n⚠ Warning: fastsafetensors not available")
        print("  Install with: pip install fastsafetensors")
        return False
    return True


def check_file(path):
    """Return what is wrong with a file, or None."""
    if not path.is_file():
        return f"no such file: {path}"
    try:
        from fastsafetensors._core import Model
    except ImportError:
        return None
    try:
        Model(path).close()
    except Exception as error:
        return f"{getattr(error, 'tag', '') or type(error).__name__}: {error}"
    return None


def main():
    """Command line: exit code 0; 1 when a test failed; 2 for a file that is none, or no device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--device", help="cpu or cuda:0; default: cuda if present")
    arguments = parser.parse_args()
    import torch

    path = arguments.file
    fault = check_file(path)
    if fault is not None:
        print(f"✗ {fault}")
        return 2
    try:
        chosen = arguments.device or ("cuda:0" if torch.cuda.is_available() else "cpu")
        device = torch.device(chosen)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        print(f"✗ device {arguments.device} can't be used: {str(error).splitlines()[0]}")
        return 2
    configuration(torch, path, device)
    try:
        standard = test_standard(torch, path, device)
        release(torch, device)
        fast = test_fast(torch, path, device) if is_available() else None
        release(torch, device)
    except Exception as error:
        print(f"✗ Load failed: {type(error).__name__}: {error}")
        return 1
    summary(path, device, standard, fast)
    print("\n✓ All tests completed successfully")
    return 0


if __name__ == "__main__":
    sys.exit(main())
