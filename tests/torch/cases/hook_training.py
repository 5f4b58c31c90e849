"""The DDP hook in programs as people write them: accumulation, scalers, odd parameters, failures; over both links."""

import copy
import json
import os
import pickle
import sys
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hybridcomp as hc
import hybridcomp.torch as hct
from hybridcomp import version
from hybridcomp.codecs import ErrorFeedback
from hybridcomp.codecs.linear import powersgd
from hybridcomp.codecs.lossless import LosslessCodec
from hybridcomp.collectives.engine.programs import Programs
from hybridcomp.torch.exchange import communicator
from hybridcomp.torch.exchange.communicator import TorchCommunicator
from tests.torch.cases.hook import BACKENDS, group, hooked, policy, step
from tests.torch.models.ddp import assert_near, batch, loss_of, model
from tests.torch.models.parallel import assert_same_on_all_ranks


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


def case_a_state_is_copied_and_pickled() -> None:
    """Alone or with its module, as torch's own states: it goes on with the same bits, and the registry's memory."""
    for backend in BACKENDS:
        for chosen in (policy("int4", feedback=True, min_bytes=0), "powersgd:rank=2:min_bytes=0"):
            of = dist.group.WORLD if backend == "hybridcomp" else group(backend)
            ddp = DistributedDataParallel(model(), process_group=of)
            ddp.state = hct.HookState(chosen, module=ddp)
            ddp.register_comm_hook(ddp.state, hct.comm_hook)
            for _ in range(2):
                step(ddp)
            before = ddp.state.memory()
            assert before
            with (
                pytest.warns(UserWarning, match="without its process group")
                if backend == "gloo"
                else nullcontext()
            ):
                saved = pickle.dumps((ddp.state, hct.comm_hook))
            copied = (
                copy.deepcopy(ddp) if of is dist.group.WORLD else None
            )  # DDP copies modules of that group only
            expected = [step(ddp), step(ddp)]
            pairs = [(*pickle.loads(saved), DistributedDataParallel(model(), process_group=of))]
            if copied is not None:
                ((hook, state),) = copied._comm_hooks
                copied._comm_hooks.clear()
                pairs.append((state, hook, copied))
            for state, hook, module in pairs:
                assert hook is hct.comm_hook
                assert state.step == 2
                assert {name: a.tobytes() for name, a in state.memory().items()} == {
                    name: a.tobytes() for name, a in before.items()
                }
                known = set(hct.state_dict())  # without it: it is no hook of this program yet
                module.register_comm_hook(state, hook)
                assert set(hct.state_dict()) > known
                for want in expected:
                    for name, got in step(module).items():
                        assert torch.equal(got, want[name]), (backend, chosen, name)


