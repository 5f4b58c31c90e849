"""Check codecs and algorithms of any package by the tests that hybridcomp's own pass; pytest is not needed.

>>> from hybridcomp.testing import check_codec
>>> check_codec("int8:block=32")

Each check of :data:`CHECKS` raises AssertionError, or the codec's own error, where the codec breaks the contract of
:mod:`hybridcomp.codecs.base`. A test of pytest's that names each case::

    @pytest.mark.parametrize("check", CHECKS)
    @pytest.mark.parametrize("spec", MyCodec.examples)
    def test_codec(spec, check):
        CHECKS[check](hybridcomp.get_codec(spec))

:func:`check_algorithm` proves an algorithm's schedules right.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridcomp import native, wire
from hybridcomp.arrays import DType, Flat, as_dtype, flatten, is_torch
from hybridcomp.codecs import Codec, decode, decode_add, get_codec, own_names
from hybridcomp.errors import CodecMismatchError, WireError
from hybridcomp.files import read_text, write_text
from hybridcomp.perfmodel import Setting, predict
from hybridcomp.perfmodel.profile import BUILT_IN
from hybridcomp.schedules.layout import REDUCTIONS, WHOLE
from hybridcomp.schedules.registry import Algorithm, find
from hybridcomp.schedules.schedule import Operation, Schedule
from hybridcomp.schedules.topology import Topology
from hybridcomp.schedules.verify import verify

torch: Any
try:
    torch = importlib.import_module("torch")
except ImportError:  # then there are no bfloat16 tensors to check
    torch = None

Array = npt.NDArray[Any]

SIZES = (0, 1, 2, 3, 7, 8, 9, 127, 128, 129, 1000, 4097, 65535, 65536, 65537)
FLOATS = ("float32", "float64", "float16", "bfloat16")
_GOLDEN_TYPES = (DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16)
_GOLDEN_COUNTS = (0, 1, 13, 35)
_LONG = 300  # elements, of float32: more than a block of most codecs


@contextlib.contextmanager
def raises(kind: type[BaseException] | tuple[type[BaseException], ...], pattern: str = "") -> Iterator[None]:
    """Check that the block raises an error of a kind, whose text has the pattern.

    Raises:
        AssertionError: it does not.
    """
    text = None
    try:
        yield
    except kind as error:
        text = str(error)
    assert text is not None, f"no {kind} was raised"
    assert re.search(pattern, text), f"{text!r} does not have {pattern!r}"


# -- arrays ------------------------------------------------------------------------------------------------


def isas() -> list[str]:
    """Return the instruction sets that this machine has."""
    names: list[str] = native.kernels().available_isas()
    return names


isa = native.using_isa


def gaussian(n: int, dtype: str = "float32", seed: int = 0) -> Any:
    """Return normal data: a NumPy array, or a torch tensor for bfloat16, which NumPy lacks."""
    values = np.random.default_rng(seed).standard_normal(n)
    if dtype == "bfloat16":
        return torch.from_numpy(values).to(torch.bfloat16)
    return values.astype(dtype)


def wide(x: Any) -> npt.NDArray[np.float64]:
    """Return any float array or tensor as flat float64."""
    if is_torch(x):
        return np.asarray(x.detach().double()).reshape(-1)
    return np.asarray(x, np.float64).reshape(-1)


def bits(x: Any) -> bytes:
    """Return the elements' bytes, to compare NaN and signed zero too."""
    return bytes(flatten(x).data.tobytes())


def accumulator(dtype: DType, n: int, seed: int = 1) -> Array:
    """Return a sum to add to: float32, or float64 for float64."""
    return np.random.default_rng(seed).standard_normal(n).astype(dtype.accumulator.storage)


def with_specials(x: Array, seed: int = 0, share: float = 0.1) -> Array:
    """Return a copy of floats with NaN of several bits, infinities and zeros of both signs among them.

    Args:
        x: values of any float dtype, or the bits of bfloat16 as uint16.
        seed: seed of which elements, and of which values: a rank, so that ranks meet different ones.
        share: share of the elements.
    """
    kind = np.dtype(f"u{x.itemsize}")
    brief = {2: (0x7F80, 0x7FC0) if x.dtype.kind == "u" else (0x7C00, 0x7E00), 4: (0x7F800000, 0x7FC00000)}
    infinity, nan = brief.get(x.itemsize, (0x7FF0 << 48, 0x7FF8 << 48))
    sign = 1 << (8 * x.itemsize - 1)
    drawn = [nan, nan | sign, nan + 1 + seed, (nan | sign) + 2 + seed, infinity + 3 + seed]
    drawn += [infinity, infinity | sign, 0, sign]
    rng = np.random.default_rng([seed, x.size])
    found = x.copy()
    at = rng.random(x.shape) < share
    found.view(kind)[at] = rng.choice(np.array(drawn, kind), int(at.sum()))
    return found


