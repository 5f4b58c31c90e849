"""Measure the time of a model's operations here, for the section ``[compute]`` of a profile."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hybridcomp_lab.planner.compute import OVERHEADS, Fitted, Work, fit, names
from hybridcomp_lab.planner.step import stages as shapes
from hybridcomp_lab.train.config import TrainConfig
from hybridcomp_lab.train.model.gpt import MLP, Attention, Embedding, ModelShape, loss_of
from hybridcomp_lab.train.optimizer.optimizers import clip_gradients, make_optimizer, square_sum

# Each size: micro-batch, tokens of context, width, parts of tp; heads are of 32.
_SIZES = (
    (1, 32, 64, 1),
    (2, 64, 64, 1),
    (4, 64, 128, 1),
    (4, 64, 128, 2),
    (2, 128, 192, 1),
    (1, 256, 256, 1),
    (4, 96, 256, 2),
    (2, 64, 384, 1),
    (4, 64, 512, 4),
    (4, 128, 256, 1),
)
_LEAST = 3  # fewest executions of each operation


@dataclass(frozen=True)
class Timings:
    """Times of executions on one rank, in an order that is the same on all ranks.

    Attributes:
        works: executions.
        seconds: seconds of a processor for each.
        half: seconds of an MLP in bf16 over those in fp32.
    """

    works: tuple[Work, ...]
    seconds: tuple[float, ...]
    half: float

    def fitted(self, seconds: Sequence[float]) -> Fitted:
        """Return the fit to times of these executions, of several ranks, say; overheads are :data:`OVERHEADS`."""
        rows = dict.fromkeys(names(), (0.0, 0.0, 0.0)) | dict(OVERHEADS)
        of_name: dict[str, list[tuple[Work, float]]] = defaultdict(list)
        for work, spent in zip(self.works, seconds, strict=True):
            of_name[f"{work.operation}.{work.direction}"].append((work, spent))
        for name, timed in of_name.items():
            rows[name] = fit([work for work, _ in timed], [spent for _, spent in timed])
        return Fitted(rows, float(f"{self.half:.4g}"))


def measure(seconds: float) -> Timings:
    """Time the operations of a step on one thread of this process.

    Processor time counts, so ranks that share cores can measure at once, and should: the times then include what ranks
    take from each other's caches.

    Args:
        seconds: seconds of timing for each operation and size, about.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    timed: list[tuple[Work, float]] = []
    try:
        for batch, time_, d, tp in _SIZES:
            config = TrainConfig(
                micro_batch_size=batch, seq_len=time_, d_model=d, heads=max(tp, d // 32), tp=tp, layers=1
            )
            for work, run in _forward_and_backward(config):
                there, back = _time(run, seconds)
                timed += [(work, there), (shapes.backward(work, config), back)]
            elements = d * d * 12
            timed.append((shapes.optimizer(elements), _update(elements, config, seconds)))
        half = _half(seconds)
    finally:
        torch.set_num_threads(threads)
    return Timings(tuple(work for work, _ in timed), tuple(spent for _, spent in timed), half)


def _forward_and_backward(config: TrainConfig) -> Iterator[tuple[Work, Callable[[], Tensor]]]:
    """Yield the operations of a size: the work of a forward execution, and a function that runs one."""
    batch, time_, d = config.micro_batch_size, config.seq_len, config.d_model
    x = torch.randn(batch, time_, d, requires_grad=True)
    norm = nn.LayerNorm(d)
    yield shapes.norm(config), lambda: norm(x)
    attention = Attention(d, config.heads)
    attention.qkv.weight = nn.Parameter(attention.qkv.weight[: 3 * d // config.tp].detach().clone())
    attention.out.weight = nn.Parameter(attention.out.weight[:, : d // config.tp].detach().clone())
    yield shapes.attention(config), lambda: x + attention(x)
    mlp = MLP(d)
    mlp.up.weight = nn.Parameter(mlp.up.weight[: 4 * d // config.tp].detach().clone())
    mlp.down.weight = nn.Parameter(mlp.down.weight[:, : 4 * d // config.tp].detach().clone())
    yield shapes.mlp(config), lambda: x + mlp(x)
    vocab = shapes.vocabulary(config)
    tokens = torch.randint(0, vocab, (batch, time_))
    embedding = Embedding(ModelShape(vocab, 1, d, config.heads, time_))
    yield shapes.embedding(config), lambda: embedding(tokens)
    head = nn.Linear(d, vocab, bias=False)
    yield shapes.head(config), lambda: loss_of(head(x), tokens)


def _time(run: Callable[[], Tensor], seconds: float) -> tuple[float, float]:
    """Return the median seconds of an operation's forward and backward pass."""
    there: list[float] = []
    back: list[float] = []
    began = time.perf_counter()
    run().sum().backward()  # type: ignore[no-untyped-call]
    while len(there) < _LEAST or time.perf_counter() - began < seconds:
        begin = time.thread_time()
        y = run()
        there.append(time.thread_time() - begin)
        gradient = torch.ones_like(y)
        begin = time.process_time()  # autograd computes on a thread of its own on some devices
        y.backward(gradient)  # type: ignore[no-untyped-call]
        back.append(time.process_time() - begin)
    return statistics.median(there), statistics.median(back)


def _update(elements: int, config: TrainConfig, seconds: float) -> float:
    """Time the norm, clipping and update of the matrices of a block."""
    parameters = {str(i): nn.Parameter(torch.randn(elements // 12, 1)) for i in range(12)}
    optimizer = make_optimizer(parameters, config)
    spent: list[float] = []
    began = time.perf_counter()
    while len(spent) < _LEAST + 1 or time.perf_counter() - began < seconds:
        for parameter in parameters.values():
            parameter.grad = torch.ones_like(parameter)
        begin = time.process_time()
        square_sum(list(parameters.values()))
        clip_gradients(list(parameters.values()), 2.0, 1.0)
        optimizer.step()
        spent.append(time.process_time() - begin)
    return statistics.median(spent[1:])  # the first makes the moments


def _half(seconds: float) -> float:
    """Return the seconds of an MLP in bf16 over those in fp32."""
    x, mlp = torch.randn(256, 256), MLP(256)
    spent: dict[bool, list[float]] = {False: [], True: []}
    began = time.perf_counter()
    while len(spent[True]) < _LEAST or time.perf_counter() - began < seconds:
        for half, found in spent.items():
            begin = time.process_time()
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                mlp(x)
            found.append(time.process_time() - begin)
    return statistics.median(spent[True]) / statistics.median(spent[False])
