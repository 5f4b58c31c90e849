"""The DDP hook with buckets in a device's memory, beside one that copies them to the host: the same gradients.

With HYBRIDCOMP_TEST_DEVICE=cuda the modules are on the GPU. Else the emulation takes the memory of CPU tensors for a
device's; all but torch's own streams is then as on a GPU.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hybridcomp as hc
import hybridcomp.torch as hct
from hybridcomp.arrays import Flat, flatten
from hybridcomp.device import DeviceArray
from hybridcomp.torch import staging
from hybridcomp.torch.hook import operations
from tests.emulation.runtime import emulated
from tests.torch.cases.hook import BACKENDS, directly, group, policy
from tests.torch.models.parallel import assert_same_on_all_ranks

ON_GPU = os.environ.get("HYBRIDCOMP_TEST_DEVICE") == "cuda"
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
WIDTH = 48
CODECS = (
    ("none", None),
    ("int8:block=128", "ef"),
    ("topk:ratio=0.1", "ef21"),
    ("lattice:bits=8", "ef"),
)


def emulated_device(buffer: torch.Tensor, **how: bool) -> Flat:
    """Return a CPU tensor as memory of the emulation's."""
    flat = flatten(buffer, **how)
    device = emulated()
    device.emulator.checks(False)
    device.emulator.register(buffer.data_ptr(), flat.nbytes)
    array = DeviceArray(device, buffer.data_ptr(), flat.size, flat.dtype.storage, buffer)
    return flat._replace(data=array)


@contextmanager
def encoding(*, on_device: bool) -> Iterator[mock.Mock]:
    """Let buckets be encoded on the device, or all be copied to the host; gives what was asked for each."""
    where = emulated_device if on_device and not ON_GPU else flatten
    asked = mock.Mock(side_effect=where)
    kernels = mock.patch.object(staging, "_runs_kernels", return_value=on_device)
    alone = mock.patch.object(operations, "_on_host", return_value=False)  # as all buckets of CUDA tensors
    with kernels, alone, mock.patch.object(operations, "flatten", asked):
        yield asked


def gradients(
    backend: str, chosen: str, *, on_device: bool, dtype: torch.dtype = torch.float32, steps: int = 3
) -> list[dict[str, torch.Tensor]]:
    """Return the gradients of some steps; each rank has data of its own."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)).to(DEVICE, dtype)
    # Several buckets, the first of which is waiting for gradients while others are being averaged.
    ddp = DistributedDataParallel(net, process_group=group(backend), bucket_cap_mb=0.004)
    ddp.register_comm_hook(hct.HookState(chosen, module=ddp), hct.comm_hook)
    draw = torch.Generator().manual_seed(1 + dist.get_rank())
    found = []
    with encoding(on_device=on_device) as asked:
        for _ in range(steps):
            x = torch.randn(8, WIDTH, generator=draw).to(DEVICE, dtype)
            ddp.zero_grad()
            ddp(x).square().mean().backward()
            found.append({name: p.grad.detach().cpu().clone() for name, p in net.named_parameters()})
        assert asked.call_count > steps  # several, once DDP has rebuilt them
    return found


def assert_equal(chosen: str, backend: str, dtype: torch.dtype = torch.float32) -> None:
    mine = gradients(backend, chosen, on_device=True, dtype=dtype)
    theirs = gradients(backend, chosen, on_device=False, dtype=dtype)
    for step, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        assert_same_on_all_ranks(a)
        for name, grad in a.items():
            assert torch.equal(grad, b[name]), (backend, step, name)


def case_gradients_are_those_of_the_host() -> None:
    for backend in BACKENDS:
        for codec, form in CODECS:
            assert_equal(policy(codec, form or False, min_bytes=1024), backend)


def case_half_precision() -> None:
    assert_equal(policy("int4:block=64", "ef", min_bytes=1024), "hybridcomp", torch.bfloat16)


def case_momenta_are_those_of_the_host() -> None:
    """Of 1-bit Adam after its warm-up, whose gradients the kernels blend with the momentum as they correct them."""
    for backend in BACKENDS:
        ends = []
        for on_device in (True, False):
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)).to(
                DEVICE
            )
            ddp = DistributedDataParallel(net, process_group=group(backend), bucket_cap_mb=0.004)
            optimizer = hct.OnebitAdam(ddp.parameters(), lr=1e-3, freeze_step=2, warmup="int8:min_bytes=1024")
            optimizer.register(ddp)
            draw = torch.Generator().manual_seed(1 + dist.get_rank())
            with encoding(on_device=on_device):
                for _ in range(5):
                    optimizer.zero_grad()
                    ddp(torch.randn(8, WIDTH, generator=draw).to(DEVICE)).square().mean().backward()
                    optimizer.step()
            blends = optimizer._exchange.momentum.feedback._blends
            assert {key[1] for key in blends} == {
                name for name, p in net.named_parameters() if p.nbytes >= 256
            }
            assert all(isinstance(momentum, DeviceArray) == on_device for momentum, _ in blends.values())
            ends.append({name: p.detach().cpu().clone() for name, p in net.named_parameters()})
            assert_same_on_all_ranks(ends[-1])
        for name, value in ends[0].items():
            assert torch.equal(value, ends[1][name]), (backend, name)


def case_memory_is_saved() -> None:
    """A run that goes on from a saved state, on a device or on the host, has the bits of one that did not stop."""
    chosen = policy("int8:block=128", "ef", min_bytes=1024)
    whole = gradients("hybridcomp", chosen, on_device=True, steps=4)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)).to(DEVICE)
    draw = torch.Generator().manual_seed(1 + dist.get_rank())
    saved = None
    for step in range(4):
        ddp = DistributedDataParallel(net, process_group=group("hybridcomp"), bucket_cap_mb=0.004)
        hook = hct.HookState(chosen, module=ddp)
        if saved is not None:
            hook.load_memory(saved)
        ddp.register_comm_hook(hook, hct.comm_hook)
        with encoding(on_device=step != 2):
            x = torch.randn(8, WIDTH, generator=draw).to(DEVICE)
            ddp.zero_grad()
            ddp(x).square().mean().backward()
        saved = hook.memory()
        for name, p in net.named_parameters():
            assert torch.equal(p.grad.cpu(), whole[step][name]), (step, name)


def case_a_failure_reaches_all_ranks() -> None:
    """The algorithm is one in which every rank needs what the one that fails would have sent next."""
    chosen = policy("int8:block=128", min_bytes=1024)
    failing = mock.patch(
        "hybridcomp.collectives.device.data_path.divide", side_effect=MemoryError("none is left")
    )
    first = dist.get_rank() == 0
    with (
        directly(),
        failing if first else nullcontext(),
        pytest.raises(
            (RuntimeError, hc.HybridcompError), match="none is left" if first else r"rank 0.* failed"
        ),
    ):
        gradients("hybridcomp", chosen, on_device=True)


def case_a_rank_with_its_buckets_on_the_host_is_named() -> None:
    """Over the backend all ranks must have theirs in one kind of memory."""
    said = "on a device on rank 0, 1 and in host memory on rank 2"
    with pytest.raises((RuntimeError, hc.HybridcompError), match=said):
        gradients("hybridcomp", policy("int8:block=128", min_bytes=1024), on_device=dist.get_rank() < 2)