def reseal(msg: Array) -> Array:
    """Give a changed message the CRC that fits it: what a hostile sender would do."""
    crc = native.kernels().crc32c(msg[32:], native.kernels().crc32c(msg[:28]))
    msg[28:32] = np.frombuffer(crc.to_bytes(4, "little"), np.uint8)
    return msg


def relative_error(x: Any, y: Any) -> float:
    """Return the L2 norm of the difference over that of ``x``."""
    return float(np.linalg.norm(wide(x) - wide(y)) / np.linalg.norm(wide(x)))


# -- single checks -----------------------------------------------------------------------------------------


def check_message(codec: Codec, x: Any) -> Array:
    """Encode and check what holds for every message; return it."""
    src = flatten(x)
    n, dtype = src.size, src.dtype
    msg = codec.encode(x)
    raw, header = wire.open_message(msg)
    assert type(msg) is (torch.Tensor if src.is_torch else np.ndarray)
    assert (header.codec, header.dtype, header.count) == (codec.wire_id, dtype, n)
    assert header.params == codec.params_hash == native.kernels().crc32c(codec.spec.encode())
    bound = codec.bound(n, dtype)
    assert raw.size == bound if codec.fixed_size else raw.size <= bound
    assert bits(codec.encode(x)) == raw.tobytes(), "the same input must make the same bytes"
    assert codec.ratio(n, dtype) == n * dtype.itemsize / bound

    buffer = np.full(bound + 16, 0xA5, np.uint8)
    written = codec.encode(x, out=buffer)
    assert bits(written) == raw.tobytes()
    assert np.all(buffer[bound:] == 0xA5), "encode wrote past its bound"
    with raises(ValueError, "out must be"):
        codec.encode(x, out=np.empty(bound - 1, np.uint8))
    return np.array(raw)


def check_round_trip(codec: Codec, x: Any) -> Any:
    """Encode, decode in every way, and compare; return the decoded values."""
    msg = check_message(codec, x)
    src = flatten(x)
    n, dtype = src.size, src.dtype
    y = decode(torch.from_numpy(msg.copy()) if src.is_torch else msg)
    assert type(y) is (torch.Tensor if src.is_torch else np.ndarray)
    assert as_dtype(y.dtype) is dtype
    assert y.shape == (n,)
    if codec.lossless:
        assert bits(y) == src.data.tobytes()

    # A buffer of the caller's, of every float type, with fences around it.
    for other in DType:
        if not other.is_float or (other is DType.BFLOAT16 and torch is None):
            continue
        fenced = np.full(n * other.itemsize + 2, 0xA5, np.uint8)
        out = fenced[1:-1].view(other.storage)  # unaligned on purpose
        if other is DType.BFLOAT16:
            tensor = torch.empty(n, dtype=torch.bfloat16)
            assert codec.decode(msg, out=tensor) is tensor
            got = wide(tensor)
        else:
            assert codec.decode(msg, out=out) is out
            got = wide(out)
        assert fenced[0] == fenced[-1] == 0xA5, "decode wrote outside its buffer"
        if dtype is DType.FLOAT32 and other is DType.FLOAT64:
            np.testing.assert_array_equal(got, wide(y))  # widening is exact

    # decode_add is decode, then one addition in the accumulator's type.
    acc = accumulator(dtype, n)
    exact = np.empty(n, acc.dtype)
    codec.decode(msg, out=exact)
    with np.errstate(invalid="ignore"):
        expected = acc + exact
    total = acc.copy()
    codec.decode_add(msg, total)
    np.testing.assert_array_equal(total, expected)
    fenced = np.full(acc.nbytes + 2, 0xA5, np.uint8)
    unaligned = fenced[1:-1].view(acc.dtype)
    unaligned[:] = acc
    decode_add(msg, unaligned)
    np.testing.assert_array_equal(unaligned, expected)
    assert fenced[0] == fenced[-1] == 0xA5
    return y


