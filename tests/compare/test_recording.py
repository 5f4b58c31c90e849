"""The recorder of an unmodified program's steps: losses, waiting, bytes of interfaces."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from hybridcomp.compare.runner import ProgramError, _read
from hybridcomp.plugin import recording
from hybridcomp.plugin.recording import Losses, Recorder, waiting_share


@dataclass
class Event:
    """Event as torch's profiler gives it; times in nanoseconds."""

    what: str
    began: int
    lasted: int
    where: str = "DeviceType.CPU"
    thread: int = 1

    def name(self) -> str:
        return self.what

    def start_ns(self) -> int:
        return self.began

    def duration_ns(self) -> int:
        return self.lasted

    def start_thread_id(self) -> int:
        return self.thread

    def device_type(self) -> str:
        return self.where


@pytest.mark.parametrize(
    ("events", "share"),
    [
        ([Event("gloo:all_reduce", 100, 500)], 0.5),
        ([Event("gloo:all_reduce", 100, 500), Event("aten::mm", 200, 300)], 0.2),
        # What waits inside an operation computes nothing.
        ([Event("hybridcomp:all_gather", 0, 400), Event("_c10d_functional::wait_tensor", 0, 400)], 0.4),
        (
            [
                Event("hybridcomp:all_gather", 0, 400),
                Event("aten::linear", 0, 400),
                Event("_c10d_functional::wait_tensor", 100, 200),
            ],
            0.2,
        ),
        # Two collectives at once are waited for once; a span of the program's own computes nothing.
        ([Event("gloo:send", 0, 300), Event("gloo:recv", 100, 300), Event("my span", 0, 1000)], 0.4),
        ([Event("aten::mm", 0, 1000)], 0.0),
        ([Event("gloo:all_reduce", -500, 600), Event("gloo:all_reduce", 900, 600)], 0.2),  # over the edges
        # A hook that waits in a node of the backward pass, or a closure in an optimizer's step.
        ([Event("gloo:all_reduce", 100, 500), Event("torch::autograd::AccumulateGrad", 100, 600)], 0.5),
        ([Event("gloo:all_reduce", 100, 500), Event("Optimizer.step#LBFGS.step", 0, 900)], 0.5),
        # What a thread of the hook's copies is no computing of the program's.
        (
            [
                Event(recording._HERE, 0, 1, thread=2),
                Event("gloo:all_to_all", 0, 500, thread=3),
                Event("aten::copy_", 100, 300, thread=3),
                Event("aten::mm", 400, 200, thread=2),
            ],
            0.4,
        ),
        # On a GPU its kernels compute, whatever the processor does meanwhile.
        (
            [
                Event("ncclDevKernel_AllReduce", 0, 500, "DeviceType.CUDA"),
                Event("gemm", 200, 200, "DeviceType.CUDA"),
                Event("aten::mm", 0, 1000),
            ],
            0.3,
        ),
    ],
)
def test_the_share_of_waiting_is_what_nothing_was_computed_in(events: list[Event], share: float):
    assert waiting_share(events, (0.0, 1000.0)) == pytest.approx(share)


def test_losses_are_those_that_backward_begins_with():
    losses = Losses()
    losses.note(torch.tensor(2.0), None)
    losses.note([torch.tensor(4.0), torch.ones(3)], [None, torch.ones(3)])
    losses.note(torch.tensor(100.0), torch.tensor(1.0))  # a part of a graph, whose gradient was given
    losses.note(torch.ones(3), None)
    losses.next_step()
    losses.next_step()
    losses.note(torch.tensor([7.0]), None)
    assert losses.read(0, 3) == [3.0, None, 7.0]


def test_a_loss_is_kept_as_it_was_when_backward_began():
    losses = Losses()
    value = torch.tensor(2.0)
    losses.note(value, None)
    value.mul_(5)
    assert losses.read(0, 1) == [2.0]


