"""Ranges that torch's profiler shows of a process group. Policy int8."""

import json
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

import hybridcomp.torch as hct
from tests.torch.cases.collectives import rank, size

POLICY = "int8"
BIG = 100_000


def ranges(seen: profile) -> list:
    return [event for event in seen.events() if event.name.startswith("hybridcomp")]


def case_ranges_name_operation_axis_codec_and_bytes() -> None:
    group = dist.new_group(pg_options=hct.Options(axis="dp"))
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        dist.all_reduce(torch.ones(BIG), group=group)
        dist.all_reduce(torch.ones(3, dtype=torch.int64), group=group)
        dist.all_gather_into_tensor(torch.empty(BIG * size()), torch.ones(BIG), group=group)
        dist.barrier(group)
    names = [event.name for event in ranges(seen)]
    assert names == [
        "hybridcomp:all_reduce",
        f"hybridcomp all_reduce axis=dp codec=int8:block=128 bytes={4 * BIG}",
        "hybridcomp:all_reduce",
        "hybridcomp all_reduce axis=dp codec=none bytes=24",
        "hybridcomp:all_gather_into_tensor",
        f"hybridcomp all_gather axis=dp codec=int8:block=128 bytes={4 * BIG * size()}",
        "hybridcomp:barrier",
        "hybridcomp barrier axis=dp codec=none bytes=0",
    ], names
    first = ranges(seen)[0]
    assert first.input_shapes == [[BIG]]
    assert first.is_async


def case_a_range_lasts_until_the_operation_ends() -> None:
    dist.barrier()
    if rank():
        time.sleep(0.3)  # so that rank 0's operation cannot end before
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        with record_function("start"):
            work = dist.all_reduce(torch.ones(BIG), async_op=True)
        with record_function("meanwhile"):
            torch.ones(1000).sum()
        work.wait()
    (call,) = (event for event in ranges(seen) if event.name == "hybridcomp:all_reduce")
    (meanwhile,) = (event for event in seen.events() if event.name == "meanwhile")
    assert call.time_range.start < meanwhile.time_range.start
    if rank() == 0:
        assert call.time_range.end > meanwhile.time_range.end


def case_a_profiler_that_stops_ends_the_ranges_of_calls_under_way() -> None:
    stopped = "profiler stopped"
    store = dist.distributed_c10d._get_default_store()
    for turn in range(
        10
    ):  # a range that ended later wrote to memory that was free, which did not always show
        if rank():
            store.wait([f"{stopped} {turn}"])
            for _ in range(20):
                dist.all_reduce(torch.ones(BIG))
            continue
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            works = [dist.all_reduce(torch.ones(BIG), async_op=True) for _ in range(20)]
            with record_function("last"):
                torch.ones(1000).sum()
        store.set(f"{stopped} {turn}", "1")
        for work in works:  # a range that ended now would write to memory that is free
            work.wait()
        (last,) = (event for event in seen.events() if event.name == "last")
        called = [event for event in ranges(seen) if event.name == "hybridcomp:all_reduce"]
        assert len(called) == 20
        assert all(event.time_range.end >= last.time_range.end for event in called)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        dist.barrier()
    assert ranges(seen)[0].name == "hybridcomp:barrier"


def case_coalesced_calls_and_messages() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        dist.all_reduce_coalesced([torch.ones(BIG), torch.ones(4)])
        if size() > 1:
            if rank() == 0:
                dist.send(torch.ones(BIG), 1)
            elif rank() == 1:
                dist.recv(torch.ones(BIG))
    names = [event.name for event in ranges(seen)]
    assert names.count("hybridcomp:all_reduce") == 1
    assert sum(name.startswith("hybridcomp all_reduce axis=") for name in names) == 2
    if size() > 1 and rank() < 2:
        what = "send" if rank() == 0 else "recvAnySource"
        assert names.count(f"hybridcomp:{what}") == 1


def case_a_chrome_trace_has_them() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        dist.broadcast(torch.ones(BIG), 0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    assert any(event.get("name") == "hybridcomp:broadcast" for event in events)


def case_an_error_ends_its_range() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        try:
            dist.group.WORLD.all_gather_single(torch.empty(3 * size() + 1), torch.empty(3))
        except ValueError:
            torch.ones(3).sum()
        dist.barrier()
    assert next(event.name for event in ranges(seen)) == "hybridcomp:all_gather_into_tensor"


def case_nothing_is_recorded_without_a_profiler() -> None:
    work = dist.all_reduce(torch.ones(3), async_op=True)
    work.wait()
    assert work._mark is None
