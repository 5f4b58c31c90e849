"""Groups of groups: overlapping, split, in meshes; their timeouts, sequence and ends. Four ranks, policy none."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import hybridcomp.torch as hct
from hybridcomp import CollectiveTimeoutError, MismatchError
from hybridcomp.collectives.execution import progress as engine
from tests.torch.cases.collectives import raises, rank, size


def total(group: dist.ProcessGroup) -> float:
    """Return the sum of the global ranks of a group's members, by an all-reduce."""
    t = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(t, group=group)
    return t.item()


def case_overlapping_groups() -> None:
    members = [[0, 1, 2], [1, 2, 3], [0, 3], [3, 2, 1, 0]]
    groups = [dist.new_group(ranks, sort_ranks=False) for ranks in members]
    mine = [(group, ranks) for group, ranks in zip(groups, members, strict=True) if dist.get_rank() in ranks]
    tensors = [torch.full((50_000,), float(rank())) for _ in mine]
    order = list(range(len(mine)))
    works = {
        k: dist.all_reduce(tensors[k], group=mine[k][0], async_op=True)
        for k in (order if rank() % 2 else order[::-1])
    }
    for k in order:
        works[k].wait()
        assert tensors[k][-1].item() == sum(mine[k][1])
    backwards = groups[3]
    assert dist.get_rank(backwards) == size() - 1 - rank()
    out = [torch.empty(1) for _ in range(size())]
    dist.all_gather(out, torch.tensor([float(rank())]), group=backwards)
    assert [int(t.item()) for t in out] == [3, 2, 1, 0]


def case_new_subgroups() -> None:
    mine, groups = dist.new_subgroups(2)
    assert len(groups) == 2
    assert total(mine) == (1 if rank() < 2 else 5)
    mine, groups = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    assert total(mine) == (2 if rank() % 2 == 0 else 4)
    assert [dist.get_process_group_ranks(group) for group in groups if group is mine] == [
        [rank() % 2, rank() % 2 + 2]
    ]
    with raises(ValueError, "Rank 1", "both"):
        dist.new_subgroups_by_enumeration([[0, 1], [1, 2]])


@contextmanager
def accelerator() -> Iterator[None]:
    """Stand in for a machine with a GPU, to which ``init_process_group(device_id=...)`` has bound the default group."""
    world = dist.group.WORLD
    gpu = torch.device("cuda", 0)
    world.eager_connect_single_device(gpu)
    with mock.patch.multiple(
        torch.accelerator,
        is_available=mock.Mock(return_value=True),
        current_accelerator=mock.Mock(return_value=gpu),
    ):
        yield
    world.bound_device_id = None


def case_split_group() -> None:
    with accelerator():
        pairs = dist.split_group(split_ranks=[[0, 1], [2, 3]], group_desc="mesh_tp")
        assert pairs.axis == "tp"
        assert total(pairs) == (1 if rank() < 2 else 5)
        again = dist.split_group(split_ranks=[[0, 3], [1, 2]], timeout=timedelta(seconds=7))
        assert (again.comm.timeout, again.axis) == (7, dist.group.WORLD.axis)
        assert again.group_name != pairs.group_name
        assert total(again) == 3
        single = dist.split_group(pairs, split_ranks=[[1]])
        inside = isinstance(single, dist.ProcessGroup)  # elsewhere None, or a number from torch 2.14 on
        assert inside == (dist.get_rank(pairs) == 1)
        if inside:
            assert total(single) == rank()
            assert dist.get_world_size(single) == 1
        told = dist.split_group(split_ranks=[[0, 1, 2, 3]], pg_options=hct.Options(policy="int8", axis="dp"))
        assert (told.axis, told.comm.policy.name != dist.group.WORLD.comm.policy.name) == ("dp", True)
        both = [
            dist.split_group(told, split_ranks=[[0, 1, 2, 3]], group_desc=desc) for desc in (None, "mesh_cp")
        ]
        assert [group.axis for group in both] == ["dp", "cp"]
        for group in (single, again, pairs, told, *both):
            if isinstance(group, dist.ProcessGroup):
                dist.destroy_process_group(group)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        assert [mesh[name].get_group().axis for name in ("dp", "tp")] == ["dp", "tp"]
        assert total(mesh["tp"].get_group()) == (1 if rank() < 2 else 5)
        # Others than its members take no part in a group that is made while the default one is bound.
        inner = dist.new_group([1, 2])
        if rank() in (1, 2):
            assert total(inner) == 3


