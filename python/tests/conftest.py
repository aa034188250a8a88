# SPDX-License-Identifier: Apache-2.0
"""Fixtures: models on disk and the built command."""

import ctypes
import functools
import os
import pathlib
import resource
import shutil
import signal
import struct
import sys
import tempfile

import pytest

# The user's settings for stores and for the package.
SETTINGS_OF_OTHERS = ("AWS_", "AZURE_", "CLOUDSDK_", "FASTSAFETENSORS_", "GCE_", "GOOGLE_",
                      "IDENTITY_", "STORAGE_")
for _name in [name for name in os.environ if name.startswith(SETTINGS_OF_OTHERS)]:
    if _name != "FASTSAFETENSORS_TESTS":
        del os.environ[_name]
# Tests keep no compiled kernels in the user's cache.
os.environ["FASTSAFETENSORS_KERNEL_CACHE_DIR"] = "off"
# No test requests credentials from the machine that it runs on, or uses a proxy for its own server.
os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
os.environ["NO_GCE_CHECK"] = "true"
_near = (os.environ.get("no_proxy"), os.environ.pop("NO_PROXY", None), "127.0.0.1,localhost,::1")
os.environ["no_proxy"] = ",".join(filter(None, _near))
# Some machines allow 256 open files unless the program raises the limit.
_limits = resource.getrlimit(resource.RLIMIT_NOFILE)
if _limits[0] < 4096:
    _most = 4096 if _limits[1] == resource.RLIM_INFINITY else min(4096, _limits[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (_most, _limits[1]))
# Tests that run in the background inherit an ignored SIGINT, and so would every program that they
# start.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = pathlib.Path(__file__).resolve().parents[2]
# After what is installed: a few of its packages are there in another version.
sys.path.append(str(ROOT / "build/receivers"))


# Skipped by `make test`, which should end within minutes. `make test ALL=1` runs them, and so does
# naming the file.
HEAVY = (
    "test_integrations.py", "test_examples.py", "test_crash.py", "test_fuzz_python.py",
    "test_install.py::test_wheel_and_sdist_in_empty_environments",
    "test_install.py::test_a_short_soak", "test_gpu_check.py", "test_checkpoint.py",
    "test_save.py::test_killed_at_random_moments", "test_ranks_two_hosts.py",
    "test_python_versions.py::test_the_wheel_under", "test_sign.py::test_both_ways",
    "test_typing.py", "test_engines.py", "test_gpu_software.py",
    "test_remote_servers.py::test_seaweedfs",
    "test_remote_servers.py::test_moto", "test_remote_servers.py::test_fake_gcs",
)


# The files that take longest start first, so that parallel workers end at about the same time.
SLOWEST = (
    "test_engines.py", "test_examples.py", "test_lists_during_saves.py", "test_gpu_check.py",
    "test_documents.py", "test_gpu_software.py", "test_async_save.py", "test_gpu_failures.py",
    "test_checkpoint_ranks.py", "test_python_versions.py", "test_async_ranks.py",
    "test_install.py", "test_rank_faults.py", "test_checkpoint.py", "test_rank_meetings.py",
    "test_compat_install.py", "test_sign.py", "test_checkpoint_rank_order.py",
)
# Tests that may run in parallel with others of their file.
APART = (
    "test_gpu_check.py", "test_api_surface.py::test_safetensors",
    "test_api_surface.py::test_fastsafe", "test_install.py::test_wheel_and_sdist",
    "test_install.py::test_a_short_soak",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give each worker whole files, and the tests that may run in parallel one by one."""
    from xdist.scheduler import LoadScopeScheduling

    class FilesAndApart(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return nodeid if any(name in nodeid for name in APART) else nodeid.partition("::")[0]

    return FilesAndApart(config, log)


def pytest_addoption(parser):
    """Add the option --all."""
    parser.addoption("--all", action="store_true", help="slow tests and heavy integrations, too")


def wants_all(config):
    """Whether heavy tests were requested by --all or by naming the file."""
    return config.getoption("--all") or config.args_source is pytest.Config.ArgsSource.ARGS


@pytest.fixture(scope="session")
def thorough():
    """Whether tests run all cases (`make test LONG=1`)."""
    return os.environ.get("FASTSAFETENSORS_TESTS") == "all"


def pytest_collection_modifyitems(config, items):
    """Run the slowest files first. Heavy tests are left out unless they were requested."""
    places = {name: place for place, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
    if wants_all(config):
        return
    for item in items:
        if any(f"/{name}" in f"/{item.nodeid}" for name in HEAVY):
            item.add_marker(pytest.mark.skip(reason="heavy: make test ALL=1"))


@functools.cache
def has_libcurl():
    """Whether URLs can be read here, which needs libcurl. The library loads it at the first use."""
    try:
        ctypes.CDLL("libcurl.so.4")
    except OSError:
        return False
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Without libcurl, a test that fails because URLs can't be read is skipped with that reason."""
    report = yield
    if report.failed and not has_libcurl() and "libcurl" in str(call.excinfo.value):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1] or 0, "Skipped: no libcurl")
    return report


@pytest.fixture(autouse=True, scope="session")
def _patience():
    """Allow test servers long response times, because the machine may be busy."""
    from fastsafetensors import remote

    usual = remote.configure

    @functools.wraps(usual)
    def configure(**settings):
        usual(**{"connect_ms": 25000, "first_byte_ms": 25000, "stall_ms": 60000, **settings})

    remote.configure = configure
    configure()
    yield
    remote.configure = usual


