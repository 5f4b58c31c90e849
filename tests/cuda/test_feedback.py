"""Error feedback on a device: the messages and the states of the CPU, and sums of messages at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hybridcomp as hc
from hybridcomp.arrays import DType, as_dtype, flatten
from hybridcomp.codecs.device import Slots, driver_of
from hybridcomp.codecs.device.feedback import MEMORIES
from hybridcomp.codecs.feedback.error_feedback import MEMORIES as HOST_MEMORIES
from hybridcomp.codecs.feedback.forms import parse_form
from hybridcomp.codecs.feedback.memory import Scratch
from hybridcomp.device import Queue
from hybridcomp.wire import HEADER_BYTES, Header
from tests.codecs.common import FLOATS
from tests.cuda import common

KEY = ("dp", "w")
FORMS = ["ef", "ef21", "loco", "loco:beta=0.5,reset_steps=2", "dgc", "ef-sgdm"]
# Codecs whose kernels encode with feedback at once, some without such kernels, one that draws random numbers, and
# those whose messages vary in length.
CODECS = [
    "int8",
    "int4:block=32",
    "int2:block=64",
    "int2:block=512",
    "int8:block=1024",
    "int4:block=24",
    "int8:block=4096",
    "int4:symmetric=false",
    "int8:rounding=stochastic",
    "bf16",
    "sign",
    "topk:ratio=0.05",
    "threshold:abs=0.7",
]


def same_state(got: hc.ErrorFeedback, want: hc.ErrorFeedback, what: str) -> None:
    states = got.state_dict(), want.state_dict()
    assert list(states[0]) == list(states[1]), what
    for name, array in states[1].items():
        common.assert_same(states[0][name].reshape(-1), array.reshape(-1), f"{what}: {name}")


def data_of(n: int, dtype: str, step: int) -> Any:
    kind = ("gaussian", "mixed", "not finite", "gaussian", "sparse", "zeros")[step % 6]
    return common.values(kind, n, dtype, step)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("spec", CODECS)
def test_messages_and_states_are_the_cpus(spec: str, form: str) -> None:
    for dtype, n in (
        ("float32", 1390),
        ("float32", 4096),
        ("float64", 1300),
        ("float16", 300),
        ("bfloat16", 1),
    ):
        device, host = hc.ErrorFeedback(spec, form), hc.ErrorFeedback(spec, form)
        for step in range(6):
            x = data_of(n, dtype, step)
            want = np.array(flatten(host.encode(common.host_array(x, dtype), KEY)).data)
            got = device.encode(common.to_device(x, as_dtype(dtype)), KEY)
            common.assert_same(common.to_host(got), want, f"{spec} {form}: {n} {dtype}, step {step}")
            if form == "ef21":
                total = np.empty(n, as_dtype(dtype).accumulator.storage)
                hc.decode(want, out=total)
                summed = device.accumulate(KEY, common.to_device(total))
                common.assert_same(
                    common.to_host(summed), host.accumulate(KEY, total), f"{spec}: accumulated"
                )
        same_state(device, host, f"{spec} {form}: {n} {dtype}")


@pytest.mark.parametrize("spec", ["sign", "int4:block=32", "bf16"])
def test_messages_of_momenta_are_the_cpus(spec: str) -> None:
    """Data are a part of a momentum, which the kernels compute as they correct; a later step sends them alone."""
    for dtype, n in (("float32", 1390), ("float64", 1300), ("bfloat16", 301)):
        kind = as_dtype(dtype).accumulator
        momentum = common.values("gaussian", n, kind.label, 9)
        device, host = hc.ErrorFeedback(spec), hc.ErrorFeedback(spec)
        for step in range(6):
            mine = None if step == 4 else common.host_array(momentum, kind.label)
            host.blend(KEY, None if mine is None else flatten(mine).data, 0.9)
            device.blend(
                KEY, None if mine is None else flatten(common.to_device(momentum), device=True).data, 0.9
            )
            x = data_of(n, dtype, step)
            want = np.array(flatten(host.encode(common.host_array(x, dtype), KEY)).data)
            got = device.encode(common.to_device(x, as_dtype(dtype)), KEY)
            common.assert_same(common.to_host(got), want, f"{spec}: {n} {dtype}, step {step}")
        same_state(device, host, f"{spec}: {n} {dtype}")


@pytest.mark.parametrize("spec", ["topk:ratio=0.1,values=int8", "bounded"])
def test_messages_of_any_length(spec: str) -> None:
    device, host = hc.ErrorFeedback(spec), hc.ErrorFeedback(spec)
    for step in range(2):
        x = common.values("gaussian", 300, "float32", step)
        got = device.encode(common.to_device(x), KEY)
        common.assert_same(common.to_host(got), np.asarray(host.encode(x, KEY)), f"{spec}: step {step}")
    same_state(device, host, spec)


@pytest.mark.parametrize("form", FORMS)
def test_states_go_from_host_to_device_and_back(form: str) -> None:
    x = [common.values("gaussian", 700, "float32", step) for step in range(4)]
    mixed, host = hc.ErrorFeedback("int4", form), hc.ErrorFeedback("int4", form)
    for step, values in enumerate(x):
        want = host.encode(values, KEY)
        on_device = step % 2 == 1
        got = mixed.encode(common.to_device(values) if on_device else values, KEY)
        got = common.to_host(got) if on_device else got
        common.assert_same(got, want, f"{form}: step {step}")
        loaded = hc.ErrorFeedback("int4", form)
        loaded.load_state_dict(mixed.state_dict())
        mixed = loaded
    same_state(mixed, host, form)


def test_keys_share_spare_memory_and_none_of_their_states() -> None:
    device, host = hc.ErrorFeedback("int4"), hc.ErrorFeedback("int4")
    for step in range(5):
        for key in (("a",), ("b",), ("c",)):
            n = 900 if key == ("b",) and step == 3 else 1000  # the key is forgotten, and taken up again
            x = data_of(n, "float32", step + len(key[0]))
            want = host.encode(x, key)
            got = device.encode(common.to_device(x), key)
            common.assert_same(common.to_host(got), np.asarray(want), f"{key} at {step}")
    same_state(device, host, "keys")
    device.clear()
    assert len(device) == 0


def test_outputs_that_are_wrong_are_refused() -> None:
    feedback = hc.ErrorFeedback("int8")
    x = common.to_device(np.ones(100, np.float32))
    with pytest.raises(ValueError, match="at least"):
        feedback.encode(x, KEY, out=common.to_device(np.zeros(100, np.uint8)))
    out = common.to_device(np.full(300, 0xA5, np.uint8), offset=5)
    msg = common.to_host(feedback.encode(x, KEY, out=out))
    # The first step of a new key is the codec's own message; the refused one had not begun to change anything.
    common.assert_same(msg, np.asarray(hc.get_codec("int8").encode(np.ones(100, np.float32))), "unaligned")
    assert np.all(common.to_host(out)[msg.size :] == 0xA5)


class _Pair:
    """Memories of the host and of the device, given the same."""

    def __init__(self, form: str, n: int, dtype: str) -> None:
        self.runtime = common.runtime()
        self.queue = Queue(self.runtime, 0)
        parsed, self.kind = parse_form(form), as_dtype(dtype).accumulator
        self.dtype = as_dtype(dtype)
        self.host = HOST_MEMORIES[parsed.name](parsed, n, self.kind, Scratch())
        self.device = MEMORIES[parsed.name](parsed, n, self.kind, self.queue, Slots())

    def flats(self, storage: Any) -> tuple[Any, Any]:
        on_host = flatten(common.host_array(storage, self.dtype.label))
        return on_host, flatten(common.to_device(storage, self.dtype), device=True)

    def room(self, codec: Any, n: int) -> tuple[Any, Any, Any]:
        need = codec.bound(n, self.kind)
        kept = common.to_device(np.zeros(need, np.uint8))
        return np.zeros(need, np.uint8), flatten(kept, writable=True, device=True).data, kept

    def same(self, what: str) -> None:
        got, want = self.device.arrays(), self.host.arrays()
        assert list(got) == list(want), what
        for name, array in want.items():
            common.assert_same(got[name].reshape(-1), array.reshape(-1), f"{what}: {name}")


@pytest.mark.parametrize("spec", ["int8", "int4:block=24", "int4:hadamard=true,block=64"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_reductions_in_spans_are_the_cpus(form: str, spec: str, dtype: str) -> None:
    """A rank's reduction has spans for others, one of its own, and the result of that one."""
    n, codec = 1000, hc.get_codec(spec)
    pair = _Pair(form, n, dtype)
    cuts = [
        (slice(0, 256), slice(256, 640), slice(640, 1000)),
        (slice(0, 100), slice(100, 333), slice(333, 1000)),
    ]
    for step in range(5):
        x = data_of(n, dtype, step)
        at = codec.at_step(pair.host.begin())
        assert pair.device.begin(pair.queue) == pair.host.steps - 1
        spans = cuts[step // 2 % 2]
        for span in spans[:2]:
            host, device = pair.flats(x[span])
            into, memory, kept = pair.room(at, host.size)
            size = pair.host.encode(at, host, into, span)
            encoded = pair.device.encode(at, device, memory, pair.queue, span)
            assert encoded.nbytes(pair.queue) == size
            common.assert_same(common.to_host(kept)[:size], into[:size], f"{form} {spec}: step {step} {span}")
        own = spans[2]
        host, device = pair.flats(x[own])
        total = pair.host.own(at, host, own)
        totals = pair.device.own(at, device, pair.queue, own)
        common.assert_same(np.array(pair.queue.read(totals)), total, f"{form} {spec}: own")
        into, memory, kept = pair.room(at, host.size)
        size = pair.host.encode_sum(at, total, into, own, 3)
        encoded = pair.device.encode_sum(at, totals, memory, pair.queue, own, 3)
        assert encoded.nbytes(pair.queue) == size
        common.assert_same(common.to_host(kept)[:size], into[:size], f"{form} {spec}: sum of step {step}")
        if pair.host.tracks:
            values = np.empty(host.size, pair.kind.storage)
            hc.decode(into[:size], out=values)
            there = flatten(common.to_device(values), writable=True, device=True).data
            pair.host.result(values, own)
            pair.device.result(there, pair.queue, own)
            common.assert_same(np.array(pair.queue.read(there)), values, f"{form} {spec}: result")
    pair.same(f"{form} {spec} {dtype}")


@pytest.mark.parametrize("spec", ["int8", "int4:block=32", "int2:block=2048", "int8:block=24", "fp16"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_sums_of_messages_at_once(spec: str, dtype: str) -> None:
    codec, kind = hc.get_codec(spec), as_dtype(dtype)
    queue = Queue(common.runtime(), 0)
    driver = driver_of(codec.wire_id)
    for peers, n in ((1, 1), (3, 999), (4, 128), (7, 2048), (16, 300), (17, 4100)):
        acc = np.asarray(common.values("gaussian", n, kind.accumulator.label, 9))
        messages = [
            np.array(
                flatten(codec.encode(common.host_array(common.values("mixed", n, dtype, p), dtype))).data
            )
            for p in range(peers)
        ]
        kept = common.to_device(acc)
        there = flatten(kept, writable=True, device=True).data
        arrays = [common.to_device(m) for m in messages]
        payloads = [flatten(a, device=True).data[HEADER_BYTES:] for a in arrays]
        heads = [m[HEADER_BYTES : HEADER_BYTES + 64].tobytes() for m in messages]
        headers = [Header(codec.wire_id, kind, n, p.size, codec.params_hash) for p in payloads]
        driver.decode_sum(headers, heads, payloads, there, kind.accumulator, queue)
        for message in messages:
            hc.decode_add(message, acc)
        common.assert_same(common.to_host(kept), acc, f"{spec}: {peers} messages of {n} {dtype}")


def test_sums_of_unlike_messages() -> None:
    queue, driver = Queue(common.runtime(), 0), driver_of(3)
    codecs = [hc.get_codec(spec) for spec in ("int8", "int8:block=64", "int8:symmetric=false")]
    x = common.values("gaussian", 777, "float32")
    messages = [np.asarray(codec.encode(x)) for codec in codecs]
    acc = np.zeros(777, np.float32)
    kept = common.to_device(acc)
    arrays = [common.to_device(m) for m in messages]
    driver.decode_sum(
        [Header(3, DType.FLOAT32, 777, m.size - HEADER_BYTES, 0) for m in messages],
        [m[HEADER_BYTES : HEADER_BYTES + 64].tobytes() for m in messages],
        [flatten(a, device=True).data[HEADER_BYTES:] for a in arrays],
        flatten(kept, writable=True, device=True).data,
        DType.FLOAT32,
        queue,
    )
    for message in messages:
        hc.decode_add(message, acc)
    common.assert_same(common.to_host(kept), acc, "unlike messages")


@pytest.mark.skipif(common.ON_GPU, reason="the emulation says what was launched")
@pytest.mark.parametrize(
    ("form", "spec", "kernel"),
    [
        ("ef", "int8", "feedback_q4_f32"),
        ("ef", "int8:block=1024", "feedback_q8_f32"),
        ("ef", "int2:block=24", "feedback_any_f32"),
        ("ef", "int4:block=4096", "feedback_long_f32"),
        ("loco", "int4", "feedback_average_f32"),
    ],
)
def test_plain_blocks_are_encoded_in_one_pass(form: str, spec: str, kernel: str) -> None:
    launches = common.emulated().launches
    before = len(launches)
    hc.ErrorFeedback(spec, form).encode(common.to_device(np.ones(5000, np.float32)), KEY)
    new = [name for name in launches[before:] if name.startswith(("feedback", "encode", "decode"))]
    rest = {"ef": ["feedback_exchange"], "loco": ["feedback_commit", "feedback_commit"]}[form]
    assert [name for name in new if name != "feedback_point"] == [kernel, *rest]


def test_a_sum_of_another_size_or_type_is_refused() -> None:
    feedback = hc.ErrorFeedback("int8", "ef21")
    feedback.encode(common.to_device(common.values("gaussian", 100, "float32")), KEY)
    for wrong in (np.zeros(100), np.zeros(99, np.float32)):
        with pytest.raises(ValueError, match=r"the sum under .*, and its memory has 100 float32"):
            feedback.accumulate(KEY, common.to_device(wrong))
