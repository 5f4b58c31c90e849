"""Reductions that MPI lacks: narrow floats, averages of integers, sparse tensors; and no data. Policy none."""

import operator

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from hybridcomp import MismatchError
from tests.codecs.common import with_specials
from tests.torch.cases.collectives import data, fold, raises, rank, size

NARROW = [torch.float8_e4m3fn, torch.float8_e5m2]


def case_float8() -> None:
    operations = {
        ReduceOp.SUM: operator.add,
        ReduceOp.PRODUCT: operator.mul,
        ReduceOp.MAX: torch.maximum,
        ReduceOp.MIN: torch.minimum,
    }
    for dtype in NARROW:
        for op, expected in operations.items():
            t = data(rank()).to(dtype)
            dist.group.WORLD.allreduce([t], op).wait()
            assert t.dtype is dtype
            assert torch.equal(t.float(), fold(expected).to(dtype).float()), (dtype, op)
        out = torch.empty(4).to(dtype)
        dist.group.WORLD.reduce_scatter_single(out, data(rank(), 4 * size()).to(dtype)).wait()
        whole = fold(operator.add, 4 * size()).to(dtype).float()
        assert torch.equal(out.float(), whole.view(size(), 4)[rank()])
        t = data(rank()).to(dtype)
        dist.group.WORLD.reduce([t], 0).wait()
        if rank() == 0:
            assert torch.equal(t.float(), fold(operator.add).to(dtype).float())


def case_averages_of_integers_are_cut_off() -> None:
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        t = data(rank(), dtype=dtype)
        dist.all_reduce(t, ReduceOp.AVG)
        assert torch.equal(t, torch.div(fold(operator.add, dtype=dtype), size(), rounding_mode="trunc"))
    t = torch.full((2,), -5 - rank(), dtype=torch.int64)
    dist.all_reduce(t, ReduceOp.AVG)
    mean = -(5 * size() + sum(range(size()))) / size()
    assert t.tolist() == [int(mean)] * 2
    out = torch.empty(2, dtype=torch.int32)
    dist.reduce_scatter_tensor(out, torch.full((2 * size(),), 7, dtype=torch.int32), ReduceOp.AVG)
    assert out.tolist() == [7, 7]


def case_averages_of_negative_integers_are_cut_off_towards_zero() -> None:
    """In each place the ranks' sum is a multiple of their number, less one, or plus one."""
    sums = [-2 * size() - 1, -size() - 1, -1, 1, size() + 1, 1 - size(), -size()]
    expected = [int(total / size()) for total in sums]
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        mine = torch.tensor(sums, dtype=dtype) if rank() == 0 else torch.zeros(len(sums), dtype=dtype)
        dist.all_reduce(t := mine.clone(), ReduceOp.AVG)
        assert t.tolist() == expected, dtype
        dist.reduce(t := mine.clone(), 0, ReduceOp.AVG)
        assert rank() or t.tolist() == expected, dtype
        dist.all_reduce_coalesced(several := [mine.clone(), mine.clone()], ReduceOp.AVG)
        assert [t.tolist() for t in several] == [expected] * 2, dtype
        dist.reduce_scatter_tensor(out := torch.empty_like(mine), mine.repeat(size()), ReduceOp.AVG)
        assert out.tolist() == expected, dtype
        dist.reduce_scatter(out := torch.empty_like(mine), [mine] * size(), ReduceOp.AVG)
        assert out.tolist() == expected, dtype
        dist.all_reduce(t := mine.to_sparse(), ReduceOp.AVG)
        assert t.to_dense().tolist() == expected, dtype


def case_complex_numbers() -> None:
    numbers = [complex(r + 1, 2 * r) for r in range(size())]
    product = complex(1)
    for z in numbers:
        product *= z
    expected = {
        ReduceOp.SUM: sum(numbers),
        ReduceOp.AVG: sum(numbers) / size(),
        ReduceOp.PRODUCT: product,
    }
    for dtype in (torch.complex64, torch.complex128):
        for op, value in expected.items():
            t = torch.full((3,), numbers[rank()], dtype=dtype)
            dist.group.WORLD.allreduce([t], op).wait()
            assert torch.allclose(t, torch.full((3,), value, dtype=dtype)), (dtype, op)
        t = torch.full((3,), numbers[rank()], dtype=dtype)
        dist.group.WORLD.allreduce([t], ReduceOp.PREMUL_SUM(0.5)).wait()
        assert torch.allclose(t, torch.full((3,), sum(numbers) / 2, dtype=dtype))
    conjugate = torch.full((3,), numbers[rank()]).conj()
    dist.group.WORLD.allreduce([conjugate]).wait()
    assert torch.allclose(conjugate, torch.full((3,), sum(numbers).conjugate()))


