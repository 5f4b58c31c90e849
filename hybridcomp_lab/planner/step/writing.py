"""Write the programs of a configuration's ranks on a cluster, for :mod:`.replay`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from hybridcomp.arrays import DType
from hybridcomp.policy import Message, Policy
from hybridcomp_lab.planner.cluster import Cluster
from hybridcomp_lab.planner.compute import Work
from hybridcomp_lab.planner.step import messages, traffic
from hybridcomp_lab.planner.step import stages as shapes
from hybridcomp_lab.planner.step.buckets import Bucket, buckets
from hybridcomp_lab.planner.step.messages import LATE
from hybridcomp_lab.planner.step.orders import Action, order
from hybridcomp_lab.planner.step.programs import Compute, Key, Mark, Program, Start, Wait
from hybridcomp_lab.planner.step.stages import StageShape
from hybridcomp_lab.planner.step.traffic import Cost
from hybridcomp_lab.train.config import EMBEDDING, TrainConfig

WORLD = "world"
"""Name of the stream for the messages of all ranks in every step: losses, norms, counters."""

_REPORTED = 5  # numbers that a rank reports, beside its counters


class Writer:
    """Writer of one configuration's programs.

    Args:
        config: layout and model.
        cluster: cluster that it runs on.
        policy: policy that names the codecs.

    Attributes:
        stages: stages of the model, as a rank holds them.
    """

    def __init__(self, config: TrainConfig, cluster: Cluster, policy: Policy) -> None:
        self._config, self._cluster = config, cluster
        ends = [self._rank(pp, 0, 0) for pp in range(config.pp)]
        groups = {
            "dp": self._group(0, "dp"),
            "tp": self._group(0, "tp"),
            "pp": ends[:2],
            EMBEDDING: [ends[0], ends[-1]],
        }
        self._policy = messages.predicted(policy, cluster, groups)
        self.stages = shapes.stages_of(config)
        self._dtype = shapes.compute_dtype(config)
        self._tp_costs: dict[tuple[object, ...], Cost] = {}
        self._send_costs: dict[tuple[int, int, Message], Cost] = {}

    def programs(self, steps: int) -> list[Program]:
        """Write the programs of the first ``steps`` steps, one for each place of the pipeline."""
        config = self._config
        found = []
        for pp in range(config.pp):
            ranks = self._ranks(pp)
            speed = self._cluster.slowest(ranks)
            program = Program(ranks[0], len(ranks), speed, loads=self._loads(pp))
            actions = order(
                config.schedule, pp, config.pp, config.virtual_stages, config.micro_batches, steps
            )
            for action in actions:
                program.instructions.extend(self._instructions(pp, action))
            found.append(program)
        return found

    # -- where ranks are ------------------------------------------------------------------------------

    def _rank(self, pp: int, dp: int, tp: int) -> int:
        return (pp * self._config.dp + dp) * self._config.tp + tp  # as Topology.rank_of

    def _ranks(self, pp: int) -> list[int]:
        return [self._rank(pp, dp, tp) for dp in range(self._config.dp) for tp in range(self._config.tp)]

    def _group(self, pp: int, axis: str, other: int = 0) -> list[int]:
        """Return the ranks of a group of dp or tp at a place of the pipeline, at ``other`` of the other axis."""
        if axis == "dp":
            return [self._rank(pp, dp, other) for dp in range(self._config.dp)]
        return [self._rank(pp, other, tp) for tp in range(self._config.tp)]

    def _hosts(self, ranks: Sequence[int]) -> list[int]:
        return [self._cluster.host(rank) for rank in ranks]

    def _loads(self, pp: int) -> dict[str, dict[int, int]]:
        """Return, for each stream, the number of groups or senders on each host's link at once."""
        loads: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        for axis, groups in (("dp", self._config.tp), ("tp", self._config.dp)):
            for other in range(groups):
                hosts = set(self._hosts(self._group(pp, axis, other)))
                for host in hosts if len(hosts) > 1 else ():
                    loads[axis][host] += 1
        for there in (pp - 1, pp + 1):
            to = there % self._config.pp
            for mine, yours in zip(self._hosts(self._ranks(pp)), self._hosts(self._ranks(to)), strict=True):
                if mine != yours:
                    loads[f"pp to {to}"][mine] += there == pp + 1 or self._config.pp > 2
        every = range(self._cluster.hosts) if self._cluster.hosts > 1 else ()
        loads[WORLD] = dict.fromkeys(every, 1)
        return {stream: {h: max(1, n) for h, n in by_host.items()} for stream, by_host in loads.items()}

    # -- costs of messages ----------------------------------------------------------------------------

    def _send(self, pp: int, to: int, message: Message) -> Cost:
        asked = pp, to, message
        if asked not in self._send_costs:
            self._send_costs[asked] = self._cost_of_send(pp, to, message)
        return self._send_costs[asked]

    def _cost_of_send(self, pp: int, to: int, message: Message) -> Cost:
        pairs = list(zip(self._hosts(self._ranks(pp)), self._hosts(self._ranks(to)), strict=True))
        rate = min(self._cluster.rate(mine) for mine, _ in pairs)
        links = traffic.links_of(self._cluster.profile, rate)
        far = any(mine != yours for mine, yours in pairs)
        codec = self._policy.choose(message).codec
        return traffic.send(links, message.nbytes, message.dtype, codec, far)

    def _seconds(self, *works: Work) -> float:
        return sum(map(self._cluster.compute.seconds, works))

    # -- instructions ---------------------------------------------------------------------------------

    def _instructions(self, pp: int, action: Action) -> Iterator[Compute | Start | Wait | Mark]:
        if action.kind == "forward":
            yield from self._forward(pp, action)
        elif action.kind == "backward":
            yield from self._backward(pp, action)
        elif action.kind == "report":
            yield from self._report(pp, action.step)
        elif action.kind == "settle":
            yield Wait((WORLD, action.step))
            yield from self._update(pp, action.step)
        else:  # local: the update waits for no rank, the figures of the step before do
            yield from self._update(pp, action.step)
            if action.step:
                yield Wait((WORLD, action.step - 1))

    def _forward(self, pp: int, action: Action) -> Iterator[Compute | Start | Wait]:
        stage, config = self.stages[action.stage], self._config
        name = f"forward {action.micro} of stage {stage.index}"
        if stage.index:
            yield Wait(("activations", stage.index, action.step, action.micro))
        before = self._pass_seconds("forward")
        if stage.index:
            before += self._seconds(Work("send"))
        if stage.index == 0:
            before += self._seconds(shapes.embedding(config))
        yield from self._blocks_forward(pp, stage, name, before)
        after = 0.0
        if stage.has_head:
            after += self._seconds(shapes.norm(config), shapes.head(config))
        if stage.index + 1 < stage.count:
            after += self._seconds(Work("send"))
        yield Compute(name, after)
        if stage.index + 1 < stage.count:
            yield self._start_send(pp, "activations", stage, action)

    def _blocks_forward(
        self, pp: int, stage: StageShape, name: str, before: float, *, again: bool = False
    ) -> Iterator[Compute | Start | Wait]:
        seconds = before
        parts = [(block, part) for block in stage.blocks for part in shapes.block_parts(self._config)]
        for number, (block, part) in enumerate(parts):
            if self._config.sequence_parallel:
                yield Compute(name, seconds)
                yield from self._tp(pp, "all_gather", "forward", stage, block)
                seconds = 0.0
            seconds += self._seconds(*part)
            if self._config.tp > 1 and not (again and number == len(parts) - 1):
                yield Compute(name, seconds)
                op = "reduce_scatter" if self._config.sequence_parallel else "all_reduce"
                yield from self._tp(pp, op, "forward", stage, block)
                seconds = 0.0
        yield Compute(name, seconds)

    def _backward(self, pp: int, action: Action) -> Iterator[Compute | Start | Wait]:
        stage, config = self.stages[action.stage], self._config
        name = f"backward {action.micro} of stage {stage.index}"
        has_gradient = stage.index + 1 < stage.count and config.schedule != "local"
        sends = stage.index > 0 and config.schedule != "local"
        if has_gradient:
            yield Wait(("gradients", stage.index, action.step, action.micro))
        due = self._buckets(pp, stage) if action.last else []
        started: list[Key] = []
        again = config.recomputed(stage.index)
        seconds = self._before_backward(stage, has_gradient)
        for block in reversed(stage.blocks):
            if block in again:
                alone = StageShape(stage.index, stage.count, (block,), (), False)
                yield from self._blocks_forward(pp, alone, name, seconds, again=True)
                seconds = 0.0
            for part in reversed(list(shapes.block_parts(config))):
                if config.sequence_parallel:
                    yield Compute(name, seconds)
                    yield from self._tp(pp, "all_gather", "backward", stage, block)
                    seconds = 0.0
                first, layer = part
                seconds += self._seconds(shapes.backward(layer, config))
                if config.tp > 1:
                    yield Compute(name, seconds)
                    op = "reduce_scatter" if config.sequence_parallel else "all_reduce"
                    yield from self._tp(pp, op, "backward", stage, block)
                    seconds = 0.0
                seconds += self._seconds(shapes.backward(first, config))
            ready = [bucket for bucket in due if bucket.block == block]
            if ready:
                yield Compute(name, seconds)
                seconds = 0.0
                yield from self._start_buckets(stage, action.step, ready, started)
        if stage.index == 0:
            seconds += self._seconds(shapes.backward(shapes.embedding(config), config))
        if sends:
            seconds += self._seconds(Work("send"))
        yield Compute(name, seconds)
        yield from self._start_buckets(stage, action.step, [b for b in due if b.block is None], started)
        for key in started:
            yield Wait(key)
        if sends:  # the hook's sums are waited for within backward: a stage before it gets the gradient later
            yield self._start_send(pp, "gradients", stage, action)

    def _pass_seconds(self, direction: str) -> float:
        """Return the seconds of a pass without its operations."""
        replicated = self._config.dp > 1 and self._config.shard == "none"
        return self._seconds(Work("pass", direction), *([Work("replica")] if replicated else []))

    def _before_backward(self, stage: StageShape, has_gradient: bool) -> float:
        """Return the seconds of a backward pass before its first block."""
        seconds = self._pass_seconds("backward")
        if has_gradient:
            seconds += self._seconds(Work("send"))
        if stage.has_head:
            works = shapes.norm(self._config), shapes.head(self._config)
            seconds += self._seconds(*(shapes.backward(work, self._config) for work in works))
        return seconds

    def _start_buckets(
        self, stage: StageShape, step: int, ready: Sequence[Bucket], started: list[Key]
    ) -> Iterator[Start | Compute]:
        for bucket in ready:
            key: Key = ("bucket", stage.index, step, bucket.number)
            yield Compute("sum", bucket.coded * self._seconds(Work("coded")))
            yield Start(key, "dp", bucket.cost)
            started.append(key)

    def _buckets(self, pp: int, stage: StageShape) -> list[Bucket]:
        if self._config.dp == 1 or self._config.shard != "none":
            return []
        ranks = self._group(pp, "dp")
        return buckets(
            stage,
            self._config,
            self._policy,
            len(set(self._hosts(ranks))),
            lambda nbytes, codec, feedback: messages.collective(
                self._cluster, ranks, "all_reduce", nbytes, DType.FLOAT32, codec, feedback
            ),
        )

    def _start_send(self, pp: int, what: str, stage: StageShape, action: Action) -> Start:
        config = self._config
        forward = what == "activations"
        index = stage.index + (1 if forward else -1)
        time = config.seq_len // config.tp if config.sequence_parallel else config.seq_len
        shape = (config.micro_batch_size, time, config.d_model)
        message = Message(
            "pp",
            "send",
            "forward" if forward else "backward",
            self._dtype,
            math.prod(shape) * self._dtype.itemsize,
            None,
            LATE,
            shape,
            stage=stage.index,
            layer=max(stage.blocks) if forward else min(stage.blocks) - 1,
            hosts=len(set(self._hosts([self._rank(i, 0, 0) for i in range(config.pp)]))),
        )
        to = index % config.pp
        return Start((what, index, action.step, action.micro), "pp", self._send(pp, to, message), to=to)

    def _tp(
        self, pp: int, op: str, phase: str, stage: StageShape, block: int
    ) -> Iterator[Start | Wait | Compute]:
        asked = pp, op, phase, stage.index, block
        if asked not in self._tp_costs:
            ranks = self._group(pp, "tp")
            hosts = len(set(self._hosts(ranks)))
            message = messages.of_layer(self._config, op, phase, hosts, stage.index, block)
            self._tp_costs[asked] = messages.chosen(self._cluster, ranks, message, self._policy)
        yield Compute("sum", self._seconds(Work("sum")))
        yield Start((op,), "tp", self._tp_costs[asked])
        yield Wait((op,))

    def _report(self, pp: int, step: int) -> Iterator[Compute | Start | Wait]:
        config = self._config
        mine = [stage for stage in self.stages if stage.index % config.pp == pp]
        if config.shard == "zero1":
            yield from self._shards(pp, step, sum(stage.elements for stage in mine))
        if EMBEDDING in config.axes and pp in (0, config.pp - 1):
            yield from self._embedding(step)
        yield Compute("report", self._seconds(Work("sum")))
        numbers = 8 * (_REPORTED + 2 * len(config.axes))
        ranks = range(config.ranks)
        cost = messages.collective(
            self._cluster, ranks, "all_gather", numbers * len(ranks), DType.INT64, traffic.NONE
        )
        yield Start((WORLD, step), WORLD, cost, among=tuple(range(config.pp)))

    def _shards(self, pp: int, step: int, elements: int) -> Iterator[Start | Wait]:
        """Sum the gradients of shards, and gather the weights: ZeRO stage 1."""
        ranks = self._group(pp, "dp")
        for op in ("reduce_scatter", "all_gather"):
            message = Message(
                "dp",
                op,
                "backward",
                DType.FLOAT32,
                4 * elements,
                "weight",
                LATE,
                hosts=len(set(self._hosts(ranks))),
            )
            yield Start((op, step), "dp", messages.chosen(self._cluster, ranks, message, self._policy))
            yield Wait((op, step))

    def _embedding(self, step: int) -> Iterator[Start | Wait]:
        """Sum the gradient of an embedding that the first and the last stage share."""
        config = self._config
        ends = [self._rank(pp, 0, 0) for pp in (0, config.pp - 1)]
        cost = messages.chosen(self._cluster, ends, messages.of_embedding(config), self._policy)
        key: Key = (EMBEDDING, step)
        yield Start(key, EMBEDDING, cost, among=(0, config.pp - 1))
        yield Wait(key)

    def _update(self, pp: int, step: int) -> Iterator[Compute | Mark]:
        elements = sum(stage.elements for stage in self.stages if stage.index % self._config.pp == pp)
        if self._config.shard == "zero1":
            elements = -(-elements // self._config.dp)
        yield Compute("update", self._seconds(shapes.optimizer(elements), Work("step")))
        yield Mark(step)
