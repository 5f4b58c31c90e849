"""Messages changed by who gives them the CRC that fits: by every codec, through the engine and step by step."""

from __future__ import annotations

import re
import struct
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hybridcomp as hc
from hybridcomp.collectives.engine.groups import native_engine
from hybridcomp.collectives.transport.mpi import MpiTransport
from hybridcomp.variables import SHARED_MEMORY
from hybridcomp.wire import HEADER_BYTES
from tests.codecs.common import SPECS, reseal
from tests.mpi.conftest import WORLD, gaussian, step_by_step, verdict

pytestmark = pytest.mark.ranks(least=2, most=2)
N, LEAST = 1000, 40
CHANGES = 12
EARLY = 24  # bytes at the beginning of a payload, where its numbers are


class Sealed:
    """Changes of a byte of the next message from rank 0 to rank 1: in the engine and in Python's transport."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.change: tuple[int, int] | None = None
        honest = MpiTransport.isend

        def isend(transport: MpiTransport, data: Any, peer: int, tag: int) -> MPI.Request:
            raw = np.asarray(data)
            if self.change is not None and peer == 1 and raw.nbytes >= LEAST:
                (at, flip), self.change = self.change, None
                data = np.array(raw)
                (payload,) = struct.unpack_from("<Q", data, 16)
                data[min(HEADER_BYTES + at, raw.nbytes - 1)] ^= flip
                whole = HEADER_BYTES + payload
                data[:whole] = reseal(data[:whole])
            return honest(transport, data, peer, tag)

        monkeypatch.setattr(MpiTransport, "isend", isend)

    def plan(self, at: int, flip: int, *, compiled: bool) -> None:
        if WORLD.rank == 0 and compiled:
            native_engine().engine_damage(1, LEAST, True, at, flip)
        elif WORLD.rank == 0:
            self.change = at, flip


@pytest.mark.parametrize("compiled", [True, False], ids=["engine", "step by step"])
@pytest.mark.parametrize("op", ["broadcast", "all_reduce", "one_shot"])
def test_only_documented_errors(make, op, compiled, monkeypatch):
    monkeypatch.setenv(SHARED_MEMORY.name, "0")
    sealed = Sealed(monkeypatch)
    comm = make() if compiled else step_by_step(make())
    wrong = []
    refused = 0
    codecs = [spec for spec in SPECS if op == "broadcast" or not hc.get_codec(spec).linear]
    for number, codec in enumerate(codecs):
        x = gaussian(N).reshape(40, -1)  # of a shape, for those that ask for one
        sent = len(hc.get_codec(codec).encode(x)) - HEADER_BYTES
        draw = np.random.default_rng([number, len(op)])
        for change in range(CHANGES):
            at = int(draw.integers(0, min(EARLY, sent) if change % 2 else sent))
            flip = 1 << int(draw.integers(0, 8)) if change % 3 else int(draw.integers(1, 256))
            sealed.plan(at, flip, compiled=compiled)
            y = x.copy()
            try:
                if op == "broadcast":
                    comm.Bcast(y, 0, codec=codec)
                else:
                    comm.Allreduce(x, y, codec=codec, algorithm="direct" if op == "all_reduce" else op)
            except (hc.WireError, hc.MismatchError) as error:
                refused += 1
                wrong += [] if WORLD.rank == 1 else [(codec, at, repr(error))]
            except hc.RemoteError as error:
                told = re.search("rank 1 failed.*(WireError|MismatchError):", str(error))
                wrong += [] if told else [(codec, at, repr(error))]
            except Exception as error:
                wrong.append((codec, at, repr(error)))
            WORLD.Barrier()  # a root that is far ahead learns of it by a later operation
    verdict(not wrong, "\n".join(map(str, wrong)))
    verdict(WORLD.rank != 1 or refused > len(codecs), f"only {refused} were refused")
