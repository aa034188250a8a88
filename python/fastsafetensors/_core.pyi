from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from ._base.argument_types import Path, Paths

T = TypeVar("T")

version: str
DTYPES: tuple[str, ...]


class SafetensorError(Exception):
    tag: str
    file: str
    tensor: str
    byte_offset: int | None

class Tensor:
    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def data_ptr(self) -> int: ...
    @property
    def writable(self) -> bool: ...
    @property
    def device(self) -> str: ...
    def copy_to(self, address: int, size: int, /) -> None: ...
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...
    @property
    def __array_interface__(self) -> dict[str, Any]: ...
    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
        as_bytes: bool = False,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

class Loader:
    def __iter__(self) -> Iterator[Tensor]: ...
    def __next__(self) -> Tensor: ...
    def __len__(self) -> int: ...
    def wait(
        self, progress: Callable[[int, int, int, int], object] | None = None, /
    ) -> None: ...
    def item(self, index: int, /) -> Tensor: ...
    def make(
        self,
        index: int,
        importer: Callable[[Any], T],
        fallback: Callable[[Tensor], T],
        mask: int,
        /,
    ) -> T: ...
    def export(
        self, importer: Callable[[Any], T], fallback: Callable[[Tensor], T], mask: int, /
    ) -> dict[str, T]: ...
    def stats(self) -> dict[str, Any]: ...
    def cancel(self) -> None: ...
    def close(self) -> None: ...
    def abandon(self) -> None: ...

class Model:
    def __init__(
        self,
        paths: Paths,
        lenient: bool = False,
        verify: bool | Path | tuple[Path | None, Path, Path] | None = None,
        parts: bool = False,
    ) -> None: ...
    def verification(self) -> dict[str, Any] | None: ...
    def __len__(self) -> int: ...
    @property
    def file_count(self) -> int: ...
    @property
    def is_compressed(self) -> bool: ...
    def names(self) -> list[str]: ...
    def find(self, name: str, /) -> int: ...
    def nbytes(self, index: int, /) -> int: ...
    def info(self, index: int, /) -> tuple[str, tuple[int, ...], int, int, int]: ...
    def copy_slice(
        self, index: int, key: Any, /
    ) -> tuple[bytearray, tuple[int, ...]] | None: ...
    def cached_view(self, index: int, begin: int, end: int, /) -> Tensor | None: ...
    def check(self) -> None: ...
    def metadata(self, index: int, /) -> dict[str, str] | None: ...
    def file(self, index: int, /) -> tuple[str, int, int, int, int]: ...
    def load(
        self,
        items: Sequence[str | tuple[str, Sequence[int], Sequence[int]] | tuple[str, int, int]]
        | None = None,
        *,
        mode: str = "auto",
        engine: str = "auto",
        threads: int = 0,
        order: str = "file",
        budget: int = 0,
        read_only: bool = False,
        populate: bool = False,
        dtype: str | None = None,
        ring: str = "auto",
        numa: str = "default",
        device: str = "cpu",
        gds: str = "auto",
        unified: str = "auto",
        stream: int = 0,
        allocator: Callable[[int], Any] | None = None,
        cache: str = "auto",
        share: str = "off",
        share_grace: int = 0,
    ) -> Loader: ...
    def close(self) -> None: ...

# A tensor to save: (name, dtype, shape, address, bytes). Address None: written with Writer.write().
# The address may be a device's, which is then given.
SaveRow = (
    tuple[str, str, Sequence[int], int | None, int]
    | tuple[str, str, Sequence[int], int | None, int, str]
)

class Writer:
    def __init__(
        self,
        path: Path | None,
        tensors: list[SaveRow],
        metadata: dict[str, str] | None = None,
        *,
        promise: str = "quick",
        order: str = "reference",
        engine: str = "auto",
        alignment: int = 0,
        header_alignment: int = 0,
        metadata_last: bool = False,
        file_of: Sequence[int] | None = None,
        file_count: int = 0,
        stem: str | None = None,
        threads: int = 0,
        progress: Callable[[int, int, int, int], object] | None = None,
        owners: object = None,
        joins: bool = False,
        others_write: bool = False,
        replace_link: bool = False,
        compress: str = "none",
        manifest: bytes | None = None,
        digest: str = "xxh3-128",
    ) -> None: ...
    def write(self, index: int, offset: int, address: int, size: int, /) -> None: ...
    def map(self, index: int, /) -> int: ...
    def finish(self) -> None: ...
    def commit(self) -> None: ...
    def hand_over(self) -> list[str]: ...
    def close(self) -> None: ...
    def paths(self) -> list[str]: ...
    def stats(self) -> dict[str, Any]: ...

class StagingPool:
    def __init__(self, limit: int = 0, ready: int = 0) -> None: ...
    def close(self) -> None: ...
    def nbytes(self) -> int: ...

# stage, overlap, threads, nice, memory, pool, is_unchanged, publish.
AsyncSettings = tuple[
    str, str, int, int, int, StagingPool | None, Callable[[], object] | None,
    Callable[[list[str] | None, Exception | None], str | None] | None
]