def odd_numbers(n: int, dtype: torch.dtype) -> torch.Tensor:
    """Return this rank's numbers: NaN of several bits, infinities and zeros of both signs among them."""
    parts = 2 if dtype.is_complex else 1
    real = {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)
    wide = torch.float64 if real is torch.float64 else torch.float32
    numpy = with_specials(data(rank(), parts * n, wide).numpy(), rank(), 0.5)
    numpy[-1] = np.nan if rank() == size() - 1 else 1
    numpy[: max(parts * n - 2, 0)][-1:] = -0.0 if rank() else 0.0
    t = torch.from_numpy(numpy).to(real)
    return t.view(dtype) if dtype.is_complex else t


def same_everywhere(t: torch.Tensor) -> bool:
    raw = t.view(torch.uint8).clone()
    every = [torch.empty_like(raw) for _ in range(size())]
    dist.all_gather(every, raw)
    return all(torch.equal(one, raw) for one in every)


def case_not_a_number_spreads_and_all_ranks_have_the_same_bits() -> None:
    world = dist.group.WORLD
    floats = [torch.float32, torch.float64, torch.float16, torch.bfloat16, *NARROW]
    wrong = []
    for op in (
        ReduceOp.MAX,
        ReduceOp.MIN,
        ReduceOp.PRODUCT,
        ReduceOp.SUM,
        ReduceOp.AVG,
        ReduceOp.PREMUL_SUM(0.5),
    ):
        extreme = op in (ReduceOp.MAX, ReduceOp.MIN)
        for dtype in floats + ([] if extreme else [torch.complex64, torch.complex128]):
            for n in (1, 3, 1000, 70_000):
                t = odd_numbers(n, dtype)
                world.allreduce([t], op).wait()
                values = (torch.view_as_real(t) if dtype.is_complex else t).float().flatten()
                spread = bool(values[-1].isnan())
                zero = values[-3] if extreme and n > 2 else None
                signed = zero is None or size() == 1 or bool(zero.signbit()) == (op == ReduceOp.MIN)
                wrong += [] if spread and signed and same_everywhere(t) else [(op, dtype, n, "all_reduce")]
                if n > 1000 or dtype.is_complex:
                    continue
                part = torch.empty(n).to(dtype)
                world.reduce_scatter_single(part, odd_numbers(n * size(), dtype), op).wait()
                wrong += (
                    [] if rank() < size() - 1 or part[-1].float().isnan() else [(op, dtype, n, "scatter")]
                )
                t = odd_numbers(n, dtype)
                world.reduce([t], 0, op).wait()
                wrong += [] if rank() or t[-1].float().isnan() else [(op, dtype, n, "reduce")]
    tensors = [odd_numbers(3, torch.float32), odd_numbers(1000, torch.float32)]
    dist.all_reduce_coalesced(tensors, ReduceOp.MAX)
    wrong += [] if all(map(same_everywhere, tensors)) else ["coalesced"]
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2, 5]]), odd_numbers(3, torch.float32), (6,))
    dist.all_reduce(sparse)
    wrong += [] if same_everywhere(sparse.to_dense()) else ["sparse"]
    assert not wrong, wrong


def case_premultiplied_by_a_tensor() -> None:
    t = data(rank())
    dist.all_reduce(t, ReduceOp.PREMUL_SUM(torch.tensor([0.5])))
    assert torch.equal(t, fold(operator.add) / 2)


def case_every_form_of_a_call() -> None:
    world = dist.group.WORLD
    t = data(rank())
    world.allreduce(t, ReduceOp.MAX).wait()
    assert torch.equal(t, fold(torch.maximum))
    t = data(rank())
    world.reduce(t, 0, op=ReduceOp.MIN).wait()
    if rank() == 0:
        assert torch.equal(t, fold(torch.minimum))
    t = data(rank())
    world.broadcast(t, root=size() - 1).wait()
    assert torch.equal(t, data(size() - 1))
    out = torch.empty(2)
    world.reduce_scatter(out, list(data(rank(), 2 * size()).split(2)), ReduceOp.MAX).wait()
    assert torch.equal(out, fold(torch.maximum, 2 * size()).view(size(), 2)[rank()])
    dist.all_reduce_coalesced(tensors := [data(rank()), data(rank(), 3)], ReduceOp.MAX)
    assert torch.equal(tensors[1], fold(torch.maximum, 3))


