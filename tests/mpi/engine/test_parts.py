"""One all-reduce of parts of an array: the bits, and the memories, of an all-reduce of each."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest

from hybridcomp.arrays import DType, Flat
from hybridcomp.codecs import get_codec
from hybridcomp.collectives.choices import OperationOptions
from hybridcomp.collectives.execution.mpi_collectives import AVG
from hybridcomp.collectives.operations.flat_parts import Together, allreduce_parts
from hybridcomp.collectives.operations.flat_reductions import allreduce
from hybridcomp.policy import Choice
from tests.mpi.conftest import WORLD, gaussian, identical, verdict

pytestmark = pytest.mark.ranks(least=2)  # one rank compresses no message


class Part(NamedTuple):
    name: str
    start: int
    size: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (5, self.size // 5) if self.size % 5 == 0 else (self.size,)

    @property
    def stop(self) -> int:
        return self.start + self.size


SIZES = (0, 1, 5000, 64, 0, 70_001, 129, 40_000)
# Between parts there are elements of nobody.
PARTS = [Part(f"layer.{i}", 3 + i + sum(SIZES[:i]), n) for i, n in enumerate(SIZES)]
CASES = [
    ("int8", None),
    ("int8:block=64:rounding=stochastic", None),
    ("int4", "ef"),
    ("int4", "ef21"),
    ("int4", "loco"),
    ("topk:ratio=0.1", "dgc"),
    ("int4:block=64", "ef-sgdm"),
    ("none", None),
    ("powersgd:rank=2", None),
    ("powersgd:rank=1", "ef"),
    ("randomblock:ratio=0.1", "ef"),
    ("lattice:bits=16", None),
    ("sketch", None),
    ("sketch:index=bloom", None),
]


def bucket(dtype: DType, step: int) -> Flat:
    values = gaussian(sum(SIZES) + 20, WORLD.rank + 10 * step)
    data = (values.view(np.uint32) >> 16).astype(np.uint16) if dtype is DType.BFLOAT16 else values.copy()
    return Flat(data, dtype, data.shape, True, False)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
@pytest.mark.parametrize(("spec", "form"), CASES)
def test_parts_are_carried_as_by_themselves(make, spec, form, dtype):
    together, alone = make("none"), make("none")
    choice = Choice(get_codec(spec), form, "asked for")
    for step in range(3):
        mine, theirs = bucket(dtype, step), bucket(dtype, step)
        before = mine.data.copy()
        request = allreduce_parts(together.session, mine, Together(PARTS), "avg", choice, step)
        for part in PARTS:
            flat = Flat(theirs.data[part.start : part.stop], dtype, part.shape, True, False)
            allreduce(
                alone.session, flat, flat, AVG, OperationOptions(part.name, None, choice), step=step
            ).wait()
        if request is None:
            verdict(spec.startswith("topk") and dtype is DType.BFLOAT16, f"{spec} is not carried as one")
            return
        request.wait()
        verdict(mine.data.tobytes() == theirs.data.tobytes(), "other bits than each by itself")
        verdict(all(identical(mine.data[part.start : part.stop]) for part in PARTS), "different bits")
        gaps = [slice(part.stop, after.start) for part, after in pairwise(PARTS)]
        verdict(all((mine.data[gap] == before[gap]).all() for gap in gaps), "wrote beside the parts")
    a, b = together.feedback.state_dict(), alone.feedback.state_dict()
    verdict(a.keys() == b.keys() and bool(a) == (form is not None), f"{a.keys()} and {b.keys()}")
    verdict(all(a[key].tobytes() == b[key].tobytes() for key in a), "another memory")


@pytest.mark.parametrize(("spec", "form"), [("lossless", None), ("int4:rounding=stochastic", "ef")])
def test_what_the_engine_does_not_join_is_not_started(make, spec, form):
    comm = make("none")
    choice = Choice(get_codec(spec), form, "asked for")
    data = bucket(DType.FLOAT32, 0)
    verdict(allreduce_parts(comm.session, data, Together(PARTS), "avg", choice, 0) is None, "it was started")
    verdict(not comm.busy and comm.stats() == [], "it was counted")


def test_an_uncompressed_sum_of_halves_travels_as_it_is(make):
    """Long enough to be ours and not MPI's: without headers, by the compiled engine."""
    comm = make("none")
    data = np.ones(WORLD.size << 16, np.float16)  # shards of one size
    flat = Flat(data, DType.FLOAT16, data.shape, True, False)
    allreduce(comm.session, flat, flat, AVG, OperationOptions(algorithm="direct")).wait()
    (row,) = comm.stats()
    verdict(row.wire_bytes == row.plain_bytes, f"{row}")
