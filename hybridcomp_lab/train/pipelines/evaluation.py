"""Run forward passes without gradients, through all stages in turn."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hybridcomp_lab.train.model.gpt import loss_of
from hybridcomp_lab.train.parallel.residual_stream import Stream
from hybridcomp_lab.train.parallel.stages import Stage
from hybridcomp_lab.train.pipelines.links import Inbox, Outbox
from hybridcomp_lab.train.topology import Topology


def evaluate(
    stages: Sequence[Stage], stream: Stream, topology: Topology, micro_batches: Sequence[Tensor]
) -> float:
    """Run micro-batches through all stages; collective over the pipeline.

    Args:
        stages: stages of this rank, in order: every stage of the model whose index is its place in the pipeline,
            modulo the pipeline's size.
        stream: tensors that they send each other.
        topology: mesh of the ranks.
        micro_batches: each int64 [micro_batch_size, seq_len + 1].

    Returns:
        Their mean loss on the last stage's rank, 0 elsewhere.
    """
    ranks = topology.sizes["pp"]
    group = topology.group("pp")
    count = len(micro_batches)
    here: list[Tensor] = []  # activations between two stages of this rank, where it is the only one
    losses: list[float] = []
    # A rank of several stages takes the next rank's tensors only when it is through with its earlier stages.
    outbox = Outbox(group, (topology.pp + 1) % ranks, "forward", room=count * len(stages))
    for stage in stages:
        arriving = not stage.is_first and ranks > 1
        if arriving:
            inbox = Inbox(group, (topology.pp - 1) % ranks, stream)
            inbox.expect(count)
        for micro in micro_batches:
            x = inbox.take() if arriving else micro[:, :-1] if stage.is_first else here.pop(0)
            if stage.is_last:
                losses.append(loss_of(stage.plain(x), micro[:, 1:]).item())
            elif ranks > 1:
                hidden = stage.plain.hidden(x)
                with stage.sends_activations(train=False):
                    outbox.send(hidden)
            else:
                here.append(stage.plain.hidden(x))
    outbox.flush()
    return sum(losses) / len(losses) if losses else 0.0