def mine(r: int, shape: tuple[int, ...] = (6, 4), dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return rank r's tensor: rows r and r + 1, as its neighbours have; repeated, so that it is not coalesced."""
    rows = torch.tensor([[r % shape[0], (r + 1) % shape[0], r % shape[0]]])
    values = torch.arange(3 * shape[1]).view(3, shape[1]).to(dtype) + r
    return torch.sparse_coo_tensor(rows, values, shape)


def case_sparse() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        expected = sum(mine(r, dtype=dtype).to_dense() for r in range(size()))
        t = mine(rank(), dtype=dtype)
        dist.all_reduce(t)
        assert t.is_sparse
        assert t.is_coalesced()
        assert torch.equal(t.to_dense(), expected)
    t = mine(rank())
    work = dist.all_reduce(t, ReduceOp.AVG, async_op=True)
    (result,) = work.get_future().wait()
    expected = sum(mine(r).to_dense() for r in range(size())) / size()
    assert torch.allclose(result.to_dense(), expected)
    assert torch.allclose(t.to_dense(), expected)
    nothing = torch.sparse_coo_tensor(torch.empty(1, 0), torch.empty(0, 4), (6, 4))
    t = nothing.clone() if rank() else mine(0)
    dist.all_reduce(t)
    assert torch.equal(t.to_dense(), mine(0).to_dense())
    scalars = torch.sparse_coo_tensor(torch.tensor([[rank()], [0]]), torch.tensor([1.0]), (size(), 2))
    dist.all_reduce(scalars)
    assert torch.equal(scalars.to_dense()[:, 0], torch.ones(size()))


def case_sparse_shapes_that_differ_are_told_on_every_rank() -> None:
    if size() > 1:
        with raises(MismatchError, "rank 0 has the shape (6, 4)", "rank 1 has (7, 4)"):
            dist.all_reduce(mine(rank(), (6 + min(rank(), 1), 4)))


def case_sparse_gradients_of_an_embedding() -> None:
    torch.manual_seed(0)
    model = torch.nn.Embedding(10, 3, sparse=True)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    ddp(torch.tensor([rank(), 9])).sum().backward()
    grad = model.weight.grad
    assert grad.is_sparse
    expected = torch.zeros(10, 3)
    expected[: size()] += 1 / size()
    expected[9] += 1
    assert torch.allclose(grad.to_dense(), expected)


def case_tensors_that_share_memory() -> None:
    whole = torch.zeros(2 * size())
    parts = list(whole.split(2))
    dist.all_gather(parts, torch.full((2,), float(rank())))
    assert torch.equal(whole, torch.arange(float(size())).repeat_interleave(2))
    t = data(rank(), size())
    dist.all_to_all_single(t, t)
    assert torch.equal(t, torch.stack([data(r, size())[rank()] for r in range(size())]))
    square = torch.zeros(4, 4)
    square[:, 1] = data(rank(), 4)
    dist.all_reduce(square[:, 1])
    assert torch.equal(square[:, 1], fold(operator.add, 4))
    assert square.sum() == square[:, 1].sum()
    same = data(rank(), 3)
    dist.all_gather_into_tensor(out := torch.empty(3 * size()), same.expand(3) if same.dim() == 0 else same)
    assert torch.equal(out, torch.cat([data(r, 3) for r in range(size())]))


def case_nothing_to_send() -> None:
    for shape in ((0,), (0, 3), (2, 0)):
        empty = torch.empty(shape)
        dist.all_reduce(empty)
        dist.broadcast(empty, 0)
        dist.reduce(empty, 0)
        dist.all_gather([torch.empty(shape) for _ in range(size())], empty)
        dist.all_gather_into_tensor(torch.empty((size() * shape[0], *shape[1:])), empty)
        dist.reduce_scatter_tensor(empty, torch.empty((size() * shape[0], *shape[1:])))
        dist.gather(empty, [torch.empty(shape) for _ in range(size())] if rank() == 0 else None)
        dist.scatter(empty, [torch.empty(shape) for _ in range(size())] if rank() == 0 else None)
        dist.all_to_all([torch.empty(shape) for _ in range(size())], [empty] * size())
        if size() > 1:
            if rank() == 0:
                dist.send(empty, 1)
            elif rank() == 1:
                dist.recv(empty, 0)
    none = [0] * size()
    dist.all_to_all_single(torch.empty(0, 2), torch.empty(0, 2), none, none)
