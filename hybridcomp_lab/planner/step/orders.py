"""Find the order of a step's passes on each rank of a pipeline.

The trainer's own schedules run, with stages that only note the calls they get.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple


class Action(NamedTuple):
    """Action of a schedule.

    Attributes:
        kind: a pass; ``settle``: wait for all ranks' reports of the step before, and update; ``report``: tell all
            ranks about this step's gradients; ``apply``: update without waiting for any rank.
        step: step of training, from 0.
        stage: stage of the model, from 0; -1 where it does not matter.
        micro: micro-batch, from 0; -1 where it does not matter.
        last: whether a backward pass is its stage's last one of the step: replicas sum their gradients.
    """

    kind: Literal["forward", "backward", "settle", "report", "apply"]
    step: int
    stage: int = -1
    micro: int = -1
    last: bool = False


@functools.lru_cache(256)
def order(
    schedule: str, rank: int, ranks: int, virtual_stages: int, micro_batches: int, steps: int
) -> tuple[Action, ...]:
    """Return the actions of a pipeline's rank in its first ``steps`` steps.

    Args:
        schedule: gpipe, 1f1b, interleaved, 2bw or local.
        rank: rank in the pipeline.
        ranks: number of ranks of the pipeline; 1: no pipeline.
        virtual_stages: stages of each rank.
        micro_batches: micro-batches of a step.
        steps: number of steps, of which none is followed by an evaluation.
    """
    if ranks == 1:
        return _loop(micro_batches, steps, 0, ("report", "settle"))
    if schedule == "local":
        return _loop(micro_batches, steps, rank, ("report", "apply"))
    if schedule == "2bw":
        return _two_bw(rank, ranks, micro_batches, steps)
    if schedule == "interleaved":
        once = _interleaved(rank, ranks, virtual_stages, micro_batches)
    else:
        once = _single(schedule, rank, ranks, micro_batches)
    return tuple(
        action._replace(step=step)
        for step in range(steps)
        for action in (*once, Action("report", 0), Action("settle", 0))
    )


def _loop(count: int, steps: int, stage: int, ending: tuple[Any, Any]) -> tuple[Action, ...]:
    """Return the order of a loop over the micro-batches, as Loop and Local run it."""
    actions: list[Action] = []
    for step in range(steps):
        for micro in range(count):
            actions.append(Action("forward", step, stage, micro))
            actions.append(Action("backward", step, stage, micro, micro == count - 1))
        actions += [Action(kind, step) for kind in ending]
    return tuple(actions)


class _NotingStage:
    """A stage of PyTorch's pipelines that notes its passes, and has nothing to send or to receive."""

    def __init__(self, index: int, notes: list[Action]) -> None:
        self.stage_index = index
        self._notes = notes

    def forward_one_chunk(self, chunk: int, *_: Any, **__: Any) -> None:
        self._notes.append(Action("forward", 0, self.stage_index, chunk))

    def backward_one_chunk(self, chunk: int, *_: Any, last_backward: bool = False, **__: Any) -> None:
        self._notes.append(Action("backward", 0, self.stage_index, chunk, last_backward))

    def perform_reduce_grad(self, _: float) -> None:
        pass

    def _nothing(self, _: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _nothing


def _single(schedule: str, rank: int, ranks: int, count: int) -> list[Action]:
    """Run the steps of PyTorch's schedules with one stage on a rank."""
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe  # noqa: PLC0415  (seconds)

    notes: list[Action] = []
    base: Any = ScheduleGPipe if schedule == "gpipe" else Schedule1F1B

    def nothing(*_: Any, **__: Any) -> None:
        return None

    # Its constructor wants process groups, which only the passes' real stages use.
    running = object.__new__(base)
    running._stage = _NotingStage(rank, notes)
    running._num_stages, running._n_microbatches = ranks, count
    running.scale_grads = False
    running._check_inputs = lambda *_: ([()] * count, [{}] * count)
    for name in ("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses"):
        setattr(running, name, nothing)
    running._step_microbatches()
    return notes


def _interleaved(rank: int, ranks: int, virtual: int, count: int) -> list[Action]:
    """Ask PyTorch's interleaved schedule for the order of a rank."""
    from torch.distributed.pipelining import ScheduleInterleaved1F1B  # noqa: PLC0415

    asked: Any = object.__new__(ScheduleInterleaved1F1B)
    asked.n_local_stages, asked.pp_group_size, asked._n_microbatches = virtual, ranks, count
    asked.number_of_rounds = max(1, count // ranks)
    asked.microbatches_per_round = count // asked.number_of_rounds
    notes, left = [], {rank + ranks * i: count for i in range(virtual)}
    for action in asked._calculate_single_rank_operations(rank):
        if action is None:
            continue
        stage, micro = action.stage_index, action.microbatch_index
        if action.computation_type.value == "F" or str(action.computation_type) == "F":
            notes.append(Action("forward", 0, stage, micro))
        else:
            left[stage] -= 1
            notes.append(Action("backward", 0, stage, micro, left[stage] == 0))
    return notes


def _two_bw(rank: int, ranks: int, count: int, steps: int) -> tuple[Action, ...]:
    """Run the steps of 2BW."""
    from hybridcomp_lab.train.pipelines.two_bw import TwoBW  # noqa: PLC0415  (imports torch)

    notes: list[Action] = []

    class Noting(TwoBW):
        """2BW whose passes and updates are noted."""

        def __init__(self) -> None:
            self._stage = _Fake(is_first=True, is_last=True)  # type: ignore[assignment]
            self._count, self._lead, self._step = count, ranks - 1 - rank, 0
            self._stashed, self._report, self._results = [], None, []  # type: ignore[assignment]
            self._batches = {}
            self._versions = self.updater = self._onward = self._back = _Fake()  # type: ignore[assignment]
            self.run = _Fake(model=_Fake(embedding=None))  # type: ignore[assignment]
            self._stages: list[tuple[int, int]] = []

        def _forward(self, step: int, i: int) -> None:
            notes.append(Action("forward", step, rank, i))
            self._stashed.append((step, i))  # type: ignore[arg-type]

        def _backward(self, *, last: bool) -> float:
            step, micro = self._stashed.pop(0)  # type: ignore[call-arg,misc]
            notes.append(Action("backward", step, rank, micro, last))
            return 0.0

        def _settle(self) -> None:
            if self._report is not None:
                notes.append(Action("settle", self._step - 1))
                self._report = None

    running = Noting()
    for step in range(steps):
        running._step = step
        running.train(step, last=False)
        running._report = _Fake()  # type: ignore[assignment]
        notes.append(Action("report", step))
    return tuple(notes)


class _Fake:
    """Object that has the given attributes, and any method, which does nothing."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: 0.0
