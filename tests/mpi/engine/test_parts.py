"""One all-reduce of parts of an array: the bits, and the memories, of an all-reduce of each."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from hybridcomp.arrays import DType, Flat
from hybridcomp.codecs import get_codec
from hybridcomp.collectives.execution.mpi_collectives import AVG
from hybridcomp.policy import Choice
from tests.mpi.conftest import WORLD, gaussian, identical, verdict

SIZES = (0, 1, 5000, 64, 0, 70_001, 129, 40_000)
# Between parts there are elements of nobody.
EXTENTS = [(3 + i + sum(SIZES[:i]), n) for i, n in enumerate(SIZES)]
NAMES = [f"layer.{i}" for i in range(len(SIZES))]
CASES = [
    ("int8", None),
    ("int8:block=64:rounding=stochastic", None),
    ("int4", "ef"),
    ("int4", "ef21"),
    ("int4", "loco"),
    ("topk:ratio=0.1", "dgc"),
    ("none", None),
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
        request = together.allreduce_parts(mine, EXTENTS, NAMES, AVG, choice, step)
        for (start, n), name in zip(EXTENTS, NAMES, strict=True):
            part = Flat(theirs.data[start : start + n], dtype, (n,), True, False)
            alone.allreduce(part, part, AVG, name, None, choice, step=step).wait()
        if request is None:
            verdict(spec.startswith("topk") and dtype is DType.BFLOAT16, f"{spec} is not carried as one")
            return
        request.wait()
        verdict(mine.data.tobytes() == theirs.data.tobytes(), "other bits than each by itself")
        verdict(all(identical(mine.data[start : start + n]) for start, n in EXTENTS), "different bits")
        gaps = [(start + n, after) for (start, n), (after, _) in pairwise(EXTENTS)]
        verdict(all((mine.data[a:b] == before[a:b]).all() for a, b in gaps), "wrote beside the parts")
    a, b = together.feedback.state_dict(), alone.feedback.state_dict()
    verdict(a.keys() == b.keys() and bool(a) == (form is not None), f"{a.keys()} and {b.keys()}")
    verdict(all(a[key].tobytes() == b[key].tobytes() for key in a), "another memory")


@pytest.mark.parametrize(
    ("spec", "form"), [("powersgd:rank=2", None), ("lossless", None), ("int4:rounding=stochastic", "ef")]
)
def test_what_the_engine_does_not_join_is_not_started(make, spec, form):
    comm = make("none")
    choice = Choice(get_codec(spec), form, "asked for")
    data = bucket(DType.FLOAT32, 0)
    verdict(comm.allreduce_parts(data, EXTENTS, NAMES, AVG, choice, 0) is None, "it was started")
    verdict(not comm.busy and comm.stats() == [], "it was counted")
