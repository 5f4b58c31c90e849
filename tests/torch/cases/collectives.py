"""Every collective against values computed from the ranks; policy none."""

import operator
import re
from functools import reduce

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.distributed import ReduceOp

import hybridcomp.torch as hct

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def data(r: int, n: int = 7, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return small integers that differ by rank and place; exact in every dtype, and so are their sums and products."""
    return ((torch.arange(n) + r) % 3 + 1).to(dtype)


def fold(op, n: int = 7, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return reduce(op, [data(r, n, dtype) for r in range(size())])


def raises(kind: type[Exception], *words: str):
    """Expect an error of that kind whose message has these words in this order."""
    return pytest.raises(kind, match=".*".join(map(re.escape, words)))


def case_all_reduce_every_dtype_and_operation() -> None:
    operations = {
        ReduceOp.SUM: operator.add,
        ReduceOp.PRODUCT: operator.mul,
        ReduceOp.MIN: torch.minimum,
        ReduceOp.MAX: torch.maximum,
    }
    bitwise = {ReduceOp.BAND: operator.and_, ReduceOp.BOR: operator.or_, ReduceOp.BXOR: operator.xor}
    for dtype in FLOATS + INTEGERS:
        table = operations | (bitwise if dtype in INTEGERS else {})
        for op, expected in table.items():
            t = data(rank(), dtype=dtype)
            dist.all_reduce(t, op)
            assert torch.equal(t, fold(expected, dtype=dtype)), (dtype, op, t)


def case_average() -> None:
    for dtype in FLOATS:
        t = data(rank(), dtype=dtype)
        dist.all_reduce(t, ReduceOp.AVG)
        assert torch.equal(t, (fold(operator.add, dtype=torch.float64) / size()).to(dtype)), (dtype, t)


def case_booleans() -> None:
    mine = torch.tensor([rank() == 0, True, False])
    expected = {
        ReduceOp.SUM: [True, True, False],
        ReduceOp.MAX: [True, True, False],
        ReduceOp.BOR: [True, True, False],
        ReduceOp.MIN: [size() == 1, True, False],
        ReduceOp.PRODUCT: [size() == 1, True, False],
        ReduceOp.BAND: [size() == 1, True, False],
        ReduceOp.BXOR: [True, size() % 2 == 1, False],
    }
    for op, values in expected.items():
        t = mine.clone()
        dist.all_reduce(t, op)
        assert t.tolist() == values, (op, t)


def case_premultiplied_sum() -> None:
    out = torch.empty(3)
    dist.reduce_scatter_tensor(out, data(rank(), 3 * size()), ReduceOp.PREMUL_SUM(0.5))
    expected = fold(operator.add, 3 * size()) / 2
    assert torch.equal(out, expected[3 * rank() : 3 * rank() + 3])


def case_unsupported_operation_is_named() -> None:
    with raises(NotImplementedError, "torch.float32", "BAND"):
        dist.all_reduce(torch.ones(3), ReduceOp.BAND)
    with raises(NotImplementedError, "torch.uint16", "AVG"):
        dist.all_reduce(torch.ones(3).to(torch.uint16), ReduceOp.AVG)
    with raises(NotImplementedError, "torch.complex64", "MAX"):
        dist.group.WORLD.allreduce([torch.ones(3, dtype=torch.complex64)], ReduceOp.MAX)
    with raises(NotImplementedError, "torch.bool", "AVG"):
        dist.all_reduce(torch.ones(3, dtype=torch.bool), ReduceOp.AVG)
    with raises(NotImplementedError, "sparse", "MAX"):
        dist.all_reduce(torch.eye(3).to_sparse(), ReduceOp.MAX)
    with raises(NotImplementedError, "dense", "sparse_csr"):
        dist.group.WORLD.broadcast([torch.eye(3).to_sparse_csr()])


def case_odd_shapes() -> None:
    strided = torch.zeros(4, 6).t()[::2]
    strided.copy_(torch.arange(12.0).view(3, 4) + rank())
    dist.all_reduce(strided)
    assert torch.equal(strided, size() * torch.arange(12.0).view(3, 4) + sum(range(size())))
    scalar = torch.tensor(2.0)
    dist.all_reduce(scalar)
    assert scalar.item() == 2 * size()
    for call in (dist.all_reduce, lambda t: dist.broadcast(t, 0)):
        call(torch.empty(0))
    parameter = torch.nn.Parameter(torch.ones(2))
    dist.all_reduce(parameter)
    assert parameter.tolist() == [size()] * 2


def case_complex() -> None:
    t = torch.full((3,), 1 + 2j) * (rank() + 1)
    dist.all_reduce(t)
    assert torch.equal(t, torch.full((3,), 1 + 2j) * sum(range(1, size() + 1)))


def case_reduce() -> None:
    for root in range(size()):
        t = data(rank(), dtype=torch.int64)
        dist.reduce(t, root)
        expected = (
            fold(operator.add, dtype=torch.int64) if rank() == root else data(rank(), dtype=torch.int64)
        )
        assert torch.equal(t, expected)


def case_broadcast_every_dtype() -> None:
    root = size() - 1
    dtypes = [*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16]
    for dtype in dtypes:
        expected = torch.arange(6).to(torch.float32).to(dtype)
        t = expected.clone() if rank() == root else torch.zeros(6).to(dtype)
        dist.broadcast(t, root)
        assert torch.equal(t.view(torch.uint8), expected.view(torch.uint8)), dtype
    strided = torch.zeros(3, 4).t()
    if rank() == root:
        strided.copy_(torch.arange(12.0).view(4, 3))
    dist.broadcast(strided, root)
    assert torch.equal(strided, torch.arange(12.0).view(4, 3))


def case_all_gather() -> None:
    for dtype in [*FLOATS, *INTEGERS, torch.bool, torch.float8_e5m2]:
        mine = data(rank(), 6, torch.float32).to(dtype).view(2, 3)
        out = [torch.empty(2, 3, dtype=dtype) for _ in range(size())]
        dist.all_gather(out, mine)
        for r, got in enumerate(out):
            assert torch.equal(got.float(), data(r, 6, torch.float32).to(dtype).float().view(2, 3)), dtype
        flat = torch.empty(6 * size(), dtype=dtype)
        dist.all_gather_into_tensor(flat, mine.view(-1))
        assert torch.equal(flat.float(), torch.cat(out).view(-1).float())


def case_all_gather_of_unequal_sizes() -> None:
    out = [torch.zeros(r + 1) for r in range(size())]
    dist.all_gather(out, torch.full((rank() + 1,), float(rank())))
    assert [t.tolist() for t in out] == [[float(r)] * (r + 1) for r in range(size())]


def case_all_gather_into_its_own_input() -> None:
    out = torch.zeros(4 * size())
    mine = out[4 * rank() : 4 * rank() + 4]
    mine.copy_(data(rank(), 4))
    dist.all_gather_into_tensor(out, mine)
    assert torch.equal(out, torch.cat([data(r, 4) for r in range(size())]))


def case_gather_and_scatter() -> None:
    root = size() // 2
    out = [torch.empty(5) for _ in range(size())] if rank() == root else None
    dist.gather(data(rank(), 5), out, root)
    if rank() == root:
        assert all(torch.equal(t, data(r, 5)) for r, t in enumerate(out))
    got = torch.empty(5)
    dist.scatter(got, out, root)
    assert torch.equal(got, data(rank(), 5))


def case_reduce_scatter() -> None:
    whole = fold(operator.add, 4 * size())
    mine = data(rank(), 4 * size())
    out = torch.empty(4)
    dist.reduce_scatter_tensor(out, mine)
    assert torch.equal(out, whole.view(size(), 4)[rank()])
    dist.reduce_scatter(out, list(mine.view(size(), 4)), ReduceOp.MAX)
    assert torch.equal(out, fold(torch.maximum, 4 * size()).view(size(), 4)[rank()])
    dist.reduce_scatter_tensor(mine[4 * rank() : 4 * rank() + 4], mine, ReduceOp.AVG)
    assert torch.allclose(mine.view(size(), 4)[rank()], whole.view(size(), 4)[rank()] / size())


def case_reduce_scatter_of_unequal_sizes() -> None:
    parts = [torch.full((r + 1,), float(rank() + r)) for r in range(size())]
    out = torch.empty(rank() + 1)
    dist.reduce_scatter(out, parts, ReduceOp.AVG)
    assert torch.allclose(out, torch.full_like(out, rank() + (size() - 1) / 2))


def case_all_to_all() -> None:
    n, me = size(), rank()
    out = torch.empty(2 * n, 3)
    rows = torch.arange(2.0 * n)[:, None].expand(2 * n, 3) + 100 * me
    dist.all_to_all_single(out, rows)
    expected = torch.cat([torch.arange(2.0 * me, 2 * me + 2) + 100 * r for r in range(n)])
    assert torch.equal(out, expected[:, None].expand(2 * n, 3))

    counts = [r + me + 1 for r in range(n)]
    sent = torch.cat([torch.full((c, 2), 10.0 * me + r) for r, c in enumerate(counts)])
    got = torch.empty(sum(counts), 2)
    dist.all_to_all_single(got, sent, counts, counts)
    assert torch.equal(got, torch.cat([torch.full((c, 2), 10.0 * r + me) for r, c in enumerate(counts)]))

    lists = [torch.empty(c, dtype=torch.float8_e4m3fn) for c in counts]
    dist.all_to_all(lists, [torch.full((c,), float(me)).to(torch.float8_e4m3fn) for c in counts])
    assert [t.float().tolist() for t in lists] == [[float(r)] * c for r, c in enumerate(counts)]


def case_wrong_sizes_are_errors() -> None:
    with raises(ValueError, "all_gather"):
        dist.group.WORLD.all_gather_single(torch.empty(3 * size() + 1), torch.empty(3))
    with raises(ValueError, "reduce_scatter"):
        dist.group.WORLD.reduce_scatter_single(torch.empty(3), torch.empty(3 * size() + 1))
    with raises(ValueError, "splits"):
        dist.group.WORLD.all_to_all_single(torch.empty(size()), torch.empty(size()), [2] * size(), [])


def case_asynchronous_work_and_future() -> None:
    tensors = [data(rank(), 1000 * (i + 1)) for i in range(8)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    seen = []
    chained = works[3].get_future().then(lambda f: seen.append(f.value()[0][0].item()))
    for work in reversed(works):
        assert work.wait() is True
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
    chained.wait()
    assert seen == [fold(operator.add, 4000)[0].item()]
    for i, t in enumerate(tensors):
        assert torch.equal(t, fold(operator.add, 1000 * (i + 1)))
        assert works[i].get_future().wait()[0] is t or torch.equal(works[i].get_future().wait()[0], t)
        assert works[i].result()[0] is t


def case_future_completes_in_the_background() -> None:
    t = data(rank(), 50_000)
    future = dist.all_reduce(t, async_op=True).get_future()
    future.wait()  # waits in C++, where nothing drives the operation
    assert torch.equal(t, fold(operator.add, 50_000))


def case_different_groups_do_not_wait_for_each_other() -> None:
    others = dist.new_group(list(range(size())))
    a, b = data(rank()), data(rank())
    if rank() % 2:
        first, second = dist.all_reduce(a, async_op=True), dist.all_reduce(b, group=others, async_op=True)
    else:
        second, first = dist.all_reduce(b, group=others, async_op=True), dist.all_reduce(a, async_op=True)
    first.wait()
    second.wait()
    assert torch.equal(a, fold(operator.add))
    assert torch.equal(b, a)
    dist.destroy_process_group(others)


def case_point_to_point_in_any_order() -> None:
    n, me = size(), rank()
    right, left = (me + 1) % n, (me - 1) % n
    big = 300_000  # beyond any eager limit
    got = [torch.empty(big) for _ in range(3)]
    sends = [dist.isend(torch.full((big,), 10.0 * me + tag), right, tag=tag) for tag in range(3)]
    receives = {tag: dist.irecv(got[tag], left, tag=tag) for tag in (2, 0, 1)}
    for tag in (1, 2, 0):
        receives[tag].wait()
    for work in sends:
        work.wait()
    assert [t[-1].item() for t in got] == [10.0 * left + tag for tag in range(3)]


def case_tags_as_far_as_mpi_has_them() -> None:
    most = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
    assert most >= 2**20  # far beyond the 32767 that MPI promises
    n, me = size(), rank()
    sends = [dist.isend(torch.tensor([me, tag]), (me + 1) % n, tag=tag) for tag in (most, 0, 40_000)]
    for tag in (0, most, 40_000):
        got = torch.zeros(2, dtype=torch.int64)
        dist.recv(got, (me - 1) % n, tag=tag)
        assert got.tolist() == [(me - 1) % n, tag]
    for work in sends:
        work.wait()
    for tag in (most + 1, 2**31 - 1, -1):
        for call in (dist.isend, dist.irecv):
            with raises(ValueError, f"tag {tag} is none of 0 to {most}"):
                call(torch.ones(1), (me + 1) % n, tag=tag)


def case_receive_from_any_source() -> None:
    if rank() == 0:
        seen = set()
        for _ in range(size() - 1):
            t = torch.empty(2)
            source = dist.recv(t)
            assert t.tolist() == [source, source]
            seen.add(source)
        assert seen == set(range(1, size()))
    else:
        dist.send(torch.full((2,), float(rank())), 0)
    dist.barrier()


def case_batch_of_sends_and_receives() -> None:
    n, me = size(), rank()
    got = torch.empty(4, 3).t()
    operations = [
        dist.P2POp(dist.irecv, got, (me - 1) % n),
        dist.P2POp(dist.isend, torch.full((3, 4), float(me)).t().contiguous().t(), (me + 1) % n),
    ]
    for work in dist.batch_isend_irecv(operations if me % 2 else operations[::-1]):
        work.wait()
    assert torch.equal(got, torch.full((3, 4), float((me - 1) % n)))


def case_objects() -> None:
    n, me = size(), rank()
    gathered = [None] * n
    dist.all_gather_object(gathered, {"rank": me, "data": "x" * me})
    assert gathered == [{"rank": r, "data": "x" * r} for r in range(n)]
    box = ["a", {"b": 1}] if me == 0 else [None, None]
    dist.broadcast_object_list(box, 0)
    assert box == ["a", {"b": 1}]
    collected = [None] * n if me == n - 1 else None
    dist.gather_object(me, collected, n - 1)
    assert collected in (None, list(range(n)))
    mine = [None]
    dist.scatter_object_list(mine, [f"to {r}" for r in range(n)] if me == 0 else None, 0)
    assert mine == [f"to {me}"]
    if n > 1 and me < 2:
        if me == 0:
            dist.send_object_list(["over", 2], 1)
        else:
            got = [None, None]
            dist.recv_object_list(got, 0)
            assert got == ["over", 2]
    dist.barrier()


def case_method_names_of_earlier_versions() -> None:
    world, n = dist.group.WORLD, size()
    out = torch.empty(3 * n)
    world._allgather_base(out, data(rank(), 3)).wait()
    assert torch.equal(out[-3:], data(n - 1, 3))
    world.allgather_into_tensor_coalesced([out], [data(rank(), 3)]).wait()
    part = torch.empty(3)
    world._reduce_scatter_base(part, data(rank(), 3 * n)).wait()
    assert torch.equal(part, fold(operator.add, 3 * n).view(n, 3)[rank()])
    world.reduce_scatter_tensor_coalesced([part], [data(rank(), 3 * n)]).wait()
    world.alltoall_base(out, data(rank(), 3 * n), [], []).wait()
    assert torch.equal(out[:3], data(0, 3 * n).view(n, 3)[rank()])
    t = data(rank())
    world.allreduce(t, ReduceOp.MAX).wait()
    assert torch.equal(t, fold(torch.maximum))
    t = data(rank())
    world.broadcast(t, root=0).wait()
    assert torch.equal(t, data(0))
    lists = [[torch.empty(2), torch.empty(4)] for _ in range(n)]
    world.allgather_coalesced(lists, [data(rank(), 2), data(rank(), 4)]).wait()
    assert torch.equal(lists[-1][1], data(n - 1, 4))


def case_subgroups() -> None:
    n, me = size(), rank()
    even = dist.new_group(list(range(0, n, 2)))
    odd = dist.new_group(list(range(1, n, 2))) if n > 1 else None
    mine = odd if me % 2 else even
    t = torch.tensor([float(me)])
    dist.all_reduce(t, group=mine)
    assert t.item() == sum(range(me % 2, n, 2))
    got = [None] * dist.get_world_size(mine)
    dist.all_gather_object(got, me, group=mine)
    assert got == list(range(me % 2, n, 2))
    dist.destroy_process_group(mine)
    alone = dist.new_group([me], use_local_synchronization=True)
    dist.all_reduce(t, group=alone)
    dist.destroy_process_group(alone)


def case_barriers() -> None:
    dist.barrier()
    dist.barrier(async_op=True).wait()
    dist.group.WORLD.monitored_barrier()
    for _ in range(3):
        dist.group.WORLD.monitored_barrier(wait_all_ranks=True)


def case_monitored_barrier_names_who_is_missing() -> None:
    from datetime import timedelta

    from hybridcomp import CollectiveTimeoutError

    if size() < 3:
        return
    group = dist.new_group(list(range(size())))
    if rank() == 0:
        with raises(CollectiveTimeoutError, "Ranks 1, 2", "500 ms"):
            group.monitored_barrier(timedelta(seconds=0.5), wait_all_ranks=True)
    dist.barrier()


def _marks(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return all of a tensor but its values and its version."""
    storage = tensor.untyped_storage()
    memory = (storage.data_ptr(), storage.nbytes(), storage.resizable())
    return (memory, tensor.shape, tensor.stride(), tensor.requires_grad, tensor.is_leaf, tensor.grad_fn)


def _carried(group: dist.ProcessGroup | None, made) -> dict[str, list[bool]]:
    """Run each collective on tensors that ``made`` makes; return whether autograd counts a version of each.

    Checks that all else of the tensors is as before.
    """
    n, root = size(), rank() == 0
    calls = {
        "all_reduce": ([7], lambda x: dist.all_reduce(x, group=group)),
        "max": ([7], lambda x: dist.all_reduce(x, ReduceOp.MAX, group=group)),
        "reduce": ([7], lambda x: dist.reduce(x, 0, group=group)),
        "broadcast": ([7], lambda x: dist.broadcast(x, 0, group=group)),
        "all_gather": ([7] * (n + 1), lambda x, *to: dist.all_gather([*to], x, group=group)),
        "into_tensor": ([7, 7 * n], lambda x, to: dist.all_gather_into_tensor(to, x, group=group)),
        "scatter_tensor": ([7 * n, 7], lambda x, to: dist.reduce_scatter_tensor(to, x, group=group)),
        "reduce_scatter": ([7] * (n + 1), lambda to, *x: dist.reduce_scatter(to, [*x], group=group)),
        "gather": ([7] * (n + 1), lambda x, *to: dist.gather(x, [*to] if root else None, 0, group=group)),
        "scatter": ([7] * (n + 1), lambda to, *x: dist.scatter(to, [*x] if root else None, 0, group=group)),
        "single": ([7 * n, 7 * n], lambda x, to: dist.all_to_all_single(to, x, group=group)),
        "all_to_all": ([7] * 2 * n, lambda *x: dist.all_to_all([*x[:n]], [*x[n:]], group=group)),
    }
    versions = {}
    for name, (counts, call) in calls.items():
        tensors = [made(count) for count in counts]
        before, counted = [_marks(t) for t in tensors], [t._version for t in tensors]
        try:
            call(*tensors)
        except (RuntimeError, ValueError):  # gloo takes no strided tensors there
            assert dist.get_backend(group) == "gloo", name
            continue
        assert [_marks(t) for t in tensors] == before, name
        versions[name] = [t._version > old for t, old in zip(tensors, counted, strict=True)]
    return versions


def case_tensors_keep_all_but_their_values() -> None:
    gloo = dist.new_group(backend="gloo")
    coded = dist.new_group(pg_options=hct.Options(policy="int8:block=64:min_bytes=0"))
    makers = {
        "float32": lambda count: data(rank(), count),
        "bfloat16": lambda count: data(rank(), count, torch.bfloat16),
        "int64": lambda count: data(rank(), count, torch.int64),
        "strided": lambda count: data(rank(), 2 * count)[::2],
    }
    for kind, made in makers.items():
        theirs, ours = _carried(gloo, made), _carried(None, made)
        assert {name: ours[name] for name in theirs} == theirs, kind
        assert len(ours) == 12
        _carried(coded, made)
    carried = data(rank(), 1000)
    for group in (None, coded):
        dist.all_reduce(carried, group=group)
    carried.resize_(2000)  # refused for ever once NumPy has seen it by Tensor.numpy()
