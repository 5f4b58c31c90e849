"""The DDP hook in programs as people write them: accumulation, scalers, odd parameters, failures; over both links."""

import json
import tempfile
import threading
import time
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hybridcomp as hc
import hybridcomp.torch as hct
from hybridcomp.codecs import ErrorFeedback
from hybridcomp.codecs.linear import powersgd
from hybridcomp.codecs.lossless import LosslessCodec
from hybridcomp.collectives.engine.programs import Programs
from hybridcomp.torch.hook import links, reduce_tasks
from tests.torch.cases.hook import BACKENDS, group, hooked, policy, step
from tests.torch.models.ddp import assert_near, batch, loss_of


def parameters(ddp: DistributedDataParallel) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in ddp.module.named_parameters()}


def case_a_gradient_scaler_skips_a_step_on_every_rank() -> None:
    for backend in BACKENDS:
        for codec, form in (
            ("int8", "ef"),
            ("topk:ratio=0.01", "ef"),
            ("powersgd:rank=2", "ef"),
            ("int4", "loco"),
        ):
            ddp = hooked(backend, policy(codec, feedback=form))
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            for i in range(3):
                before = {name: p.clone() for name, p in parameters(ddp).items()}
                x, y = (t.chunk(dist.get_world_size())[dist.get_rank()] for t in batch(60))
                overflows = i == 1 and dist.get_rank() == dist.get_world_size() - 1
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    loss = loss_of(ddp(x * (float("inf") if overflows else 1.0)), y)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                kept = all(torch.equal(p, before[name]) for name, p in parameters(ddp).items())
                assert kept == (i == 1), (backend, codec, i)
                assert scaler.get_scale() == (1024.0 if i < 1 else 512.0)
            assert all(torch.isfinite(p).all() for p in ddp.parameters())


