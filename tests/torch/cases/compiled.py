"""Programs that are compiled, before and after their modules are wrapped: three steps, parameters against gloo's."""

import functools
import inspect
import timeit
from collections.abc import Callable

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

import hybridcomp.torch as hct
from hybridcomp.torch.untraced import untraced

STEPS = 3
Wrap = Callable[[nn.Module, dist.ProcessGroup], nn.Module]


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))


@functools.cache
def gloo() -> dist.ProcessGroup:
    return dist.new_group(backend="gloo")


def trained(made: nn.Module) -> list[torch.Tensor]:
    """Return the parameters after some steps, each rank with data of its own."""
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        made(torch.randn(4, 16, generator=draw)).square().mean().backward()
        optimizer.step()
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in made.parameters()]
    return [p.detach().clone() for p in whole]


def assert_alike(got: list[torch.Tensor], want: list[torch.Tensor], bound: float = 1e-6) -> None:
    for mine, theirs in zip(got, want, strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=bound), (mine - theirs).abs().max()


def check(wrap: Wrap, compiler: str, *, outside: bool) -> None:
    """Compare a program on the backend with the same on gloo that is not compiled."""

    def compiled(module: nn.Module) -> nn.Module:
        return torch.compile(module, backend=compiler)  # type: ignore[return-value]

    torch._dynamo.reset()
    plain = trained(wrap(model(), gloo()))
    world = dist.group.WORLD
    made = compiled(wrap(model(), world)) if outside else wrap(compiled(model()), world)
    assert_alike(trained(made), plain)


def ddp(module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    return DDP(module, process_group=group)


def hooked(module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    made = DDP(module, process_group=group)
    made.register_comm_hook(hct.HookState("none", module=made), hct.comm_hook)
    return made


def fsdp(module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    mesh = DeviceMesh.from_group(group, "cpu")
    inner = getattr(module, "_orig_mod", module)
    for layer in inner:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def compressed_fsdp(module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    made = fsdp(module, group)
    hct.compress_fsdp(made, "none")
    return made


def tensor_parallel(module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    if hasattr(module, "_orig_mod"):
        plan = {f"_orig_mod.{name}": how for name, how in plan.items()}
    return parallelize_module(module, DeviceMesh.from_group(group, "cpu"), plan)


def case_ddp() -> None:
    for wrap in (ddp, hooked):
        for outside in (True, False):
            check(wrap, "aot_eager", outside=outside)


def case_ddp_inductor() -> None:
    check(hooked, "inductor", outside=True)


def case_fsdp() -> None:
    for wrap in (fsdp, compressed_fsdp):
        for outside in (True, False):
            check(wrap, "aot_eager", outside=outside)


def case_tensor_parallel() -> None:
    torch.manual_seed(0)
    for outside in (True, False):
        check(tensor_parallel, "aot_eager", outside=outside)


def case_pipeline() -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    def run(group: dist.ProcessGroup, how: Callable[[nn.Module], nn.Module]) -> list[torch.Tensor]:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        torch.manual_seed(5 + rank)
        module = how(nn.Linear(16, 16))
        stage = PipelineStage(module, rank, ranks, torch.device("cpu"), group=group)
        schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.MSELoss())
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        torch.manual_seed(7)
        for _ in range(STEPS):
            optimizer.zero_grad()
            x = [torch.randn(4, 16)] if rank == 0 else []
            schedule.step(*x, **({"target": torch.zeros(4, 16)} if rank == ranks - 1 else {}))
            optimizer.step()
        return [p.detach().clone() for p in module.parameters()]

    torch._dynamo.reset()
    want = run(gloo(), lambda module: module)
    compiled = functools.partial(torch.compile, backend="aot_eager")
    assert_alike(run(dist.group.WORLD, compiled), want)


def case_a_call_of_a_wrapped_method_takes_two_microseconds_more_at_most() -> None:
    """Bound what keeping the compiler out costs each call of a group's methods, by the least of many tries."""

    class Plain:
        def call(self) -> None: ...

    @untraced
    class Wrapped:
        def call(self) -> None: ...

    assert Wrapped.call is not inspect.unwrap(Wrapped.call), "the compiler is loaded, and the method wrapped"
    plain, wrapped = (
        min(timeit.repeat(one().call, number=200, repeat=200)) / 200 for one in (Plain, Wrapped)
    )
    assert wrapped - plain < 2e-6, f"{(wrapped - plain) * 1e6:.2f} us"