def test_a_scaled_loss_is_recorded_without_its_scale(monkeypatch: pytest.MonkeyPatch):
    watched = ((torch.autograd, "backward"), (torch.amp.GradScaler, "scale"), (ShardedGradScaler, "scale"))
    for owner, name in watched:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    losses = Losses()
    recording._watch_losses(losses)
    weight = torch.ones(3, requires_grad=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(weight.sum()).backward()
    weight.sum().backward()
    torch.autograd.backward(scaler.scale([weight.sum(), weight.sum()]))
    monkeypatch.setattr(ShardedGradScaler, "__init__", torch.amp.GradScaler.__init__)  # it wants a group
    ShardedGradScaler("cpu", init_scale=1024.0).scale(weight.sum()).backward()
    assert losses.read(0, 1) == [3.0]


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Return the recorder of a rank among several."""
    monkeypatch.setattr(Recorder, "_join", lambda self: self._record.update(state="early", rank=1, size=2))
    return Recorder(tmp_path, 1, 10, 0)


class Optimizer:
    """Optimizer, as the recorder sees one."""


def steps_of(recorder: Recorder) -> int:
    """Return how many steps a recorder says there were."""
    recorder.left()
    return json.loads((recorder._folder / "rank-1.json").read_text())["count"]


def test_an_optimizer_that_steps_group_by_group_makes_one_step(recorder: Recorder):
    optimizer, other = Optimizer(), Optimizer()
    for _ in range(4):
        for _ in range(2):  # gradients of two micro-batches
            recorder.losses.note(torch.tensor(1.0), None)
        for one in (optimizer, optimizer, other, optimizer):
            recorder.stepped(one)
    assert steps_of(recorder) == 4
    assert recorder.losses.read(0, 4) == [1.0] * 4


def test_steps_count_where_no_backward_pass_is_seen(recorder: Recorder):
    optimizer = Optimizer()
    for _ in range(5):
        recorder.stepped(optimizer)
    assert steps_of(recorder) == 5


def test_an_optimizer_that_takes_the_place_of_one_that_is_gone_counts(recorder: Recorder):
    for _ in range(3):
        optimizer = Optimizer()
        for _ in range(2):
            recorder.losses.note(torch.tensor(1.0), None)
            recorder.stepped(optimizer)
    assert steps_of(recorder) == 6


def test_a_fork_that_trains_is_a_rank_and_a_fork_of_a_rank_is_none(recorder: Recorder, tmp_path: Path):
    def forked() -> int:
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                recorder.losses.note(torch.tensor(1.0), None)
                recorder.stepped(Optimizer())
                steps_of(recorder)
            os._exit(0)
        return os.waitpid(child, 0)[1]

    assert forked() == 0
    record = tmp_path / "rank-1.json"
    assert json.loads(record.read_text())["count"] == 1
    record.unlink()
    recorder.stepped(Optimizer())
    assert forked() == 0
    assert not record.exists()


def test_a_process_that_trains_alone_is_ended_at_its_first_step(tmp_path: Path):
    recorder = Recorder(tmp_path, 1, 10, 0)
    with pytest.raises(SystemExit) as ended:
        recorder.stepped(Optimizer())
    assert ended.value.code == 0
    record = json.loads((tmp_path / "rank-0.json").read_text())
    assert record == {"state": "alone", "rank": 0, "distributed": False}


def test_bytes_are_those_of_interfaces_that_lead_outward(monkeypatch: pytest.MonkeyPatch):
    rows = ["lo", "eth0", "docker0"]
    text = "head\nhead\n" + "".join(f"{n}: 1 2 3 4 5 6 7 8 {9 + i} 10\n" for i, n in enumerate(rows))
    monkeypatch.setattr(recording, "read_text", lambda _: text)
    monkeypatch.setattr(recording.os.path, "exists", lambda path: path == "/sys/class/net/eth0/device")
    assert recording._interfaces() == {"eth0": 10}
    monkeypatch.setattr(recording.os.path, "exists", lambda _: False)
    assert recording._interfaces() == {"eth0": 10, "docker0": 11}
    assert recording._less({"eth0": 30, "new": 7}, {"eth0": 10}) == 20


def test_what_was_measured_is_kept_if_reading_the_profile_fails(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def crashed(_: Recorder) -> None:
        raise MemoryError

    monkeypatch.setattr(Recorder, "_waiting", crashed)
    optimizer = Optimizer()
    for _ in range(10):
        recorder.stepped(optimizer)
    with pytest.raises(MemoryError):
        recorder.stepped(optimizer)
    record = json.loads((tmp_path / "rank-1.json").read_text())
    assert (record["state"], record["waiting"], len(record["seconds"])) == ("stepped", None, 10)


def test_ranks_of_two_jobs_at_once_are_told_apart_from_those_of_one(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def join(self: Recorder) -> None:
        names = {"host": "h", "hostname": "h", "backend": "gloo"}
        self._record.update(state="early", rank=0, size=1, **names)

    monkeypatch.setattr(Recorder, "_join", join)
    for count in (1, 2):
        again, optimizer = Recorder(tmp_path, 1, 10, 0), Optimizer()
        for _ in range(10):
            again.stepped(optimizer)
        again.left()  # of a job that is started anew: it was no rank to the end
        again._record["state"] = "early"
        with pytest.raises(SystemExit):
            again.stepped(optimizer)
        if count == 1:
            assert [one["rank"] for one in _read(tmp_path)] == [0]
    with pytest.raises(ProgramError, match="2 processes were rank 0 at once"):
        _read(tmp_path)
