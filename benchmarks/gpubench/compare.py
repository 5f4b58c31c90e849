"""One row for each codec, size and operation: checked against the CPU, timed against a copy on the device."""

from __future__ import annotations

import argparse
import importlib.metadata
from collections.abc import Callable
from typing import Any

import numpy as np
from codecbench import data
from codecbench.measure import CheckFailed

import hybridcomp as hc
from hybridcomp import cuda
from hybridcomp.arrays import DType, Flat
from hybridcomp.codecs import Codec
from hybridcomp.codecs import device as codecs
from hybridcomp.device import DeviceArray, Queue, Runtime

from .clock import Clock, CudaClock, HostClock, copies, copying
from .peers import nvcomp_peers, torch_peers

LARGEST = "1 GiB"
SIZES = {"64 MiB": 1 << 24, LARGEST: 1 << 28}
QUICK_SIZES = {"64 KiB": 1 << 14}
CACHE_BYTES = 512 << 20  # several times the largest cache
OPERATIONS = ("encode", "decode", "decode_add")
# Codecs whose bytes on a device may differ from the CPU's: products of matrices, another zstd.
OWN_BYTES = ("powersgd", "lossless")
# Least speeds asked for, as parts of a copy's of as many bytes; TIMES_TORCH is the least ratio to torch's speed.
ASKED = {
    **{
        (spec, op): 0.8
        for spec in ("int8", "int4", "sign", "fp8:e4m3", "fp8:e5m2")
        for op in ("encode", "decode_add")
    },
    **{(spec, "encode"): 0.5 for spec in ("threshold:abs=2.5758", "threshold:rel=3.0")},
    ("topk:ratio=0.01", "encode"): 0.25,
}
TIMES_TORCH = 5.0
# Codecs measured at the larger size, too: those for which a speed is asked, and a plain one of each other kind. A check
# at that size takes five seconds on the host.
LARGE = {*(spec for spec, _ in ASKED), "none", "bf16", "mpc", "exponent", "bounded:abs=1e-3", "zfp:rate=8"}

Row = dict[str, Any]
Say = Callable[[str], None]


def compare(args: argparse.Namespace, say: Say, keep: Callable[[Row], None]) -> Row:
    """Measure all codecs at all sizes, torch and nvCOMP beside them.

    Args:
        args: arguments of the program.
        say: function that prints a line.
        keep: function that is given all results so far after each size: the machine may be taken back before the last.
    """
    runtime, clock = _device(args.device)
    sizes = QUICK_SIZES if args.quick else SIZES
    rows: list[Row] = []
    peers: list[Row] = []
    copy = {}
    found: Row = {}
    for size, n in sizes.items():
        values = data.gaussian(n).values
        summand = np.linspace(-1, 1, n, dtype=np.float32)
        source = _upload(clock.queue, values)
        copy[size] = _copy_rate(clock, source, args.quick)
        say(f"# {size}: a copy on the device moves {copy[size] / 1e9:.0f} GB/s, reading and writing")
        say(HEADER)
        entries = [e for e in args.entries if size != LARGEST or e.spec in LARGE or args.codec is not None]
        for entry in entries:
            row: Row = {"name": entry.spec, "size": size, "elements": n}
            try:
                row |= _row(entry.codec(), values, summand, source, clock, args.quick)
            except CheckFailed as failure:
                row["failed"] = str(failure)
            rows.append(row)
            say(line(row))
        if args.device == "cuda" and not args.no_peers:
            peers += _peers(size, n, values, say)
        found = {
            "device": {"name": runtime.name, "multiprocessors": runtime.multiprocessors, **_versions()},
            "copy_gb_s": {size: rate / 1e9 for size, rate in copy.items()},
            "rows": rows,
            "peers": peers,
            "asked": judge(rows, peers),
        }
        keep(found)
    for one in found["asked"]:
        say(
            f"# {one['name']:24} {one['size']:>8} {one['operation']:>10}: {one['measured']:.2f} of "
            f"{one['asked']:g} {one['of']}: {'met' if one['met'] else 'NOT MET'}"
        )
    return found


def _device(name: str) -> tuple[Runtime, Clock]:
    if name == "cuda":
        runtime: Runtime = cuda.runtime_of(0)
        return runtime, CudaClock(runtime)
    from tests.emulation.runtime import emulated  # noqa: PLC0415  (tests only)

    return emulated(), HostClock(emulated())


