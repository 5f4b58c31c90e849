"""The check that device codecs must pass: the bytes that the CPU's kernels write, and the values that they read.

The device is the emulation, or, with HYBRIDCOMP_TEST_DEVICE=cuda, the GPU.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np
import numpy.typing as npt

import hybridcomp as hc
from hybridcomp import cuda
from hybridcomp.arrays import DType, as_dtype, flatten
from hybridcomp.codecs import Codec
from hybridcomp.device import Runtime
from tests.codecs import common
from tests.emulation.runtime import emulated

Array = npt.NDArray[Any]
ON_GPU = os.environ.get("HYBRIDCOMP_TEST_DEVICE") == "cuda"
# The emulation runs a thread after the other: large arrays are for the GPU.
SIZES = [0, 1, 2, 7, 8, 9, 127, 128, 129, 1000, 4097] + ([65535, 65536, 65537, 1 << 20] if ON_GPU else [])
VALUES = ("gaussian", "zeros", "tiny", "huge", "not finite", "sparse", "mixed")


@functools.cache
def runtime() -> Runtime:
    """Return the device under test."""
    return cuda.runtime_of(0) if ON_GPU else emulated()


def to_device(values: Array, dtype: DType | None = None, *, offset: int = 0) -> Any:
    """Return a device array with these values (the storage of ``dtype``), ``offset`` bytes off an aligned address."""
    if not ON_GPU:
        return emulated().array(values, dtype, offset=offset)
    import cupy

    kind = dtype or as_dtype(values.dtype)
    memory = cupy.empty(values.nbytes + offset, cupy.uint8)
    memory[offset:] = cupy.asarray(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
    if kind is DType.BFLOAT16:
        import torch

        if not values.size:  # an empty array's bytes have no stride that torch could view otherwise
            return torch.empty(values.shape, dtype=torch.bfloat16, device="cuda")
        return torch.from_dlpack(memory)[offset:].view(torch.bfloat16).view(values.shape)
    return memory[offset:].view(kind.storage).reshape(values.shape)


def to_host(x: Any) -> Array:
    """Return the storage of a device array in host memory."""
    if hasattr(x, "get"):
        got: Array = x.get()
        return got
    return flatten(x.cpu()).data


def values(kind: str, n: int, dtype: str, seed: int = 0) -> Array:
    """Return test data by name, as the dtype's storage."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(n)
    if kind == "zeros":
        x[:] = 0
        x[::3] = -0.0
    elif kind == "tiny":
        x *= {"float32": 1e-38, "bfloat16": 1e-38, "float16": 1e-5, "float64": 1e-305}[dtype]
    elif kind == "huge":
        x *= {"float32": 1e38, "bfloat16": 1e38, "float16": 1e4, "float64": 1e307}[dtype]
    elif kind == "sparse":
        x[rng.random(n) < 0.95] = 0
    elif kind == "mixed":
        x *= 10.0 ** rng.integers(-6, 3, n)
    with np.errstate(over="ignore"):
        if dtype == "bfloat16":
            import torch

            data = torch.from_numpy(x).to(torch.bfloat16)
        else:
            data = x.astype(dtype)
    storage = np.array(flatten(data).data)
    if kind == "not finite" and n:
        bad = {"float32": (0x7FC00000, 0x7F800000), "float16": (0x7E00, 0xFC00), "bfloat16": (0x7FC0, 0xFF80)}
        pair = bad.get(dtype, (0x7FF8000000000000, 0xFFF0000000000000))
        words = storage.view({2: np.uint16, 4: np.uint32, 8: np.uint64}[storage.itemsize])
        words[n // 3], words[-1] = pair
    return storage


def host_array(storage: Array, dtype: str) -> Any:
    """Return the storage as the CPU's codecs take it: a torch tensor for bfloat16."""
    if dtype != "bfloat16":
        return storage
    import torch

    return torch.from_numpy(storage.view(np.int16)).view(torch.bfloat16)


def assert_same(got: Array, want: Array, what: str) -> None:
    """Assert the same bits; any NaN stands for a NaN, since processors differ in the NaN that they make."""
    if got.tobytes() == want.tobytes():
        return
    nan = np.isnan(got) & np.isnan(want) if got.dtype.kind == "f" else np.zeros(got.shape, bool)
    bits = {2: np.uint16, 4: np.uint32, 8: np.uint64, 1: np.uint8}[got.itemsize]
    wrong = np.flatnonzero((got.view(bits) != want.view(bits)) & ~nan)
    assert not wrong.size, (
        f"{what}: {wrong.size} of {got.size} differ, first at {wrong[0]}: {got[wrong[0]]!r} for {want[wrong[0]]!r}"
    )


def check(codec: Codec, storage: Array, dtype: str, *, outputs: bool = True) -> None:
    """Check that the device writes the CPU's message, and reads it as the CPU does, to every type and added."""
    kind = as_dtype(dtype)
    want = np.array(flatten(codec.encode(host_array(storage, dtype))).data)
    x = to_device(storage, kind)
    assert_same(to_host(codec.encode(x)), want, f"{codec.spec}: message of {storage.size} {dtype}")
    msg = to_device(want)
    for out_kind in (d for d in DType if d.is_float) if outputs else (kind,):
        expected = np.zeros(storage.size, out_kind.storage)
        hc.decode(want, out=host_array(expected, out_kind.label))
        out = to_device(np.full(storage.size, 7, out_kind.storage), out_kind)
        hc.decode(msg, out=out)
        floats = expected.dtype.kind == "f"
        if floats or storage.size == 0 or kind is out_kind:
            assert_same(to_host(out), expected, f"{codec.spec}: {storage.size} {dtype} into {out_kind.label}")
        else:  # bfloat16's bits: compare as numbers
            as_float = [(a.astype(np.uint32) << 16).view(np.float32) for a in (to_host(out), expected)]
            assert_same(
                as_float[0], as_float[1], f"{codec.spec}: {storage.size} {dtype} into {out_kind.label}"
            )
    acc = common.with_specials(common.accumulator(kind, storage.size))
    total = to_device(acc)
    with np.errstate(all="ignore"):
        hc.decode_add(want, acc)
    hc.decode_add(msg, total)
    what = f"{codec.spec}: {storage.size} {dtype} added"
    assert_same(to_host(total), acc, what)
    assert to_host(total).tobytes() == acc.tobytes(), f"{what}: a NaN of a sum has the same bits everywhere"


# Codecs whose bytes on a device may be others than the CPU's: another zstd, matrix products in another order.
OWN_BYTES = ("lossless", "powersgd")


def check_reads(codec: Codec, storage: Array, dtype: str, tolerance: float = 1e-4) -> None:
    """Check that either side reads what the other writes: exactly if the codec is, else nearly to the same values."""
    kind = as_dtype(dtype)
    written = [
        np.array(flatten(codec.encode(host_array(storage, dtype))).data),
        to_host(codec.encode(to_device(storage, kind))),
    ]
    read = []
    for message in written:
        on_cpu = np.zeros(storage.size, storage.dtype)
        hc.decode(message, out=host_array(on_cpu, dtype))
        on_device = to_device(np.full(storage.size, 7, storage.dtype), kind)
        hc.decode(to_device(message), out=on_device)
        read += [on_cpu, to_host(on_device)]
    for values in read:
        if codec.lossless:
            assert values.tobytes() == storage.tobytes(), (
                f"{codec.spec}: {storage.size} {dtype} came back otherwise"
            )
        else:
            first, other = (common.wide(host_array(v, dtype)) for v in (read[0], values))
            far = np.abs(first - other).max(initial=0.0)
            assert far <= tolerance * np.abs(first).max(initial=0.0), (
                f"{codec.spec}: {storage.size} {dtype}: {far}"
            )


def check_unaligned(codec: Codec, n: int) -> None:
    """Check messages and arrays at any address; room beyond a message must stay as it was."""
    x = values("gaussian", n, "float32")
    want = np.array(codec.encode(x))
    for offset in (4, 8, 12):
        room = codec.bound(n) + 32
        buffer = to_device(np.full(room, 0xA5, np.uint8), offset=offset + 1)
        got = codec.encode(to_device(x, offset=offset), out=buffer)
        assert_same(to_host(got), want, f"{codec.spec}: unaligned message")
        assert np.all(to_host(buffer)[codec.bound(n) :] == 0xA5), "encode wrote past its bound"
        out = to_device(np.zeros(n, np.float32), offset=offset)
        hc.decode(to_device(want, offset=offset - 1), out=out)
        expected = np.zeros(n, np.float32)
        hc.decode(want, out=expected)
        assert_same(to_host(out), expected, f"{codec.spec}: unaligned values")


def check_hostile(codec: Codec, storage: Array, dtype: str, flips: int = 150) -> None:
    """Check that damage is a WireError; a forged message with a good CRC is one too, or decodes within its buffer."""
    want = np.array(flatten(codec.encode(host_array(storage, dtype))).data)
    rng = np.random.default_rng(5)
    out = to_device(np.zeros(storage.size, storage.dtype), as_dtype(dtype))
    for length in (0, 1, 31, 32, want.size - 1):
        if length < want.size:
            _expect_wire_error(want[:length].copy(), out)
    spread = rng.integers(32 * 8, max(want.size, 33) * 8, flips) if want.size > 32 else []
    for bit in [*range(0, 32 * 8, 5), *range(32 * 8, min(want.size, 56) * 8, 3), *spread]:
        bad = want.copy()
        bad[bit // 8] ^= 1 << (bit % 8)
        _expect_wire_error(bad.copy(), out)
        forged = common.reseal(bad)
        verdicts = [
            _verdict(forged, np.zeros(storage.size, np.float32)),
            _verdict(to_device(forged), to_device(np.zeros(storage.size, np.float32))),
        ]
        assert verdicts[0] == verdicts[1] or "CudaUnavailableError" in verdicts, (
            f"{codec.spec}: bit {bit}: the CPU says {verdicts[0]}, the device {verdicts[1]}"
        )


def _verdict(msg: Any, out: Any) -> str:
    try:
        hc.decode(msg, out=out)
    except hc.WireError:
        return "WireError"
    except (hc.CodecMismatchError, hc.CudaUnavailableError, ValueError) as error:
        return type(error).__name__
    return "decoded"


def _expect_wire_error(msg: Array, out: Any) -> None:
    try:
        hc.decode(to_device(msg), out=out)
    except hc.WireError:
        return
    raise AssertionError("a damaged message was decoded")
