"""Measure codecs and memory on this rank; ``hybridcomp doctor --calibrate`` does so on all ranks at once."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from hybridcomp.codecs import Codec
from hybridcomp.perfmodel.profile import Speed

# Each spec stands for its kin, too: parameters change little, except those with an entry of their own.
SPECS = (
    "none",
    "lossless",
    "mpc",
    "exponent",
    "fp16",
    "bf16",
    "int8",
    "int8:rounding=stochastic",
    "int4",
    "int4:rounding=stochastic",
    "int4:hadamard=true",
    "int2",
    "sign",
    "fp8",
    "mxfp8",
    "mxfp4",
    "zfp:rate=8",
    "bounded:abs=1e-3",
    "topk:ratio=0.01",
    "topk:ratio=0.001",
    "threshold",
    "sidco:ratio=0.01",
)
_ELEMENTS = 1 << 20  # 4 MiB
_FEW = 64
_LEAST = 3  # repetitions


def measure(call: Callable[[], object], seconds: float) -> float:
    """Return the mean seconds of a core for ``call``: as many as fit into ``seconds``, at least three, after one more.

    The mean, not the median: ranks that share a core take turns of milliseconds, which short calls seldom see. Seconds
    of a core, not of the clock: the simulator models how ranks share cores.
    """
    call()
    count = 0
    begin, busy = time.perf_counter(), time.thread_time()
    while count < _LEAST or time.perf_counter() - begin < seconds:
        call()
        count += 1
    return (time.thread_time() - busy) / count


def memory_speed(seconds: float) -> float:
    """Return the bytes/s of a copy in memory."""
    source = np.ones(_ELEMENTS * 4, np.float32)  # 16 MiB: does not fit a core's own caches
    target = np.empty_like(source)
    return source.nbytes / measure(lambda: np.copyto(target, source), seconds)


def codec_speed(codec: Codec, seconds: float) -> Speed:
    """Measure a codec on 4 MiB of Gaussian fp32 values, for about ``seconds``."""
    x = np.random.default_rng(1).standard_normal(_ELEMENTS, np.float32)
    share = seconds / 4
    message = np.empty(codec.bound(x.size), np.uint8)
    encode = measure(lambda: codec.encode(x, message), share)
    made = codec.encode(x, message)
    out, total = np.empty_like(x), np.zeros_like(x)
    decode = measure(lambda: codec.decode(made, out), share)
    add = measure(lambda: codec.decode_add(made, total), share)
    overhead = measure(lambda: codec.encode(x[:_FEW], message), share)
    return Speed(x.nbytes / encode, x.nbytes / decode, x.nbytes / add, overhead, made.size / x.nbytes)