def check_config(codec: Codec) -> None:
    """Check that the spec string, the config and the repr make an equal codec, and that parameters are read-only."""
    assert get_codec(codec.spec) == codec
    assert get_codec(codec.name, **codec.params) == codec
    assert hash(get_codec(codec.spec)) == hash(codec)
    assert get_codec(codec) is codec
    namespace = {type(codec).__name__: type(codec)}
    assert eval(repr(codec), namespace) == codec
    assert codec != object()
    for name in codec.params:
        if name not in codec.seldom:
            assert codec.spec.count(f":{name}=") == 1
        if name not in ("ratio", "bound"):  # which are methods of every codec
            with raises(AttributeError):
                setattr(codec, name, 1)
    with raises(ValueError, "no parameter 'colour'"):
        get_codec(codec.name, colour=1)


def check_rejects(codec: Codec, x: Any) -> None:
    """Check that wrong buffers are errors that say so."""
    msg = codec.encode(x)
    n = flatten(x).size
    with raises(ValueError, f"{n + 1} elements"):
        decode(msg, out=np.empty(n + 1, np.float32))
    with raises(ValueError, f"{n + 1} elements"):
        decode_add(msg, np.zeros(n + 1, np.float32))
    with raises(CodecMismatchError):
        decode(msg, out=np.empty(n, np.int32))
    with raises(CodecMismatchError):
        decode_add(msg, np.zeros(n, np.float16))