def case_meshes_are_sliced_and_flattened() -> None:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
    assert total(mesh["tp"].get_group()) == (1 if rank() < 2 else 5)
    assert total(mesh["dp"].get_group()) == (2 if rank() % 2 == 0 else 4)
    flat = mesh["dp", "cp"]._flatten("dp_cp")
    assert flat.get_group().axis == "dp_cp"
    assert total(flat.get_group()) == (2 if rank() % 2 == 0 else 4)
    everything = mesh._flatten("world")
    assert total(everything.get_group()) == 6
    assert list(mesh.get_coordinate()) == [rank() // 2, 0, rank() % 2]
    from_group = DeviceMesh.from_group(mesh["dp"].get_group(), "cpu")
    assert from_group.size() == 2
    assert from_group.get_group() is mesh["dp"].get_group()
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    whole = torch.arange(32.0).view(8, 4)
    spread = distribute_tensor(whole, mesh, [Shard(0), Replicate(), Shard(1)])
    assert spread.to_local().shape == (4, 2)
    assert torch.equal(spread.full_tensor(), whole)
    assert torch.equal(
        spread.redistribute(placements=[Replicate(), Replicate(), Shard(0)]).full_tensor(), whole
    )
    assert isinstance(spread.sum(), DTensor)
    assert spread.sum().full_tensor().item() == whole.sum()


def case_timeout_of_a_group_and_of_a_wait() -> None:
    soon, later = timedelta(seconds=0.3), timedelta(seconds=30)

    def of_the_group(group: dist.ProcessGroup) -> None:
        dist.distributed_c10d._set_pg_timeout(soon, group)
        dist.all_reduce(torch.ones(2), group=group)

    for ask in (
        of_the_group,
        lambda group: dist.barrier(group, timeout=soon),
        lambda group: group.allreduce([torch.ones(2)], timeout=soon).wait(),
        lambda group: group.barrier(timeout=later).wait(soon),
    ):
        group = dist.new_group(timeout=later)
        if rank() == 0:
            began = time.monotonic()
            with raises(CollectiveTimeoutError, "timeout of 0.3 s"):
                ask(group)
            assert 0.25 < time.monotonic() - began < 10
            with raises(RuntimeError, "failed"):  # what programs for torch's own backends expect
                group.monitored_barrier(timedelta(seconds=0.1))
        dist.barrier()
        # Rank 0 would wait seconds for what nobody answers, in each group, and at its exit for the last one's.
        with mock.patch("hybridcomp.torch.backend.group._LAST_SECONDS", 0.1):
            dist.destroy_process_group(group)
    engine._EXIT_SECONDS = 0.1


def case_a_group_after_one_that_failed() -> None:
    """Messages that a rank posted before it gave up must not be taken for those of a later group."""
    for _ in range(4):
        group = dist.new_group()
        if rank() == 0:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.3), group)
            with raises(CollectiveTimeoutError, "barrier"):
                dist.barrier(group)
        dist.barrier()
        dist.destroy_process_group(group)
        later = dist.new_group([1, 2])
        if rank() in (1, 2):
            out = [torch.zeros(2) for _ in range(2)]
            dist.all_to_all(out, [torch.full((2,), float(rank()))] * 2, group=later)
            assert [t.tolist() for t in out] == [[1, 1], [2, 2]]
        dist.barrier()
        if rank() in (1, 2):
            dist.destroy_process_group(later)