@pytest.fixture
def own_home(monkeypatch, tmp_path):
    """An empty home folder without the machine's credentials. Resets the settings of URLs
    afterwards."""
    from fastsafetensors import remote

    for name in [name for name in os.environ if name.startswith(("HF_", *SETTINGS_OF_OTHERS))]:
        if name != "AWS_EC2_METADATA_DISABLED":
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", os.fspath(tmp_path))
    yield tmp_path
    remote.configure()


def write_raw(path, header, data=b""):
    """Write a safetensors file from header text and data."""
    encoded = header if isinstance(header, bytes) else header.encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    return path


@pytest.fixture
def raw(tmp_path):
    """Return a function that writes a file from header text and data."""
    return lambda header, data=b"", name="m.safetensors": write_raw(tmp_path / name, header, data)


def _others_may_reach(path):
    return all(folder.stat().st_mode & 0o001 for folder in path.resolve().parents)


@pytest.fixture(scope="session")
def command():
    """Path of the built command, which other users may run too."""
    built = [path for path in (ROOT / "build/test/cli/fastsafetensors",
                               ROOT / "build/release/cli/fastsafetensors") if path.exists()]
    if not built:
        pytest.skip("the command is not built")
    if os.getuid() != 0 or _others_may_reach(built[0]):
        yield os.fspath(built[0])
        return
    # Tests that give up the rights of root need a copy where the checkout is in /root.
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        for name in ("cli", "src"):
            os.mkdir(os.path.join(folder, name))
            os.chmod(os.path.join(folder, name), 0o755)
        for library in (built[0].parents[1] / "src").glob("libfastsafetensors.so*"):
            if library.is_file():
                shutil.copy(library, os.path.join(folder, "src"))
        yield shutil.copy(built[0], os.path.join(folder, "cli"))


@pytest.fixture(scope="session")
def torch():
    """torch, where it is installed."""
    return pytest.importorskip("torch")


def zstd_or_skip():
    """Skip the module or test if libzstd is missing, which writing compressed files needs."""
    try:
        return ctypes.CDLL("libzstd.so.1")
    except OSError:
        pytest.skip("libzstd is not installed", allow_module_level=True)


def sample_tensors(torch):
    """One tensor of every dtype that torch can fill, with shapes of every kind."""
    generator = torch.Generator().manual_seed(0)

    def bits(dtype, *shape):
        size = torch.empty(0, dtype=dtype).element_size()
        data = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8,
                             generator=generator)
        return data.view(dtype)

    tensors = {
        f"t.{name}": bits(getattr(torch, name), 3, 8)
        for name in ("uint8", "int8", "int16", "uint16", "float16", "bfloat16", "int32", "uint32",
                     "float32", "complex64", "float64", "int64", "uint64", "float8_e5m2",
                     "float8_e4m3fn", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz")
        if hasattr(torch, name)
    }
    tensors["t.bool"] = torch.randint(0, 2, (5,), generator=generator).bool()
    tensors["scalar"] = torch.tensor(3.5)
    tensors["empty"] = torch.empty(0, 7)
    tensors["large"] = torch.randn(700, 1000, generator=generator)
    tensors["unicode é\u0000\n"] = torch.arange(6).reshape(2, 3)
    return tensors


@pytest.fixture(scope="session")
def model(tmp_path_factory, torch):
    """(path, tensors) of a file written by the safetensors package."""
    from safetensors.torch import save_file

    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    tensors = sample_tensors(torch)
    save_file(tensors, path, metadata={"format": "pt", "note": "a\"b\\c"})
    return path, tensors


@pytest.fixture(scope="session")
def sharded(tmp_path_factory, torch):
    """(folder, tensors) of a model of three shards with an index."""
    import json

    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("sharded")
    tensors = {f"layer.{i}.weight": torch.randn(64, 64) for i in range(9)}
    weight_map = {}
    for shard in range(3):
        name = f"model-0000{shard + 1}-of-00003.safetensors"
        part = {k: tensors[k] for k in list(tensors)[shard * 3 : shard * 3 + 3]}
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 9 * 64 * 64 * 4}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return folder, tensors


def same_bits(torch, a, b):
    """Equal dtype, shape and bytes (NaNs included)."""
    return (a.dtype == b.dtype and a.shape == b.shape
            and torch.equal(a.contiguous().view(-1).view(torch.uint8),
                            b.contiguous().view(-1).view(torch.uint8)))


@pytest.fixture
def files(sharded):
    """(sorted paths, tensors) of three files."""
    folder, tensors = sharded
    return sorted(str(p) for p in folder.glob("*.safetensors")), tensors


def check_pairs(torch, got, tensors):
    """Check that (name, tensor) pairs have every expected tensor once, with its values."""
    got = list(got)
    assert sorted(name for name, _ in got) == sorted(tensors)
    for name, tensor in got:
        assert same_bits(torch, tensor, tensors[name]), name


@pytest.fixture(scope="module")
def mesh(torch):
    """A mesh of one process."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if dist.is_initialized():
        pytest.skip("a group is there already")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def states():
    """Four successive states of a checkpoint, for tests of weight deltas."""
    from delta_folders import make_states

    return make_states(4)


@pytest.fixture
def local(tmp_path, states):
    """The folder of a checkpoint in the first of these states."""
    from delta_folders import write_checkpoint

    folder = tmp_path / "local"
    write_checkpoint(folder, states[0])
    return folder