def case_a_copied_state_needs_names() -> None:
    """A hook of one's own that has a copied state inside of its own tells it the module."""
    net = model()
    given = pickle.loads(pickle.dumps(hct.HookState("int8", module=net)))
    lost = pickle.loads(pickle.dumps(given))
    given.attach(net)

    def hook(states: list[hct.HookState], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return hct.comm_hook(states[0], bucket)

    for state in (given, lost):
        ddp = DistributedDataParallel(net)
        ddp.register_comm_hook([state], hook)
        with (
            nullcontext()
            if state is given
            else pytest.warns(UserWarning, match="knows no names of parameters")
        ):
            assert_same_on_all_ranks(step(ddp))
    assert list(given._names.values()) == [name for name, _ in net.named_parameters()]


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
        for _ in range(2):  # in the first one the communicator is made
            submitted.clear()
            if backend == "hybridcomp":
                _note_ended(ddp.state._operations, started)
            elif ddp.state._operations is not None:
                lanes = ddp.state._operations.comm._group.lanes  # all ranks are on one host
                inner = lanes.send

                def start(*args, started=started, inner=inner):
                    started.append(time.monotonic())
                    return inner(*args)

                lanes.send = start
            loss_of(ddp(x), y).backward()
        assert len(submitted) >= 2
        assert started[0] < submitted[-1] - 0.3, (backend, started, submitted)


def _note_ended(operations, ended: list[float]) -> None:
    """Note when an operation ends; nothing before the first bucket has come."""
    if operations is None:
        return
    original = operations._follow

    def follow(bucket, request):
        request.add_done_callback(lambda _: ended.append(time.monotonic()))
        original(bucket, request)

    operations._follow = follow


class Planted(hc.WireError):
    pass


def _fails(*args, **kwargs):
    raise Planted("planted")


# By backend: a policy, and the function that then fails on one rank.
FAILURES = {
    "gloo": [
        ("int8", Programs, "find_joined"),
        ("topk:ratio=0.1", communicator, "running"),
        ("lossless", LosslessCodec, "encode_flat"),
        ("lossless", LosslessCodec, "decode_add_flat"),
        ("int4+ef", ErrorFeedback, "memory"),
        ("powersgd:rank=2+ef", ErrorFeedback, "memory"),
        ("powersgd:rank=2", powersgd, "orthogonalize"),
        ("int8", TorchCommunicator, "start_carried"),
    ],
    "hybridcomp": [
        ("int8+ef", ErrorFeedback, "memory"),
        ("int4", Programs, "find_joined"),
        ("powersgd:rank=2+ef", ErrorFeedback, "memory"),
        ("powersgd:rank=2", powersgd, "orthogonalize"),
        ("lossless", LosslessCodec, "encode_flat"),
        ("lossless", LosslessCodec, "decode_add_flat"),
    ],
}


def case_a_failure_of_one_rank_is_one_of_all() -> None:
    """A rank that cannot encode, add up or read says so to the others, which wait no longer than that."""
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
    ddp = hooked("gloo", policy("int8", min_bytes=0))
    with mock.patch.dict(os.environ, {"HYBRIDCOMP_HOSTS": f"{dist.get_world_size()}x1"}):
        step(ddp)  # gloo carries what ranks of unlike hosts send
    exchanges = ddp.state._operations.comm._group
    original, sent = exchanges.start, []

    def damaging(send, *args):
        sent.append(1)
        if len(sent) % 2 == 0:  # the sums
            at = 0
            for _ in range(2):  # of all messages, one of which is the compiled operations', and of theirs
                at += 16 * (1 + int.from_bytes(send[at + 8 : at + 16].tobytes(), "little"))
            send[at + 44] ^= 1
        return original(send, *args)

    if dist.get_rank() == 0:
        exchanges.start = damaging
    # Rank 0 sends the first message of its packed ones to rank 1, and its own copy is good.
    if dist.get_rank() == 1:
        with pytest.raises(Exception, match="damaged message"):
            step(ddp)
    else:
        step(ddp)
    dist.barrier(group("hybridcomp"))


def case_python_does_as_much_for_many_parameters() -> None:
    """Over gloo, too, compiled code does the work of each parameter."""
    ours = str(Path(hc.__file__).parent)

    def calls(layers: int) -> int:
        ddp = hooked(
            "gloo", policy("int8", min_bytes=0), nn.Sequential(*[nn.Linear(64, 64) for _ in range(layers)])
        )
        counted = 0

        def profile(frame, event, _argument) -> None:
            nonlocal counted
            counted += event == "call" and frame.f_code.co_filename.startswith(ours)

        least = 1 << 30
        for _ in range(6):
            loss = ddp(torch.ones(4, 64)).sum()
            operations = ddp.state._operations
            if operations is not None:  # its thread is another one
                operations.comm._worker.submit(lambda: sys.setprofile(profile))
            counted = 0
            sys.setprofile(profile)
            loss.backward()
            sys.setprofile(None)
            ddp.state._operations.comm._worker.submit(lambda: sys.setprofile(None))
            least = min(least, counted)
        return least

    few, many = calls(2), calls(40)
    assert many <= few + 40, (few, many)


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


def case_a_rank_that_sends_too_much_is_named() -> None:
    """The rank's messages are longer than those that the others wait for, who see it before the bytes come."""
    backend = group("gloo")
    ddp = DistributedDataParallel(nn.Linear(64, 64), process_group=backend)
    state = hct.HookState(policy("topk:ratio=0.5", min_bytes=0), process_group=backend)
    ddp.register_comm_hook(state, hct.comm_hook)
    x = torch.randn(4, 64)
    ddp(x).square().mean().backward()
    exchanges, original = state._operations.comm._group, state._operations.comm._group.sizes
    if dist.get_rank() == 0:
        exchanges.sizes = lambda counts, **how: original([n + (1 << 20) for n in counts], **how)
    with pytest.raises(Exception, match=r"rank 0 sends rank . 1.* bytes, which has room for"):
        ddp(x).square().mean().backward()
    dist.barrier(group("hybridcomp"))


def case_policies_that_differ_are_an_error() -> None:
    backend = group("gloo")
    ddp = DistributedDataParallel(nn.Linear(8, 8), process_group=backend)
    chosen = "int8" if dist.get_rank() else "int4"
    ddp.register_comm_hook(hct.HookState(chosen, process_group=backend), hct.comm_hook)
    with pytest.raises(Exception, match=r"the policy of rank . differs from that of rank"):
        ddp(torch.randn(4, 8)).sum().backward()
    dist.barrier(group("hybridcomp"))


def case_versions_that_differ_are_an_error() -> None:
    backend = group("gloo")
    ddp = DistributedDataParallel(nn.Linear(8, 8), process_group=backend)
    ddp.register_comm_hook(hct.HookState("int8", process_group=backend), hct.comm_hook)
    mine = version.__version__
    version.__version__ = "0.0.1" if dist.get_rank() else mine
    try:
        with pytest.raises(Exception, match=r"the ranks have different versions of hybridcomp: .* on rank "):
            ddp(torch.randn(4, 8)).sum().backward()
    finally:
        version.__version__ = mine
    dist.barrier(group("hybridcomp"))


def case_a_trace_counts_the_calls_that_the_table_counts() -> None:
    def counted() -> int:
        return sum(row.calls for row in hct.stats() if row.axis == "dp")

    for backend in BACKENDS:
        with tempfile.TemporaryDirectory() as folder:
            before = counted()
            hct.start_trace(folder)
            step(hooked(backend, policy("int8", min_bytes=1 << 20)))  # what is small goes as one
            path = hct.stop_trace()
            assert path is not None
            events = json.loads(path.read_text())["traceEvents"]
        operations = [e["args"] for e in events if e.get("cat") == "operation" and e["args"]["axis"] == "dp"]
        assert sum(args.get("calls", 1) for args in operations) == counted() - before > len(operations)


def case_batches_are_in_the_trace() -> None:
    for backend in BACKENDS:
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
        assert {"encode", "decode", "wire"} <= within