def case_groups_of_the_same_ranks_are_apart() -> None:
    """The third on is made from what the ranks kept of the second; what fails on all of them leaves that as it was."""
    for members in ([0, 1, 2, 3], [3, 1], [2]):
        groups = [dist.new_group(members, sort_ranks=False) for _ in range(4)]
        with raises(MismatchError, "policies") if len(members) == 4 else nullcontext():
            dist.new_group(
                members, pg_options=hct.Options(policy=f"int{4 + 4 * (rank() % 2)}"), sort_ranks=False
            )
        groups.append(dist.new_group(members, sort_ranks=False))
        if rank() not in members:
            continue
        tensors = [torch.full((1000,), float(k + rank())) for k in range(len(groups))]
        order = [*range(len(groups))][:: -1 if rank() % 2 else 1]
        works = {k: dist.all_reduce(tensors[k], group=groups[k], async_op=True) for k in order}
        for k, work in works.items():
            work.wait()
            assert tensors[k][0].item() == sum(members) + k * len(members)
        for group in groups:  # where two of its ranks alone take part
            if rank() == members[0]:
                dist.send(torch.ones(2), members[-1], group) if len(members) > 1 else None
            elif rank() == members[-1]:
                dist.recv(torch.zeros(2), members[0], group)
        for group in groups:
            dist.destroy_process_group(group)
    dist.barrier()


def case_what_torch_asks_of_a_backend() -> None:
    world = dist.group.WORLD
    assert dist.get_backend(world) == world.name() == "hybridcomp"
    assert world._get_backend(torch.device("cpu")) is world
    assert not world._has_hooks()
    assert world.get_group_store().get("hybridcomp/0") == b"1"
    before = world._get_sequence_number_for_group()
    dist.barrier()
    works = [dist.all_reduce(torch.ones(2), async_op=True) for _ in range(2)]
    world._wait_for_pending_works()
    assert all(work.is_completed() for work in works)
    assert world._get_sequence_number_for_group() == before + 3
    assert dist.distributed_c10d._device_capability(world)[0] == "cpu"


def case_a_blocking_all_reduce_is_one_call_of_mpi() -> None:
    group = dist.new_group()
    comm = group.comm
    values = torch.arange(1000.0) + rank()
    wanted = size() * torch.arange(1000.0) + sum(range(size()))
    with mock.patch.object(comm, "start_allreduce", side_effect=AssertionError("not at once")):
        for t in (
            values.clone(),
            values.double(),
            values.long(),
            values.view(10, 100).clone(),
            values.clone()[::2],
        ):
            dist.all_reduce(t, group=group)
            assert torch.equal(t.flatten().float(), wanted if t.numel() == 1000 else wanted[::2])
        with raises(AssertionError, "not at once"):
            dist.all_reduce(values.clone(), group=group, async_op=True)
    assert sum(row.calls for row in comm.stats()) == 5
    # Operations that MPI cannot do alone take the usual way.
    for t in (values.bfloat16(), values.clone()):
        dist.all_reduce(t, dist.ReduceOp.AVG, group=group)
        assert torch.allclose(t.float(), wanted / size(), rtol=1e-2)


def case_what_is_started_to_be_waited_for_ends_without_a_wait() -> None:
    opts = dist.AllreduceOptions()
    opts.asyncOp = False
    time.sleep(0.1 * rank())  # the first have nothing to take yet
    t = torch.ones(100_000, dtype=torch.bfloat16)
    work = dist.group.WORLD.allreduce([t], opts)
    deadline = time.monotonic() + 20
    while not all(request.done for request in work.requests) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert all(request.done for request in work.requests)
    work.wait()
    assert torch.equal(t, torch.full_like(t, size()))


def case_a_destroyed_group_says_so() -> None:
    group = dist.new_group()
    work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
    name = group.group_name
    dist.destroy_process_group(group)
    assert work.is_completed()
    with raises(RuntimeError, name, "destroyed"):
        group.allreduce([torch.ones(2)])
    with raises(RuntimeError, "destroyed"):
        group.monitored_barrier()
    group.shutdown()  # once more
