"""Describe the messages of a step as a policy is asked about them, and compute their costs on a cluster."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hybridcomp.arrays import DType
from hybridcomp.codecs import Codec
from hybridcomp.policy import Choice, Message, Policy
from hybridcomp.policy.auto.cost import Place
from hybridcomp.policy.auto.decider import Decider
from hybridcomp.schedules.topology import Topology
from hybridcomp_lab.planner.cluster import Cluster
from hybridcomp_lab.planner.step import traffic
from hybridcomp_lab.planner.step.stages import compute_dtype, vocabulary
from hybridcomp_lab.planner.step.traffic import Cost
from hybridcomp_lab.train.config import EMBEDDING, TrainConfig

LATE = 1 << 20  # number of a step after every warm-up


@dataclass(frozen=True)
class _Predicted(Policy):
    """Policy whose ``auto`` takes what is predicted to be fastest, as it does before it has measured.

    Attributes:
        deciders: decider of each axis of more than one rank.
    """

    deciders: Mapping[str, Decider] = field(default_factory=dict, compare=False)

    def choose(self, message: Message) -> Choice:
        """Choose the codec for a message, and say why."""
        decider = self.deciders.get(message.axis)
        return super().choose(message) if decider is None else decider.choose(message)


def predicted(policy: Policy, cluster: Cluster, groups: Mapping[str, Sequence[int]]) -> Policy:
    """Return a policy that makes the choices of ``auto`` by the cluster's profile; any other policy as it is.

    Args:
        policy: policy of the job.
        cluster: cluster that it runs on.
        groups: ranks of a group of each axis.
    """
    if not policy.decides:
        return policy
    deciders = {}
    for axis, ranks in groups.items():
        if len(ranks) == 1:
            continue
        hosts = [cluster.host(rank) for rank in ranks]
        network = dataclasses.replace(cluster.profile.network, bandwidth=min(map(cluster.rate, set(hosts))))
        profile = dataclasses.replace(cluster.profile, network=network)
        topology = Topology(traffic.hosts_alike(hosts))
        place = Place(len(ranks), topology.count, topology.largest, compiled=True)
        deciders[axis] = Decider(policy, profile, place)
    values = {one.name: getattr(policy, one.name) for one in dataclasses.fields(policy)}
    return _Predicted(**values, deciders=deciders)


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
    """Return the cost of a collective of some ranks; see :func:`~hybridcomp_lab.planner.step.traffic.collective`."""
    hosts = [cluster.host(rank) for rank in ranks]
    links = traffic.links_of(cluster.profile, min(map(cluster.rate, set(hosts))))
    return traffic.collective(links, op, nbytes, dtype, codec, feedback, traffic.hosts_alike(hosts))


def chosen(cluster: Cluster, ranks: Sequence[int], message: Message, policy: Policy) -> Cost:
    """Return the cost of a collective of some ranks, by the codec that a policy names."""
    choice = policy.choose(message)
    return collective(
        cluster, ranks, message.op, message.nbytes, message.dtype, choice.codec, choice.feedback
    )
