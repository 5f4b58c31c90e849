"""Describe the messages of a step as a policy is asked about them, and compute their costs on a cluster."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hybridcomp.arrays import DType
from hybridcomp.codecs import Codec
from hybridcomp.planner.cluster import Cluster
from hybridcomp.planner.step import traffic
from hybridcomp.planner.step.stages import compute_dtype, vocabulary
from hybridcomp.planner.step.traffic import Cost
from hybridcomp.policy import Message, Policy
from hybridcomp.train.config import EMBEDDING, TrainConfig

LATE = 1 << 20  # number of a step after every warm-up


def of_layer(
    config: TrainConfig,
    op: str,
    phase: str,
    hosts: int,
    stage: int | None = None,
    layer: int | None = None,
) -> Message:
    """Return the message of a collective of tp within a layer."""
    shape, dtype = (config.micro_batch_size, config.seq_len, config.d_model), compute_dtype(config)
    nbytes = math.prod(shape) * dtype.itemsize
    return Message("tp", op, phase, dtype, nbytes, None, LATE, shape, stage=stage, layer=layer, hosts=hosts)


def of_embedding(config: TrainConfig) -> Message:
    """Return the message of an embedding's gradient, which the first and the last stage sum."""
    shape = vocabulary(config), config.d_model
    nbytes = DType.FLOAT32.itemsize * math.prod(shape)
    return Message(EMBEDDING, "all_reduce", "backward", DType.FLOAT32, nbytes, None, LATE, shape)


def collective(
    cluster: Cluster,
    ranks: Sequence[int],
    op: str,
    nbytes: int,
    dtype: DType,
    codec: Codec,
    feedback: str | None = None,
) -> Cost:
    """Return the cost of a collective of some ranks; see :func:`~hybridcomp.planner.step.traffic.collective`."""
    hosts = [cluster.host(rank) for rank in ranks]
    links = traffic.links_of(cluster.profile, min(map(cluster.rate, set(hosts))))
    return traffic.collective(links, op, nbytes, dtype, codec, feedback, traffic.hosts_alike(hosts))


def chosen(cluster: Cluster, ranks: Sequence[int], message: Message, policy: Policy) -> Cost:
    """Return the cost of a collective of some ranks, by the codec that a policy names."""
    choice = policy.choose(message)
    return collective(
        cluster, ranks, message.op, message.nbytes, message.dtype, choice.codec, choice.feedback
    )
