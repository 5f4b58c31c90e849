"""Pipelines, tensor, sequence, expert and context parallelism: forward and backward told apart, on four ranks."""

import warnings

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import hybridcomp.torch as hct
from tests.torch.models.ddp import batch, loss_of, model, reference_gradients, relative_error
from tests.torch.models.fsdp import policy_of

BLOCKS = 8
FORWARD = policy_of('[pp]\nforward = "int8:block=64"\n[tp]\nforward = "int8:block=64"\n')
BACKWARD = policy_of('[pp]\nbackward = "int8:block=64"\n[tp]\nbackward = "int8:block=64"\n')
BOTH = policy_of('[ep]\ncodec = "int8:block=64"\n[cp]\ncodec = "int8:block=64"\n')


def group_of(policy, axis: str):
    return dist.new_group(pg_options=hct.Options(policy=policy, axis=axis))


def calls(group, op: str) -> tuple[int, int]:
    """Return the numbers of compressed and uncompressed operations of floating-point tensors so far."""
    rows = [r for r in group.comm.stats() if r.op == op and "not floating-point" not in r.reason]
    return sum(r.calls for r in rows if r.codec != "none"), sum(r.calls for r in rows if r.codec == "none")


def pipeline(policy, kind, micro_batches: int = 8):
    """Train a pipeline of one or two stages a rank; return the group and this rank's gradients by name."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = group_of(policy, "pp")
    blocks = model(BLOCKS)
    numbers = [rank] if kind is Schedule1F1B else [rank, rank + ranks]
    per = BLOCKS // (ranks * len(numbers))
    parts = {n: blocks[n * per : (n + 1) * per] for n in numbers}
    count = ranks * len(numbers)
    stages = [PipelineStage(parts[n], n, count, torch.device("cpu"), group=group) for n in numbers]
    schedule = kind(stages[0] if len(stages) == 1 else stages, micro_batches, loss_fn=loss_of)
    x, y = batch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schedule.step(*((x,) if rank == 0 else ()), **({"target": y} if rank == ranks - 1 else {}))
    found = {name: p.grad for part in parts.values() for name, p in part.named_parameters()}
    return group, found


def expected_gradients() -> dict[str, torch.Tensor]:
    whole = model(BLOCKS)
    x, y = batch()
    loss_of(whole(x), y).backward()
    return {name: p.grad for name, p in whole.named_parameters()}


def case_pipelines() -> None:
    rank, ranks, micro = dist.get_rank(), dist.get_world_size(), 8
    expected = expected_gradients()
    for kind in (Schedule1F1B, ScheduleInterleaved1F1B):
        # Sends of this rank's stages: every stage but the last sends activations on, every one but the first gradients.
        stages = [rank] if kind is Schedule1F1B else [rank, rank + ranks]
        last = ranks * len(stages) - 1
        forward, backward = (micro * sum(s != end for s in stages) for end in (last, 0))
        for policy in (FORWARD, BACKWARD):
            group, got = pipeline(policy, kind, micro)
            compressed, rest = calls(group, "send")
            mine, others = (forward, backward) if policy is FORWARD else (backward, forward)
            assert compressed == mine, (kind, policy.name, compressed, rest, mine)
            assert rest >= others
            for name, grad in got.items():
                assert relative_error(grad, expected[name]) < 0.08, (kind, name)


def case_a_pipeline_of_its_own_says_the_phase() -> None:
    group = group_of(BACKWARD, "pp")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    up, down = (rank + 1) % ranks, (rank - 1) % ranks
    for name, to, source in (("forward", down, up), ("backward", up, down)):
        before = calls(group, "send")
        got = torch.empty(256)
        with hct.in_phase(name):
            sent = dist.isend(torch.full((256,), float(rank)), group_dst=to, group=group)
        dist.irecv(got, group_src=source, group=group).wait()
        sent.wait()
        assert torch.allclose(got, torch.tensor(float(source)))
        compressed, rest = calls(group, "send")
        assert (compressed - before[0], rest - before[1]) == ((0, 1) if name == "forward" else (1, 0))


def case_tensor_and_sequence_parallel() -> None:
    ranks = dist.get_world_size()
    expected = reference_gradients()
    for policy in (FORWARD, BACKWARD):
        group = group_of(policy, "tp")
        # torch takes meshes of the same ranks and names for one, and sends by the first one's group.
        name = "tp_forward" if policy is FORWARD else "tp_backward"
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(name,))
        net = model()
        plan = {}
        for name, _ in net.named_children():
            plan[f"{name}.norm"] = SequenceParallel(sequence_dim=0)
            plan[f"{name}.up"] = ColwiseParallel(input_layouts=Shard(0))
            plan[f"{name}.down"] = RowwiseParallel(output_layouts=Shard(0))
        parallelize_module(net, mesh, plan)
        x, y = (t.chunk(ranks)[dist.get_rank()] for t in batch())
        out = x
        for block in net:  # activations between blocks stay split over the rows
            out = out + block.down(torch.tanh(block.up(block.norm(out)))).reshape(x.shape)
        (loss_of(out, y) / ranks).backward()
        for op in ("all_gather", "reduce_scatter"):
            compressed, rest = calls(group, op)
            assert compressed >= 4, (policy.name, op, compressed, rest)
            assert rest >= 3, (policy.name, op, compressed, rest)
        assert calls(group, "broadcast")[0] == 0  # broadcasts of parameters, when they are distributed
        for name, p in net.named_parameters():
            if "up.weight" in name or "down.weight" in name:
                assert relative_error(p.grad.full_tensor(), expected[name]) < 0.05, (policy.name, name)


def case_recomputed_activations_are_forward() -> None:
    found = {}
    for checkpointed in (False, True):
        for policy in (FORWARD, BACKWARD):
            group = group_of(policy, "tp")
            name = f"again_{checkpointed}_{policy.compresses and policy is FORWARD}"
            mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(name,))
            net = model()
            plan = {}
            for block, _ in net.named_children():
                plan |= {f"{block}.up": ColwiseParallel(), f"{block}.down": RowwiseParallel()}
            parallelize_module(net, mesh, plan)
            x, y = batch()
            x = checkpoint(net, x, use_reentrant=False) if checkpointed else net(x)
            loss_of(x, y).backward()
            found[checkpointed, policy is FORWARD] = calls(group, "all_reduce")
    (forward, backward), again = found[False, True], found[True, True]
    assert forward == 4
    assert again == (forward + 3, backward), found  # all but the last block's output are computed again
    assert found[True, False] == (backward, forward + 3), found


class Experts(nn.Module):
    """One expert a rank: tokens go to their expert, and what it makes of them comes back."""

    def __init__(self, group, counts: torch.Tensor) -> None:
        super().__init__()
        self.group = group
        self.counts = counts  # tokens from rank to rank
        torch.manual_seed(dist.get_rank())
        self.expert = nn.Linear(64, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rank = dist.get_rank()
        out, back = self.counts[rank].tolist(), self.counts[:, rank].tolist()
        there = funcol.all_to_all_single_autograd(tokens, back, out, self.group)
        return funcol.all_to_all_single_autograd(torch.tanh(self.expert(there)), out, back, self.group)


def case_expert_parallel() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    counts = torch.tensor([[7 + (3 * q + r) % 5 for q in range(ranks)] for r in range(ranks)])
    tokens = torch.randn(int(counts[rank].sum()), 64, generator=torch.Generator().manual_seed(rank))
    found = []
    for policy in ("none", BOTH):
        group = group_of(policy, "ep")
        layer = Experts(group, counts)
        x = tokens.clone().requires_grad_()
        out = layer(x)
        (out**2).mean().backward()
        found.append((out.detach(), x.grad, layer.expert.weight.grad))
        compressed, rest = calls(group, "all_to_all")
        assert (compressed, rest) == ((0, 4) if policy == "none" else (4, 0)), (compressed, rest)
    for got, exact in zip(found[1], found[0], strict=True):
        assert 0 < relative_error(got, exact) < 0.05


def case_ring_attention_passes_through() -> None:
    """torch's ring attention of context parallelism, with the CPU's kernel, for which it has no dispatch of its own."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    ranks, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 4, 64, 16, generator=generator) for _ in range(3))
    expected = nn.functional.scaled_dot_product_attention(q, k, v).chunk(ranks, dim=2)[rank]
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    before = _attention._cp_options.enable_load_balance, _attention._cp_options.rotate_method
    _attention._cp_options.enable_load_balance = False
    try:
        for policy, least, most in (("hybrid", 0, 1e-5), (BOTH, 1e-5, 0.05)):
            for method, op in (("alltoall", "all_to_all"), ("allgather", "all_gather")):
                _attention.set_rotate_method(method)
                group = group_of(policy, "cp")
                mine = [t.chunk(ranks, dim=2)[rank] for t in (q, k, v)]
                got, *_ = _attention._templated_ring_attention(group, 2, kernel, *mine)
                assert least <= relative_error(got, expected) < most, (policy, method)
                assert calls(group, op)[0 if policy is BOTH else 1] >= 1
    finally:
        _attention._cp_options.enable_load_balance, _attention._cp_options.rotate_method = before


def case_gathered_keys_and_values_pass_through() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(4)
    whole = [torch.randn(64, 2, 4, 16, generator=generator) for _ in range(3)]

    def attend(q, k, v) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(*(t.permute(1, 2, 0, 3) for t in (q, k, v)))

    exact = [t.clone().requires_grad_() for t in whole]
    expected = attend(*exact)
    (expected**2).sum().backward()
    group = group_of("hybrid", "cp")
    mine = [t.chunk(ranks)[rank].clone().requires_grad_() for t in whole]
    # The second is the name of versions before 2.13.
    gather = getattr(funcol, "all_gather_single_autograd", None) or funcol.all_gather_tensor_autograd
    k, v = (gather(t, 0, group) for t in mine[1:])
    out = attend(mine[0], k, v)
    (out**2).sum().backward()
    assert relative_error(out, expected.chunk(ranks, dim=2)[rank]) < 1e-5
    for got, all_of_it in zip(mine, exact, strict=True):
        assert relative_error(got.grad, all_of_it.grad.chunk(ranks)[rank]) < 1e-5
