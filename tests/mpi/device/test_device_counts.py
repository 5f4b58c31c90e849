"""A bucket of the DDP hook costs its device no more launches, copies and waits than it does now."""

from __future__ import annotations

import pytest

from tests.mpi.conftest import verdict
from tests.mpi.device.counting import CODECS, WAYS, measure
from tests.mpi.device.devices import SIZE
from tests.mpi.device.hook_sides import each

pytestmark = pytest.mark.ranks(least=2, most=4)

# By way of messages and codec: launches, copies in any direction, and waits of a bucket of four matrices and eight
# vectors, in three batches, on so many ranks. Lower them where work is saved.
LIMITS: dict[tuple[str, str], dict[int, tuple[int, int, int]]] = {
    ("gloo", "none"): {2: (33, 28, 9), 3: (33, 38, 9), 4: (33, 42, 9)},
    ("gloo", "int8:block=128"): {2: (35, 28, 9), 3: (35, 38, 9), 4: (35, 42, 9)},
    ("gloo", "int4:block=128"): {2: (50, 28, 9), 3: (50, 38, 9), 4: (50, 42, 9)},
    ("gloo", "topk:ratio=0.01"): {2: (131, 28, 9), 3: (131, 38, 9), 4: (131, 42, 9)},
    ("NCCL", "none"): {2: (40, 27, 10), 3: (64, 38, 15), 4: (70, 50, 16)},
    ("NCCL", "int8:block=128"): {2: (44, 25, 10), 3: (70, 38, 15), 4: (76, 48, 16)},
    ("NCCL", "int4:block=128"): {2: (59, 25, 10), 3: (88, 46, 15), 4: (97, 56, 16)},
    ("NCCL", "topk:ratio=0.01"): {2: (143, 36, 21), 3: (208, 62, 31), 4: (196, 79, 36)},
    ("NCCL", "powersgd:rank=4"): {2: (36, 47, 32), 3: (36, 55, 36), 4: (36, 63, 40)},
}


@pytest.mark.parametrize(("way", "codec"), each(list(LIMITS)))
def test_a_bucket(hook_comm, way, codec):
    counts = measure(32, codec, dict(CODECS)[codec], way, hook_comm)
    copies = counts.of["to_host"] + counts.of["to_device"] + counts.of["on_device"]
    found = counts.of["launches"], copies, counts.of["waits"]
    most = LIMITS[way, codec][SIZE]
    verdict(
        all(n <= limit for n, limit in zip(found, most, strict=True)),
        f"launches, copies, waits {found}, at most {most}: {dict(counts.kernels)}",
    )
    verdict(bool(counts.of["python"]), "no call was seen")


def test_counts_do_not_depend_on_width(hook_comm):
    """A narrower block stands for the whole bucket."""
    found = [dict(measure(width, "int8:block=128", None, "NCCL", hook_comm).kernels) for width in (32, 48)]
    verdict(found[0] == found[1], f"{found}")
    verdict(set(WAYS) >= {"gloo", "NCCL"})