def _versions() -> dict[str, str]:
    found = {}
    for package in ("cupy-cuda13x", "cupy-cuda12x", "torch", "nvidia-nvcomp-cu13", "nvidia-nvcomp-cu12"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _upload(queue: Queue, values: np.ndarray[Any, Any]) -> DeviceArray:
    array = queue.array(values.size, values.dtype)
    queue.write(array, values)
    return array


def _copies(queue: Queue, source: DeviceArray, quick: bool) -> list[DeviceArray]:
    """Return ``source`` and so many copies of it that none is in the cache when its turn comes again."""
    made = [source]
    for _ in range(copies(source.nbytes, 1 if quick else CACHE_BYTES) - 1):
        made.append(queue.array(source.size, source.dtype))
        queue.copy(made[-1], source)
    return made


def _copy_rate(clock: Clock, source: DeviceArray, quick: bool) -> float:
    """Return the bytes a second of a copy, counting those read and those written."""
    sources = _copies(clock.queue, source, quick)
    steps = copying([(clock.queue.array(s.size, s.dtype), s) for s in sources])
    return 2 * source.nbytes / clock.measure(steps, steps, 3 if quick else 20)[0]


# -- one codec -------------------------------------------------------------------------------------------------


def _row(
    codec: Codec,
    values: np.ndarray[Any, Any],
    summand: np.ndarray[Any, Any],
    source: DeviceArray,
    clock: Clock,
    quick: bool,
) -> Row:
    """Check and time a codec.

    Raises:
        CheckFailed: the device's bytes or values are not the CPU's.
    """
    queue, n = clock.queue, values.size
    xs = _copies(queue, source, quick)
    outs = [queue.empty(codec.bound(n)) for _ in xs]
    flats = [Flat(x, DType.FLOAT32, (n,), True, False) for x in xs]
    encoded = codecs.encode_into(codec, flats[0], outs[0], queue)
    nbytes = encoded.nbytes(queue)
    message = queue.read(outs[0][:nbytes])
    decoded = _check(codec, values, summand, message, outs[0][:nbytes], queue)
    for flat, out in zip(flats[1:], outs[1:], strict=True):
        codecs.encode_into(codec, flat, out, queue)
    messages = [out[:nbytes] for out in outs]
    header, head = codecs.read_opened(queue, messages[0], codecs.open_message(queue, messages[0]))
    targets = [queue.array(n, np.float32) for _ in xs]
    for target in targets:
        queue.runtime.fill(target.ptr, 0, target.nbytes, queue.stream)

    def decode(message: DeviceArray, target: DeviceArray, add: bool) -> Callable[[Queue], None]:
        def step(queue: Queue) -> None:
            codecs.open_message(queue, message)
            codecs.decode_opened(header, head, message, target, DType.FLOAT32, queue, add=add)

        return step

    def encode(flat: Flat, out: DeviceArray) -> Callable[[Queue], None]:
        def step(queue: Queue) -> None:
            codecs.encode_into(codec, flat, out, queue)

        return step

    sparse = int(np.count_nonzero(decoded)) if codec.name in SPARSE else n
    steps = {
        "encode": ([encode(f, o) for f, o in zip(flats, outs, strict=True)], 4 * n + nbytes),
        "decode": ([decode(m, t, False) for m, t in zip(messages, targets, strict=True)], 4 * n + nbytes),
        "decode_add": (
            [decode(m, t, True) for m, t in zip(messages, targets, strict=True)],
            8 * sparse + nbytes,
        ),
    }
    yardstick = copying(list(zip(targets, xs, strict=True)))
    row: Row = {"bits": nbytes * 8 / n}
    for name, (some, moved) in steps.items():
        seconds, copied = clock.measure(some, yardstick, 3 if quick else 20)
        floor = moved / (8 * n) * copied
        row[name] = {
            "seconds": seconds,
            "gb_s": 4 * n / seconds / 1e9,
            "copy_seconds": copied,
            "moved_bytes": moved,
            "floor_seconds": floor,
            "of_floor": floor / seconds,
            "call_seconds": clock.calls(some[0], 3 if quick else 20),
        }
    return row


SPARSE = ("topk", "threshold", "sidco", "randomblock")


def _check(
    codec: Codec,
    values: np.ndarray[Any, Any],
    summand: np.ndarray[Any, Any],
    message: np.ndarray[Any, Any],
    on_device: DeviceArray,
    queue: Queue,
) -> np.ndarray[Any, Any]:
    """Compare the device's message, and the values that it decodes from it, with the CPU's; return the values."""
    expected = codec.encode(values)
    if codec.name not in OWN_BYTES and not np.array_equal(message, expected):
        raise CheckFailed(f"{codec.spec}: the device's message is not the CPU's")
    want = hc.decode(message)  # by the CPU, which reads the device's message
    if codec.lossless and not np.array_equal(want.view(np.uint32), values.view(np.uint32)):
        raise CheckFailed(f"{codec.spec}: the CPU does not read back what the device wrote")
    target = queue.array(values.size, np.float32)
    for add in (False, True):
        queue.write(target, summand)
        header, head = codecs.read_opened(queue, on_device, codecs.open_message(queue, on_device))
        codecs.decode_opened(header, head, on_device, target, DType.FLOAT32, queue, add=add)
        got = queue.read(target)
        expected_values = summand + want if add else want
        if codec.name == "powersgd":
            if not np.allclose(got, expected_values, rtol=1e-4, atol=1e-4):
                raise CheckFailed(f"{codec.spec}: the device's values are far from the CPU's")
        elif not np.array_equal(got.view(np.uint32), expected_values.view(np.uint32)):
            raise CheckFailed(
                f"{codec.spec}: the device's values are not the CPU's{' when added' if add else ''}"
            )
    return want


# -- others ----------------------------------------------------------------------------------------------------


def _peers(size: str, n: int, values: np.ndarray[Any, Any], say: Say) -> list[Row]:
    """Measure torch's and nvCOMP's speeds by torch's events."""
    import statistics  # noqa: PLC0415  (only on a GPU)

    import torch  # noqa: PLC0415

    x = torch.from_numpy(values).cuda()
    rows = []

    def seconds(run: Callable[[], Any]) -> float:
        times = []
        for _ in range(12):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return statistics.median(times[2:])

    for name, (ours, encode, decode) in {**torch_peers(), **nvcomp_peers()}.items():
        row: Row = {"name": name, "ours": ours, "size": size}
        try:
            coded = encode(x)
            row |= {
                operation: {"seconds": s, "gb_s": 4 * n / s / 1e9}
                for operation, s in (
                    ("encode", seconds(lambda e=encode: e(x))),
                    ("decode", seconds(lambda d=decode, c=coded: d(c))),
                )
            }
            nbytes = getattr(coded, "buffer_size", None)
            if nbytes is not None:
                row["bits"] = float(nbytes) * 8 / n
        except Exception as error:  # a peer's own, of whatever kind
            row["missing"] = f"{type(error).__name__}: {error}"
        rows.append(row)
        cells = "  ".join(f"{row[op]['gb_s']:>10.0f}" for op in ("encode", "decode") if op in row)
        say(f"{name:36} {row.get('missing') or cells}")
    return rows


def judge(rows: list[Row], peers: list[Row]) -> list[Row]:
    """Return the speeds that were asked for of the measured rows, and whether each is met."""
    judged = []
    for row in rows:
        for (name, operation), part in ASKED.items():
            if row["name"] == name and operation in row:
                found = row[operation]["of_floor"]
                judged.append(
                    {
                        "name": name,
                        "size": row["size"],
                        "operation": operation,
                        "asked": part,
                        "of": "of the floor",
                    }
                    | {"measured": found, "met": found >= part}
                )
        for peer in peers:
            if (
                peer["ours"] == row["name"]
                and peer["size"] == row["size"]
                and peer["name"].startswith("torch")
            ):
                for operation in ("encode", "decode"):
                    if operation in peer and operation in row:
                        times = peer[operation]["seconds"] / row[operation]["seconds"]
                        judged.append(
                            {
                                "name": row["name"],
                                "size": row["size"],
                                "operation": operation,
                                "asked": TIMES_TORCH,
                            }
                            | {"of": f"times {peer['name']}", "measured": times, "met": times >= TIMES_TORCH}
                        )
    return judged


HEADER = f"{'codec':32} {'bits':>7}  " + "".join(
    f"{name + ' GB/s (of floor; call us)':>36}" for name in OPERATIONS
)


def line(row: Row) -> str:
    """Return a row of the table as text."""
    if "failed" in row:
        return f"{row['name']:32} FAILED: {row['failed']}"
    cells = "".join(
        f"{row[op]['gb_s']:>16.0f} ({row[op]['of_floor']:>5.2f}; {row[op]['call_seconds'] * 1e6:>8.0f})"
        for op in OPERATIONS
    )
    return f"{row['name']:32} {row['bits']:>7.3f}  {cells}"
