"""Statistics as TensorBoard scalars: what came since the last time, by step; norms of error feedback."""

import sys

import numpy as np
import pytest
import torch

import hybridcomp.torch as hct
from hybridcomp.codecs import ErrorFeedback
from hybridcomp.collectives import StatRow
from hybridcomp.errors import ConfigError
from hybridcomp.torch.memory import pack
from hybridcomp.torch.registry import registry

AT = "hybridcomp/dp/all_reduce/int8_block_128"


class Member:
    """Stand-in for a process group or a hook, as the registry sees it."""

    label = "hook:dp"

    def __init__(self) -> None:
        self.counted = [StatRow("dp", "all_reduce", "int8:block=128", "policy p")]
        self.feedback = ErrorFeedback(form=None)

    def count(self, calls: int, wire: int = 250, reason: str = "policy p") -> None:
        row = StatRow(
            "dp", "all_reduce", "int8:block=128", reason, calls, 1000 * calls, 1000 * calls, wire * calls
        )
        row.encode_seconds, row.wire_seconds, row.decode_seconds = 0.001 * calls, 0.02 * calls, 0.3 * calls
        self.counted.append(row)

    def rows(self) -> list[StatRow]:
        return self.counted

    def memory(self) -> dict[str, np.ndarray]:
        return pack(self.feedback, {"weight": np.ones(3, np.float32)}, 7)

    def load_memory(self, arrays: dict[str, np.ndarray]) -> None:
        raise AssertionError("nobody loads")

    def advance(self) -> None:
        raise AssertionError("nobody trains")


class Scalars(dict):
    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self[tag, step] = value


@pytest.fixture
def member() -> Member:
    made = Member()
    registry.add(made)
    made.count(5)
    return made


def test_values_are_of_a_step_since_the_last_time(member: Member) -> None:
    scalars = Scalars()
    writer = hct.StatsWriter(scalars, start_step=100)
    member.count(4)
    writer.log(102)
    assert scalars == {
        (f"{AT}/wire_bytes", 102): 500.0,
        (f"{AT}/uncompressed_bytes", 102): 2000.0,
        (f"{AT}/ratio", 102): 4.0,
        (f"{AT}/encode_ms", 102): pytest.approx(2.0),
        (f"{AT}/wire_ms", 102): pytest.approx(40.0),
        (f"{AT}/decode_ms", 102): pytest.approx(600.0),
    }
    scalars.clear()
    writer.log(103)
    assert scalars == {}
    member.count(1, wire=500)
    member.count(1, wire=500, reason="another")
    hct.reset_stats()  # a reset does no harm
    writer.log(113)
    assert scalars[f"{AT}/wire_bytes", 113] == 100.0
    assert scalars[f"{AT}/ratio", 113] == 2.0
    with pytest.raises(ValueError, match="step 9 is before the last one, 113"):
        writer.log(9)


def test_norms_of_error_feedback(member: Member) -> None:
    for form in ("ef", "loco", "ef21"):
        memory = member.feedback.memory(("dp", f"{form}.weight"), 4, "float32", form)
        memory.begin()
    member.feedback.residual(("dp", "ef.weight"), 4)[:] = [3, 0, 4, 0]
    scalars = Scalars()
    hct.StatsWriter(scalars, prefix="x", residuals=True).log(1)
    assert scalars == {
        ("x/residual_norm/hook_dp/dp.ef.weight", 1): 5.0,
        ("x/residual_norm/hook_dp/dp.loco.weight", 1): 0.0,
        ("x/estimate_norm/hook_dp/dp.ef21.weight", 1): 0.0,
    }


def test_an_event_file_reads_back(member: Member, tmp_path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = hct.StatsWriter(tmp_path)
    for step in (1, 2):
        member.count(step)
        writer.log(step)
    writer.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == sorted(
        f"{AT}/{what}"
        for what in ("wire_bytes", "uncompressed_bytes", "ratio", "encode_ms", "wire_ms", "decode_ms")
    )
    assert [(e.step, e.value) for e in events.Scalars(f"{AT}/wire_bytes")] == [(1, 250.0), (2, 500.0)]


def test_a_summary_writer_of_the_caller_stays_open(member: Member, tmp_path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as theirs:
        writer = hct.StatsWriter(theirs)
        writer.log(1)
        writer.close()
        theirs.add_scalar("loss", torch.ones(()).item(), 1)


def test_without_tensorboard_it_says_so(monkeypatch, tmp_path) -> None:
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install tensorboard"):
        hct.StatsWriter(tmp_path)


def test_what_cannot_write_scalars_is_refused() -> None:
    with pytest.raises(TypeError, match=r"add_scalar.*not list"):
        hct.StatsWriter([])