def case_options_of_ddp() -> None:
    for options in (
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb": 1000},
        {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
    ):
        for backend in BACKENDS:
            ddp = hooked(backend, policy("topk:ratio=1.0", feedback=True, min_bytes=0), **options)
            for _ in range(3):
                assert_near(step(ddp), 2e-6, rows=60)


def case_two_modules_at_once() -> None:
    """One backward pass through two DDP modules whose hooks share a process group."""
    for backend in BACKENDS:
        first, second = (hooked(backend, "int8", bucket_cap_mb=0.05) for _ in range(2))
        x, y = (t.chunk(dist.get_world_size())[dist.get_rank()] for t in batch(60))
        for _ in range(3):
            for ddp in (first, second):
                ddp.zero_grad()
            (loss_of(first(x), y) + loss_of(second(x), y)).backward()
        for one, other in zip(first.parameters(), second.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)


def case_a_bucket_travels_while_the_next_is_computed() -> None:
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            time.sleep(0.5)
            return grad

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(Slow.apply(self.first(x)))

    for backend in BACKENDS:
        ddp = hooked(backend, policy("int8", min_bytes=0), Net(), bucket_cap_mb=0.001)
        submitted, started = [], []
        original = ddp.state.submit

        def submit(bucket, submitted=submitted, original=original):
            submitted.append(time.monotonic())
            return original(bucket)

        ddp.state.submit = submit
        x, y = batch(4)
        for _ in range(2):  # in the first one the link is made
            submitted.clear()
            if backend == "hybridcomp":
                _note_ended(ddp.state._operations, started)
            elif ddp.state._open is not None:
                link = ddp.state._open[0].link
                inner = link.scatter

                def scatter(*args, started=started, inner=inner, **kwargs):
                    started.append(time.monotonic())
                    return inner(*args, **kwargs)

                link.scatter = scatter
            loss_of(ddp(x), y).backward()
        assert len(submitted) >= 2
        assert started[0] < submitted[-1] - 0.3, (backend, started, submitted)


def _note_ended(operations, ended: list[float]) -> None:
    """Note when an operation ends; nothing before the first bucket has come."""
    if operations is None:
        return
    original = operations._start_alike

    def start(*args):
        requests = original(*args)
        for request in requests:
            request.add_done_callback(lambda _: ended.append(time.monotonic()))
        return requests

    operations._start_alike = start


class Planted(hc.WireError):
    pass


def _fails(*args, **kwargs):
    raise Planted("planted")


# By backend: a policy, and what fails then on one rank.
FAILURES = {
    "gloo": [
        (codec, reduce_tasks.EncodedTask, what)
        for what in ("encode", "reduce")
        for codec in ("int8", "topk:ratio=0.1", "powersgd:rank=2")
    ],
    "hybridcomp": [
        ("int8+ef", ErrorFeedback, "memory"),
        ("int4", Programs, "find_joined"),
        ("powersgd:rank=2+ef", ErrorFeedback, "residual"),
        ("powersgd:rank=2", powersgd, "orthogonalize"),
        ("lossless", LosslessCodec, "encode_flat"),
        ("lossless", LosslessCodec, "decode_add_flat"),
    ],
}


def case_a_failure_of_one_rank_is_one_of_all() -> None:
    """Whoever cannot encode, add up or read says so to the others, which wait no longer than that."""
    victim = dist.get_world_size() - 1
    for backend, ways in FAILURES.items():
        for chosen, owner, what in ways:
            codec, _, form = chosen.partition("+")
            ddp = hooked(backend, policy(codec, form, min_bytes=0))
            step(ddp)
            broken = mock.patch.object(owner, what, _fails) if dist.get_rank() == victim else nullcontext()
            began = time.monotonic()
            with (
                broken,
                pytest.raises(Exception, match="planted" if dist.get_rank() == victim else f"rank {victim}"),
            ):
                step(ddp)
            assert time.monotonic() - began < 20
            dist.barrier(group("hybridcomp"))


def case_a_damaged_message_is_refused() -> None:
    size = dist.get_world_size()
    ddp = hooked("gloo", policy("int8", min_bytes=0))
    step(ddp)
    link = ddp.state._open[0].link
    original = link.gather

    def damaging(number, send, count, recv, rooms, *, exact):
        send[40] ^= 1
        return original(number, send, count, recv, rooms, exact=exact)

    if dist.get_rank() == 0:
        link.gather = damaging
    if dist.get_rank() == 0:
        step(ddp)  # its own copy was good
    else:
        with pytest.raises(Exception, match="damaged message"):
            step(ddp)
    dist.barrier(group("hybridcomp"))
    assert size > 1


def case_threads_end_with_their_state() -> None:
    def running() -> int:
        return sum(thread.name.startswith("hybridcomp-hook") for thread in threading.enumerate())

    ddp = hooked("gloo", "int8")
    step(ddp)
    before = running()
    assert before
    del ddp
    deadline = time.monotonic() + 10
    while running() >= before and time.monotonic() < deadline:
        import gc

        gc.collect()
        time.sleep(0.01)
    assert running() < before


def case_links_check_what_they_get() -> None:
    link = links.open_link(group("gloo"))
    assert link.ordered
    import numpy as np

    n = link.size
    sizes = [0 if q == link.rank else 64 * (1 + link.rank) for q in range(n)]
    send, recv = np.zeros(sum(sizes), np.uint8), np.zeros(64 * n, np.uint8)
    rooms = [0 if q == link.rank else 64 for q in range(n)]
    with pytest.raises(hc.MismatchError, match="has room for 64"):
        link.scatter(0, send, sizes, recv, rooms, exact=False)


def case_batches_are_in_the_trace() -> None:
    """On gloo the sums of a batch have spans of their own; the engine's steps encode as they sum."""
    for backend, spans in {"hybridcomp": {"encode", "decode"}, "gloo": {"encode", "sum", "decode"}}.items():
        with tempfile.TemporaryDirectory() as folder:
            hct.start_trace(folder)
            ddp = hooked(backend, policy("int8", min_bytes=0))
            step(ddp)
            path = hct.stop_trace()
            assert path is not None
            events = json.loads(path.read_text())["traceEvents"]
        mine = [
            e for e in events if e.get("name") == "all_reduce" and "0.up.weight" in e["args"].get("name", "")
        ]
        assert len(mine) == 1
        assert mine[0]["args"]["wire_bytes"] < 0.3 * mine[0]["args"]["uncompressed_bytes"]
        within = {
            e["name"]
            for e in events
            if e["ph"] == "X"
            and mine[0]["ts"] <= e["ts"]
            and e["ts"] + e["dur"] <= mine[0]["ts"] + mine[0]["dur"] + 1
        }
        assert spans | {"wire"} <= within