class AsyncSave:
    def __init__(self) -> None: ...
    def start(
        self,
        settings: AsyncSettings,
        path: Path,
        tensors: list[SaveRow],
        metadata: dict[str, str] | None = None,
        **options: Any,
    ) -> None: ...
    def is_started(self) -> bool: ...
    def stage(self, timeout_ms: int, /) -> bool | Exception: ...
    def wait(self, timeout_ms: int, /) -> bool | Exception: ...
    def cancel(self) -> None: ...
    def close(self) -> None: ...
    def stats(self) -> dict[str, Any]: ...
    def writer_stats(self) -> dict[str, Any]: ...

def serialize(
    path: None,
    tensors: list[SaveRow],
    metadata: dict[str, str] | None = None,
    *,
    order: str = "reference",
    alignment: int = 0,
    header_alignment: int = 0,
    metadata_last: bool = False,
) -> bytes: ...
def layout(
    path: None,
    tensors: list[SaveRow],
    metadata: dict[str, str] | None = None,
    *,
    order: str = "reference",
    alignment: int = 0,
    header_alignment: int = 0,
    metadata_last: bool = False,
) -> tuple[bytes, list[int], int, int]: ...
def assign_shards(
    sizes: Sequence[int], groups: Sequence[int] | None, limit: int, /
) -> tuple[list[int], int]: ...
def publish_set(
    folder: Path, hidden: list[str], stem: str, durable: bool, names_only: bool,
    manifest: bytes | None, digest: str, /
) -> None: ...
def edit_header(
    path: Path,
    target: Path | None,
    metadata: dict[str, str | None],
    renames: dict[str, str],
    clear: bool,
    durable: bool,
    manifest: bytes | None,
    digest: str,
    /,
) -> None: ...
def dlpack_at(
    address: int,
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: str,
    device: tuple[int, int],
    owner: object,
    /,
) -> Any: ...
def error_class() -> type[SafetensorError]: ...
def dlpack_probe(dtype: str, /) -> Any: ...
def device_count(kind: str, /) -> int: ...
def device_info(name: str, /) -> dict[str, Any]: ...
def pinned_bytes() -> int: ...
def live_buffers() -> tuple[int, int]: ...
def size_of_text(text: object, /) -> int | None: ...
def keep_memory(size_bytes: int, /) -> None: ...
def trim() -> int: ...
def log_start(emit: Callable[[int, str], object], level: int, /) -> None: ...
def log_stop() -> None: ...
def log_drain() -> None: ...
def check_save(models: Sequence[Model], /) -> None: ...
def cache_objects(cache_dir: Path | None, /) -> list[dict[str, Any]]: ...
def cache_prune(bytes_max: int, cache_dir: Path | None, /) -> dict[str, int]: ...
def configure_remote(
    *,
    endpoint: str | None = None,
    region: str | None = None,
    access_key: str | None = None,
    secret_key: str | None = None,
    session_token: str | None = None,
    bearer_token: str | None = None,
    sas_token: str | None = None,
    account: str | None = None,
    ca_file: str | None = None,
    anonymous: bool = False,
    bucket_style: str = "auto",
    connect_ms: int = 0,
    first_byte_ms: int = 0,
    stall_ms: int = 0,
    retry_base_ms: int = 0,
    retry_cap_ms: int = 0,
    tries_max: int = 0,
    connections_max: int = 0,
    cache_dir: Path | None = None,
    cache_bytes_max: int = 0,
    cache_required: bool = False,
    offline: bool = False,
    private_redirects: bool = False,
) -> None: ...
def engines(path: Path | None, /) -> list[tuple[str, bool, bool, str]]: ...

# Capsules of an opened delta and of a prepared change.
Delta = Any
Change = Any

def delta_open(folders: tuple[bytes, ...], /) -> Delta: ...
def delta_info(delta: Delta, /) -> dict[str, Any]: ...
def delta_tensors(delta: Delta, /) -> list[tuple[str, int, int]]: ...
def delta_apply(
    delta: Delta | None, checkpoint: bytes, flags: int, threads: int, version: str | None, /
) -> dict[str, Any]: ...
def delta_version(checkpoint: bytes, /) -> tuple[str, bool]: ...
def delta_prepare(
    delta: Delta, tensors: list[tuple[str, int, int]], threads: int, version: str | None, /
) -> Change: ...
def delta_commit(change: Change, is_wanted: bool, /) -> None: ...
def delta_patch(
    delta: Delta, index: int, address: int, nbytes: int, element: int, index_bytes: int,
    dense: bool, /
) -> tuple[bytearray | None, bytearray]: ...
def delta_make(
    old: bytes, folder: bytes, new: bytes | list[tuple[str, int, int]] | Delta, version: str,
    base: str, encoding: str, checksum: str, dialect: str, level: int, threads: int,
    durable: bool, /
) -> dict[str, Any]: ...