def check_non_finite(codec: Codec, x: Array) -> None:
    """Check that a NaN or an infinity anywhere decodes to something that is not finite, there and in the sum."""
    for value in (np.nan, np.inf, -np.inf):
        for at in (0, x.size // 2, x.size - 1):
            bad = x.copy()
            bad.reshape(-1)[at] = value
            msg = codec.encode(bad)
            assert not np.isfinite(decode(msg)[at])
            acc = np.zeros(x.size, as_dtype(x.dtype).accumulator.storage)
            decode_add(msg, acc)
            assert not np.isfinite(acc[at])


def check_isas_agree(codec: Codec, x: Any) -> None:
    """Check that all instruction sets write the same message and decode it to the same bits."""
    odd = x if is_torch(x) else with_specials(x, share=0.01)
    for values in (x, odd):
        assert len({_by_isa(codec, values, name) for name in isas()}) == 1


def _by_isa(codec: Codec, x: Any, name: str) -> tuple[bytes, ...]:
    """Return a message by one instruction set, what it decodes to, and that added to a sum."""
    with isa(name):
        msg = codec.encode(x)
        acc = with_specials(accumulator(flatten(x).dtype, flatten(x).size))
        decode_add(msg, acc)
        half = np.empty(acc.size, np.float16)
        decode(msg, out=half)
        return bits(msg), bits(decode(msg)), acc.tobytes(), half.tobytes()


def check_hostile(codec: Codec, x: Any) -> None:
    """Check that damage is a WireError; a forged message with a good CRC is one or decodes within its buffer."""
    msg = np.array(flatten(codec.encode(x)).data)
    for length in {*range(min(msg.size, 120)), msg.size - 1}:
        with raises(WireError):
            decode(msg[:length])
    rng = np.random.default_rng(3)
    flips = range(msg.size * 8) if msg.size < 300 else rng.integers(0, msg.size * 8, 2000)
    n = flatten(x).size
    fenced = np.zeros(n + 32, np.float32)
    for bit in flips:
        bad = msg.copy()
        bad[bit // 8] ^= 1 << (bit % 8)
        with raises(WireError):
            decode(bad)
        forged = reseal(bad)
        with contextlib.suppress(WireError, CodecMismatchError, ValueError):
            decode(forged, out=fenced[16:-16])
        with contextlib.suppress(WireError, CodecMismatchError, ValueError):
            decode_add(forged, fenced[16:-16])
        assert not np.concatenate([fenced[:16], fenced[-16:]]).any()
    for count in (0, n - 1, n + 1, 2 * n + 1, 2**32, 2**48, 2**63):
        if count < 0 or count == n:
            continue
        bad = msg.copy()
        bad[8:16] = np.frombuffer(count.to_bytes(8, "little"), np.uint8)
        if count > 2 * n + 1 or (codec.fixed_size and codec.bound(count) != codec.bound(n)):
            with raises(WireError):
                decode(reseal(bad))
        else:  # may be a message that this codec could have written
            with contextlib.suppress(WireError):
                assert decode(reseal(bad)).shape == (count,)
    for extra in (1, 4, 1000):  # a longer payload than the count makes
        bad = np.concatenate([msg, np.zeros(extra, np.uint8)])
        bad[16:24] = np.frombuffer((bad.size - 32).to_bytes(8, "little"), np.uint8)
        with raises(WireError):
            decode(reseal(bad))


# -- the suite, by name --------------------------------------------------------------------------------------


def _floats() -> list[str]:
    return [dtype for dtype in FLOATS if torch is not None or dtype != "bfloat16"]


def _round_trips(codec: Codec) -> None:
    """Check every float type and odd sizes."""
    for dtype in _floats():
        for n in SIZES:
            check_round_trip(codec, gaussian(n, dtype, seed=n))
    for shape in ((), (1, 1, 1, 1), (3, 0), (20, 1, 7), (13, 17)):
        check_round_trip(codec, gaussian(int(np.prod(shape))).reshape(shape))


def _instruction_sets(codec: Codec) -> None:
    for dtype in _floats():
        for n in (1, 129, 4999, 70001):
            check_isas_agree(codec, gaussian(n, dtype, seed=n))


def _extreme_values(codec: Codec) -> None:
    """Check denormals, the largest numbers, signed zeros, infinities and NaN payloads, by every instruction set."""
    rng = np.random.default_rng(5)
    integers: tuple[tuple[str, Any], ...] = (
        ("float32", np.uint32),
        ("float16", np.uint16),
        ("float64", np.uint64),
    )
    for dtype, integer in integers:
        anything = rng.integers(0, np.iinfo(integer).max, 3001, integer, endpoint=True).view(dtype)
        finite = np.where(np.isfinite(anything), anything, np.array(0, dtype))
        for x in (anything, finite):
            results = set()
            for name in isas():
                with isa(name):
                    msg = codec.encode(x)
                    decoded = np.empty(x.size, np.float64)
                    decode(msg, out=decoded)
                    decoded[np.isnan(decoded)] = np.nan  # which NaN does not matter once decoded
                    results.add((msg.tobytes(), decoded.tobytes()))
            assert len(results) == 1


def _non_finite(codec: Codec) -> None:
    for dtype in ("float32", "float64", "float16"):
        check_non_finite(codec, gaussian(1000, dtype))


def _hostile_bytes(codec: Codec) -> None:
    for n in (1, 30):
        check_hostile(codec, gaussian(n))


def _wrong_buffers(codec: Codec) -> None:
    check_rejects(codec, gaussian(50))


def _layouts(codec: Codec) -> None:
    """Check that unaligned, strided, read-only, Fortran-ordered and torch views of the same values make one message."""
    for dtype in (np.float32, np.float64, np.float16):
        x = gaussian(30 * 40, np.dtype(dtype).name).reshape(30, 40)
        message = codec.encode(x).tobytes()
        raw = np.empty(x.nbytes + 1, np.uint8)
        unaligned = raw[1:].view(dtype).reshape(x.shape)
        unaligned[...] = x
        strided = np.repeat(x, 2, axis=1)[:, ::2]
        read_only = x.copy()
        read_only.flags.writeable = False
        for other in (unaligned, strided, read_only, np.asfortranarray(x)):
            before = other.copy()
            assert codec.encode(other).tobytes() == message
            np.testing.assert_array_equal(other, before)
        if torch is not None:
            tensor = torch.from_numpy(x.copy())
            assert bits(codec.encode(tensor)) == message
            assert bits(codec.encode(tensor.t().contiguous().t())) == message
            assert bits(codec.encode(tensor.requires_grad_())) == message


def _alignment(codec: Codec) -> None:
    """Check messages of any alignment and type."""
    msg = codec.encode(gaussian(333))
    y = decode(msg)
    shifted = np.concatenate([np.zeros(3, np.uint8), msg])[3:]
    read_only = np.frombuffer(msg.tobytes(), np.uint8)
    trailing = np.concatenate([msg, np.ones(9, np.uint8)])  # as in a receive buffer of the bound's size
    for form in (shifted, read_only, trailing, msg.tobytes(), bytearray(msg.tobytes()), memoryview(msg)):
        assert bits(decode(form)) == bits(y)
        acc = np.zeros(333, np.float32)
        decode_add(form, acc)
        np.testing.assert_array_equal(acc, y + np.float32(0))
    if torch is not None:
        assert isinstance(decode(torch.from_numpy(msg)), torch.Tensor)


def _other_codecs(codec: Codec) -> None:
    """Check that messages of other codecs, and of other parameters, are refused."""
    for other in map(get_codec, (*own_names(), *type(codec).examples)):
        if other != codec:
            with raises(WireError, "is not"):
                codec.decode(other.encode(gaussian(20)))


def _dtypes(codec: Codec) -> None:
    """Check that a lossless codec carries every type, and another one floats alone."""
    if codec.lossless:
        _carries_every_dtype(codec)
        return
    for dtype in ("int32", "bool", "complex64", "uint8"):
        with raises(CodecMismatchError, "not floating-point"):
            codec.encode(np.zeros((4, 4), dtype))
        assert codec.can_carry(DType[dtype.upper()], (4, 4)) is not None


def _carries_every_dtype(codec: Codec) -> None:
    for dtype in DType:
        if dtype.is_float:
            continue
        assert codec.can_carry(dtype, (10,)) is None
        for n in (0, 1, 10, 5000):
            x = np.arange(n).astype(dtype.storage)
            y = decode(check_message(codec, x))
            assert y.dtype == x.dtype
            np.testing.assert_array_equal(y, x)
    msg = codec.encode(np.arange(3))
    with raises(CodecMismatchError, "cannot be decoded into"):
        decode(msg, out=np.empty(3, np.float32))
    with raises(CodecMismatchError):
        decode_add(msg, np.zeros(3, np.int64))
    with raises(CodecMismatchError, "cannot be carried"):
        codec.encode(np.array(["text"]))


#: Checks of a codec by name.
CHECKS: Mapping[str, Callable[[Codec], None]] = {
    "config": check_config,
    "round_trips": _round_trips,
    "instruction_sets": _instruction_sets,
    "extreme_values": _extreme_values,
    "non_finite": _non_finite,
    "hostile_bytes": _hostile_bytes,
    "wrong_buffers": _wrong_buffers,
    "layouts": _layouts,
    "alignment": _alignment,
    "other_codecs": _other_codecs,
    "dtypes": _dtypes,
}


def check_codec(spec: str | Codec, golden: str | os.PathLike[str] | None = None) -> None:
    """Check a codec by all of :data:`CHECKS`: some seconds for one written in NumPy.

    Args:
        spec: spec string, or a codec.
        golden: path of a file of :func:`write_golden` with messages of the codec, made when its format was settled.

    Raises:
        AssertionError: the codec breaks its contract; says in which check.
        ConfigError: the file cannot be read.
    """
    codec = get_codec(spec)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "overflow encountered", RuntimeWarning)
        for name, check in CHECKS.items():
            try:
                check(codec)
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                raise AssertionError(f"{codec.spec} fails the check {name!r}: {why}") from error
    if golden is not None:
        check_golden(
            codec.spec if isinstance(spec, Codec) else spec, json.loads(read_text(golden, what="messages"))
        )


# -- golden messages -----------------------------------------------------------------------------------------


def golden_values(n: int, dtype: DType) -> Array:
    """Return small dyadic numbers of both signs, exact in every type; stored as ``dtype.storage``."""
    exact = np.array([((i * 37 + 11) % 101 - 50) / 16 for i in range(n)], np.float32)
    if dtype is DType.BFLOAT16:
        return (exact.view(np.uint32) >> 16).astype(np.uint16)
    return exact.astype(dtype.storage)


def message(spec: str, data: Array, dtype: DType) -> bytes:
    """Return a codec's message of flat storage."""
    codec = get_codec(spec)
    out = np.empty(codec.bound(data.size, dtype), np.uint8)
    return out[: codec.encode_flat(Flat(data, dtype, data.shape, True, False), out)].tobytes()


def golden_messages(spec: str) -> dict[str, dict[str, str]]:
    """Return messages of a codec, and what they decode to, in hex, by spec, dtype and number of elements."""
    found = {}
    for dtype in _GOLDEN_TYPES:
        for n in (*_GOLDEN_COUNTS, *[_LONG] * (dtype is DType.FLOAT32)):
            encoded = message(spec, golden_values(n, dtype), dtype)
            decoded = np.empty(n, np.float64)
            decode(encoded, out=decoded)
            found[f"{spec} {dtype.label} {n}"] = {
                "message": encoded.hex(),
                "decoded": decoded.tobytes().hex(),
            }
    return found


def write_golden(path: str | os.PathLike[str], specs: list[str]) -> None:
    """Write messages of codecs to a file, and leave those that it has as they are: other versions wrote them.

    Raises:
        ConfigError: the file cannot be read or written.
    """
    known = json.loads(read_text(path, what="messages")) if os.path.exists(path) else {}
    there = {key.rsplit(" ", 2)[0] for key in known}
    for spec in specs:
        if spec not in there:
            known |= golden_messages(spec)
    write_text(path, json.dumps(known, indent=0) + "\n", what="messages")


def check_golden(spec: str, known: Mapping[str, Mapping[str, str]]) -> None:
    """Check that a codec still writes, and reads, the messages of a file of :func:`write_golden`.

    Raises:
        AssertionError: it does not, or there are none of this spec.
    """
    mine = {key: entry for key, entry in known.items() if key.rsplit(" ", 2)[0] == spec}
    assert mine, f"there are no messages of {spec}"
    for key, entry in mine.items():
        _, label, count = key.rsplit(" ", 2)
        dtype, stored, out = (
            as_dtype(label),
            bytes.fromhex(entry["message"]),
            np.empty(int(count), np.float64),
        )
        assert message(spec, golden_values(int(count), dtype), dtype) == stored, f"{key}: another message"
        decode(stored, out=out)
        assert out.tobytes().hex() == entry["decoded"], f"{key}: decodes to other values"


# -- algorithms ----------------------------------------------------------------------------------------------

CHUNK_BYTES = 256  # 64 elements: chunks are cut on borders of as many


def operation(kind: str, ranks: int, n: int, **how: Any) -> Operation:
    """Return an operation on one array of ``n`` elements, or on parts of about as many: each third has one more."""
    count = 1 if kind in WHOLE else ranks * ranks if kind == "all_to_all" else ranks
    counts = (n,) if kind in WHOLE else tuple(n + (i % 3 == 1) for i in range(count))
    return Operation(kind, counts, 4, chunk_bytes=CHUNK_BYTES, **how)


def verified(kind: str, name: str, topology: Topology, n: int, **how: Any) -> list[Schedule]:
    """Build and verify the schedules of an operation, those of all ranks.

    Raises:
        VerificationError: they are wrong; says how.
    """
    algorithm = find(kind, name)
    asked = operation(kind, len(topology.hosts), n, **how)
    schedules = [algorithm.build(asked, topology, rank) for rank in range(len(topology.hosts))]
    for schedule in schedules:
        assert schedule.operation == asked, f"it is a schedule of {schedule.operation}, not of {asked}"
    verify(schedules, algorithm.promise)
    return schedules


def check_algorithm(kind: str, name: str, most_ranks: int = 9) -> None:
    """Prove an algorithm's schedules right, on 1 to so many ranks, and check that its formula says seconds.

    Args:
        kind: operation, as ``all_reduce``.
        name: name of the algorithm.
        most_ranks: most ranks; the time grows with their square.

    Raises:
        AssertionError: it refuses all of them, or a schedule or the formula is wrong.
        ValueError: there is no such operation or algorithm.
    """
    algorithm = find(kind, name)
    cases = 0
    for ranks in range(1, most_ranks + 1):
        for each in (1, 2, 3):
            topology = Topology.even(ranks, each)
            if algorithm.refuses(topology) is None:
                cases += 1
                _check_schedules(algorithm, kind, topology)
    assert cases, f"{name} refuses 1 to {most_ranks} ranks on any hosts"


def _check_schedules(algorithm: Algorithm, kind: str, topology: Topology) -> None:
    ways: list[dict[str, bool]] = [{}, {"plain": True}, {"exact": True}]
    ways += [{"mean": True}] * (kind in REDUCTIONS) + [{"feedback": True}] * algorithm.feedback
    ranks = len(topology.hosts)
    for way in ways:
        for n in (0, 1, 65, 1000):
            try:
                verified(kind, algorithm.name, topology, n, **way)
            except Exception as error:
                where = (
                    f"{algorithm.name} for {kind} of {n} elements, {way or 'lossy'}, hosts {topology.hosts}"
                )
                raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
    if algorithm.formula is not None:
        for nbytes in (0, 4096, 1 << 26):
            codec = get_codec("topk" if algorithm.sparse else "int8")
            setting = Setting(kind, nbytes, 4, codec, ranks, topology.count, topology.largest, compiled=True)
            assert predict(BUILT_IN, algorithm.name, setting) >= 0
