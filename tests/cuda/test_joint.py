"""Work of operations that travel together: as few launches as its order allows, with the same results."""

from __future__ import annotations

import numpy as np
import pytest

import hybridcomp as hc
from hybridcomp import wire
from hybridcomp.arrays import DType, flatten
from hybridcomp.codecs.device.driver import driver_of
from hybridcomp.codecs.device.messages import (
    check_status,
    convert,
    decode_opened,
    encode_into,
    head_of,
    open_message,
    read_opened,
)
from hybridcomp.collectives.device.joint import TABLE_FORMS, Joint, pair_for
from tests.cuda.common import ON_GPU, runtime, to_device, to_host, values
from tests.emulation.runtime import emulated

F32 = DType.FLOAT32


def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return a list to which every launch adds itself."""
    found: list[tuple[str, str]] = []
    launch = runtime().launch
    monkeypatch.setattr(
        runtime(),
        "launch",
        lambda module, kernel, *args: (found.append((module, kernel)), launch(module, kernel, *args)),
    )
    return found


def test_messages_of_operations_are_written_and_read_by_one_launch_of_a_kernel(monkeypatch):
    sizes, codec, joint = (1, 129, 4096, 70001), hc.get_codec("int8"), Joint()
    arrays = [values("gaussian", n, "float32", seed=n) for n in sizes]
    given = [to_device(x) for x in arrays]
    queues = [pair_for(joint, runtime(), []).queue for _ in sizes]
    found = launched(monkeypatch)
    messages, outputs = [], []
    for x, queue in zip(given, queues, strict=True):
        flat = flatten(x, device=True)
        room = queue.empty(codec.bound(flat.size, F32))
        encode_into(codec, flat, room, queue.fork("encode"))
        open_message(queue.fork("decode"), room)
        messages.append(room)
    assert not found
    joint.start()
    assert [kernel for _, kernel in found] == [
        "encode_q4_f32_table",
        "message_seal_table",
        "message_open_table",
    ]
    for x, queue, message in zip(arrays, queues, messages, strict=True):
        assert queue.read(message).tobytes() == np.asarray(codec.encode(x)).tobytes()
    heads = [
        read_opened(queue, message, open_message(queue, message))
        for queue, message in zip(queues, messages, strict=True)
    ]
    del found[:]
    for x, queue, message, (header, head) in zip(arrays, queues, messages, heads, strict=True):
        out = queue.array(x.size, np.float32)
        decode_opened(header, head, message, out, F32, queue)
        outputs.append(out)
    joint.start()
    assert [kernel for _, kernel in found] == ["decode_plain_f32_f32_table"]
    for x, queue, out in zip(arrays, queues, outputs, strict=True):
        assert queue.read(out).tobytes() == hc.decode(codec.encode(x)).tobytes()
        check_status(queue, "a message")


SEARCHES = ["search_32"] * 3
WRITTEN = ["count_32", "write_32", "seal"]
SELECTIONS = {
    "topk:ratio=0.01": ["sample_32", "filter_32", *SEARCHES, *WRITTEN],
    "topk:ratio=0.3,values=bf16": ["sample_32", "filter_32", *SEARCHES, "count_32", "write_32"],
    "threshold:abs=0.7": ["limit", "reach_32", *WRITTEN],
    "threshold:rel=2.0": ["mean_square_f32", "reach_32", *WRITTEN],
    "sidco:ratio=0.02": [
        *("fit_sample_f32", "fit_32", "reach_32", "begin"),
        *(["refine_32"] * 4),
        *SEARCHES,
        *WRITTEN,
    ],
}


@pytest.mark.parametrize("spec", SELECTIONS)
def test_elements_of_operations_are_selected_by_one_launch_of_a_kernel(monkeypatch, spec):
    sizes, codec, joint = (1025, 70001, 5000), hc.get_codec(spec), Joint()
    arrays = [values("gaussian", n, "float32", seed=n) for n in sizes]
    given = [to_device(x) for x in arrays]
    queues = [pair_for(joint, runtime(), []).queue for _ in sizes]
    found = launched(monkeypatch)
    messages = []
    for x, queue in zip(given, queues, strict=True):
        flat = flatten(x, device=True)
        room = queue.empty(codec.bound(flat.size, F32))
        messages.append(encode_into(codec, flat, room, queue.fork("encode")))
    assert not found
    joint.start()
    selected = [kernel for module, kernel in found if module.startswith("sparse_")]
    wanted = [f"sparse_{name}_table" for name in SELECTIONS[spec]]
    assert selected[: len(wanted)] == wanted, selected
    assert all(kernel.endswith("_table") for _, kernel in found), found
    for x, queue, message in zip(arrays, queues, messages, strict=True):
        nbytes = message.nbytes(queue)
        assert queue.read(message.buffer[:nbytes]).tobytes() == np.asarray(codec.encode(x)).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sparse_messages_of_several_ranks_are_added_by_one_launch_of_a_kernel(monkeypatch, dtype):
    """Messages of three ranks for each of two sums: lists, bitmaps, and values at the same places."""
    sizes, joint, kind = (1025, 70001), Joint(), DType.FLOAT32 if dtype == "float32" else DType.FLOAT64
    codecs = [hc.get_codec(f"topk:ratio={ratio}") for ratio in (0.01, 0.3, 0.05)]
    driver = driver_of(codecs[0].wire_id)
    messages = [
        [np.array(codec.encode(values("gaussian", n, dtype, seed=n + i))) for i, codec in enumerate(codecs)]
        for n in sizes
    ]
    given = [[flatten(to_device(message), device=True).data for message in each] for each in messages]
    queues = [pair_for(joint, runtime(), []).queue for _ in sizes]
    sums = [queue.array(n, dtype) for n, queue in zip(sizes, queues, strict=True)]
    found = launched(monkeypatch)
    for queue, total, each, raw in zip(queues, sums, messages, given, strict=True):
        queue.fill(total)
        for message in raw:
            open_message(queue.fork("decode"), message)
        headers = [wire.peek(message) for message in each]
        heads = [head_of(header, message) for header, message in zip(headers, each, strict=True)]
        payloads = [message[wire.HEADER_BYTES :] for message in raw]
        driver.decode_sum(headers, heads, payloads, total, kind, queue)
    joint.start()
    names = ["message_open", "sparse_sections", "sparse_check", f"sparse_add_{8 * kind.itemsize}"]
    assert [kernel for _, kernel in found] == [f"{name}_table" for name in names]
    for n, queue, total, each in zip(sizes, queues, sums, messages, strict=True):
        wanted = np.zeros(n, dtype)
        for message in each:
            hc.decode_add(message, wanted)
        assert queue.read(total).tobytes() == wanted.tobytes()
        check_status(queue, "messages")


def test_a_damaged_sparse_message_stops_the_sum_that_it_is_of():
    joint, codec, n = Joint(), hc.get_codec("topk:ratio=0.05"), 3000
    driver, queues = driver_of(codec.wire_id), []
    x = values("gaussian", n, "float32")
    for bad in (False, True):
        queue = pair_for(joint, runtime(), []).queue
        message = np.array(codec.encode(x))
        forged = message.copy()
        forged[52:54] = 255  # the first index
        given = [flatten(to_device(each), device=True).data for each in (message, forged if bad else message)]
        total = queue.array(n, np.float32)
        queue.fill(total)
        header = wire.peek(message)
        heads, payloads = [head_of(header, message)] * 2, [each[wire.HEADER_BYTES :] for each in given]
        driver.decode_sum([header] * 2, heads, payloads, total, F32, queue)
        queues.append((queue, total))
    wanted = np.zeros(n, np.float32)
    for _ in range(2):
        hc.decode_add(np.array(codec.encode(x)), wanted)
    (good, right), (stopped, untouched) = queues
    assert good.read(right).tobytes() == wanted.tobytes()
    check_status(good, "a sum")
    assert not stopped.read(untouched).any()
    with pytest.raises(hc.WireError):
        check_status(stopped, "a sum")


def test_order_is_kept(monkeypatch):
    """Work on a queue follows its forks, forks of one kind follow nothing but what was before them."""
    joint = Joint()
    queue = pair_for(joint, runtime(), []).queue
    x = flatten(to_device(np.arange(64, dtype=np.float32)), device=True).data
    parts = [queue.array(32, np.float32) for _ in range(2)]
    total = queue.array(32, np.float32)
    found = launched(monkeypatch)
    for i, part in enumerate(parts):
        convert(queue.fork("decode"), x[32 * i : 32 * i + 32], F32, part, F32, 32)
    convert(queue, parts[0], F32, total, F32, 32)
    convert(queue, parts[1], F32, total, F32, 32, add=True)
    convert(queue.fork("encode"), total, F32, parts[0], F32, 32)
    assert queue.read(parts[0]).tolist() == [32 + 2.0 * i for i in range(32)]
    assert [kernel for _, kernel in found] == [
        "copy_bytes_table",
        "copy_bytes",
        "convert_f32_f32_add",
        "copy_bytes",
    ]


def test_a_fault_stays_with_its_operation():
    joint, codec = Joint(), hc.get_codec("int8")
    pairs = [pair_for(joint, runtime(), []) for _ in range(3)]
    words = [pair.pool.pinned.take(4) for pair in pairs]
    for i, pair in enumerate(pairs):
        message = np.array(codec.encode(values("gaussian", 500, "float32")))
        message[100] ^= i == 1
        open_message(pair.queue.fork("decode"), flatten(to_device(message), device=True).data)
    events = [
        pair.download([(word[:4], pair.queue.status.view(np.uint8))])
        for pair, word in zip(pairs, words, strict=True)
    ]
    assert not any(event.done() for event in events)
    joint.start()
    for event in events:
        event.wait()
    assert [bool(word[:4].view(np.uint32)[0]) for word in words] == [False, True, False]


def test_memory_lives_until_its_work_starts():
    """An array that nobody else has is not given to another operation while its work is only recorded."""
    joint = Joint()
    first, second = (pair_for(joint, runtime(), []).queue for _ in range(2))
    x = to_device(np.arange(1024, dtype=np.float32))
    source, out = flatten(x, device=True).data, to_device(np.zeros(1024, np.float32))
    held = first.array(1024, np.float32)
    at = held.ptr
    convert(first, source, F32, held, F32, 1024)
    convert(first, held, F32, flatten(out, device=True).data, F32, 1024)
    del held
    assert second.array(1024, np.float32).ptr != at
    first.read(first.status)
    assert to_host(out).tolist() == to_host(x).tolist()


@pytest.mark.skipif(
    ON_GPU, reason="asks the emulation's libraries; on a GPU a missing kernel fails the tests of the hook"
)
@pytest.mark.parametrize("module", TABLE_FORMS)
def test_every_form_with_a_table_is_there(module):
    suffixes = {"encode_q": "4_f32", "feedback_q": "8_bf16", "decode_plain": "_f32_f16", "decode_sum": "_f64"}
    ends = {"convert_": "f16_f32_add", "divide_": "f64", "sum_": "bf16_f64"}
    for begin in TABLE_FORMS[module]:
        sized = module.startswith("sparse_") and begin not in ("sparse_mean_square_", "sparse_fit_sample_")
        plain = "32" if sized else "f32"
        end = suffixes.get(begin) or ends.get(begin) or (plain if begin.endswith("_") else "")
        emulated().emulator._kernel(module, f"{begin}{end}_table")
