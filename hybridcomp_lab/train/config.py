"""Define the trainer's configuration, which :mod:`hybridcomp_lab.train.reading` reads from TOML and flags."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

AXES = ("pp", "dp", "tp")
"""Axes of the mesh, slowest first in rank order."""

EMBEDDING = "embedding"
"""Name of the shared embedding's section of a policy, and of its traffic; it is no axis: see :mod:`.embedding`."""

CYCLIC = ("cdp-v1", "cdp-v2")
"""Schedules of cyclic data parallelism."""

DELAYED = ("2bw", *CYCLIC)
"""Schedules that apply gradients a step after the weights that they were computed with, all or some of them."""

FLUSHED = ("1f1b", "gpipe", "interleaved")
"""Schedules that apply a step's gradient to the weights that it was computed with, at the step's end."""

EXCHANGE_MOMENTA = ("onebit-adam", "onebit-lamb", "zero-one-adam")
"""Optimizers whose replicas exchange momenta after a warm-up: :mod:`hybridcomp.torch.momentum`."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train a decoder-only GPT over MPI with data, tensor and pipeline parallelism and compressed traffic."""

    config: str | None = None
    """TOML file that sets any of these fields; the command line overrides it."""

    dp: int = 1
    """Data-parallel size: replicas of the model, each on its own part of the batch."""
    pp: int = 1
    """Pipeline-parallel size: ranks that share the layers, consecutive ones each. Divides layers, unless
    stage_layers cuts them."""
    tp: int = 1
    """Tensor-parallel size: parts that each layer is split into. Divides heads. Fastest in rank order."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "2bw", "local", "cdp-v1", "cdp-v2"] = "1f1b"
    """Order of forward and backward passes: of a pipeline gpipe, 1f1b, interleaved, 2bw or local, of replicas
    alone cdp-v1 or cdp-v2. Without a pipeline 1f1b is the plain loop. See docs/schedules.md."""
    predict_weights: bool = False
    """Compute gradients that are applied a step late, of schedules 2bw, cdp-v1 and cdp-v2, with predicted weights: the
    last update once more. See docs/schedules.md."""
    synthetic_labels: bool = False
    """Train the stages of schedule local, but for the last, on random vectors of the next tokens, not by heads of their
    own. See docs/schedules.md."""
    virtual_stages: int = 1
    """Stages of each pipeline rank, for schedule interleaved. pp * virtual_stages divides layers."""
    stage_layers: tuple[int, ...] | None = None
    """Layers of each stage, in order, for stages of unequal ranks: as many numbers as stages, which add up to
    layers. By default all stages have as many."""
    backend: Literal["hybridcomp", "gloo"] = "hybridcomp"
    """Transport of the traffic. gloo is for comparison: only data-parallel gradients are compressed on it."""
    policy: str | None = None
    """Compression policy: a preset (none, exact, naive, mzhybrid, zhybrid, hybrid, lowrank, sparse, onebit), auto, a
    TOML file, or a codec for all (int8:block=128). By default onebit for optimizers that exchange momenta; else auto
    where hybridcomp doctor --calibrate has written a profile, and hybrid elsewhere."""
    freeze: str | None = None
    """TOML file that rank 0 writes the choices of policy auto to at the end, as a policy that makes the same ones
    without measuring; or the decisions of rules with adapt, which adapt = "frozen:PATH" repeats."""
    bucket_mb: float = 25.0
    """Largest gradient bucket of data parallelism in MiB; a bucket is reduced while backward goes on."""
    shard: Literal["none", "zero1", "stages"] = "none"
    """State that replicas share, not each holding it: nothing, the optimizer's moments (ZeRO stage 1), or with the
    schedules cdp-v1 and cdp-v2 whole stages, handed from replica to replica. See docs/sharding.md."""

    sync: str | None = None
    """Synchronisation of replicas, in the place of a sum of gradients in each step: rarely, by local_sgd:every=16, or
    diloco:every=32,fragments=4,delay=2,alpha=0,lr=0.7,momentum=0.9, of which every is needed; rarely, with
    micro-batches by their speed, elastic:every=16; or with neighbours alone, by
    gossip:method=powergossip,rank=1,graph=ring, gossip:method=choco, or event. See docs/sync.md."""

    elastic: bool = False
    """Train one replica of several that come and go, over torchft: each is a process of its own, and a step takes those
    that are there. See docs/elastic.md."""
    lighthouse: str | None = None
    """Address of torchft's lighthouse, http://HOST:PORT; by default the variable TORCHFT_LIGHTHOUSE."""
    min_replicas: int = 1
    """Replicas that an elastic run commits a step with, at least."""
    quorum_timeout: float = 600.0
    """Seconds that a replica of an elastic run waits for min_replicas."""
    replica: str | None = None
    """Name of this replica of an elastic run, and of its folder in the run directory; by default made of host and
    process."""
    digest_every: int = 0
    """Steps after which each replica of an elastic run writes a hash of its weights to its metrics; 0: none."""

    sequence_parallel: bool = False
    """Split the residual stream and its norms along the sequence over tp. tp divides seq_len."""
    tp_autoencoder: int = 0
    """Values for each token that tp sums in forward, in the place of d_model: codes of a linear autoencoder that is
    learned with the model. 0: none. See docs/techniques.md."""
    tp_autoencoder_from: int = 0
    """First block that has an autoencoder: earlier ones bear it less."""
    pp_neurons: float = 0.0
    """Share of the residual stream's values that a stage sends on, the largest; the others are zero, and get no
    gradient. 0: all are sent. See docs/techniques.md."""
    pp_neurons_refresh: int = 1000
    """Steps after which the least magnitude that is sent on is found anew; earlier where it no longer gives
    pp_neurons."""
    pp_neurons_after: tuple[int, ...] | None = None
    """Layers after which only the pp_neurons largest values go on, in ascending order; by default the last ones of the
    stages. They are the same model on any number of ranks."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which forward and backward compute, and send: fp32, or bf16 by autocast. Weights stay in fp32."""
    recompute: Literal["none", "blocks"] = "none"
    """Layers that backward computes again, so that their activations need not be kept: none, or the blocks."""
    recompute_blocks: int | None = None
    """Blocks of each stage that are computed again, its first ones, with recompute blocks; by default all."""

    layers: int = 8
    """Transformer blocks."""
    d_model: int = 256
    """Width of the residual stream. The MLP is four times as wide."""
    heads: int = 4
    """Attention heads. Divides d_model."""
    seq_len: int = 128
    """Tokens of context."""
    vocab_size: int | None = None
    """Size of the vocabulary; by default 256 for bytes, the tokenizer's own, or 50304 for a .bin file."""
    experts: int = 0
    """Experts of a mixture, of which each token passes one; 0: no mixtures. dp divides them: replicas share
    them. See docs/sharding.md."""
    expert_every: int = 2
    """Every so-many-th block has a mixture in the place of its MLP. At most layers."""
    capacity_factor: float = 1.25
    """Capacity of an expert for a micro-batch's tokens, as a multiple of its even share."""
    balance_loss: float = 0.01
    """Weight of the loss that makes mixtures use their experts evenly; 0: none."""

    tie_embeddings: bool = False
    """Use the embedding of the tokens as the head's weight; a pipeline's first and last stage hold a copy each."""

    data: str | None = None
    """UTF-8 text file, a folder of them, a .bin file of uint16 tokens, or a folder with train.bin and
    val.bin.
    Without it: the sources of this Python's standard library."""
    tokenizer: str | None = None
    """Hugging Face tokenizer.json. Without it every byte is a token."""
    val_fraction: float = 0.1
    """Share of the tokens, at the end, held out for evaluation."""

    steps: int = 200
    """Optimizer steps."""
    micro_batches: int = 4
    """Micro-batches of a step on each replica; at least pp."""
    micro_batch_size: int = 4
    """Sequences of a micro-batch."""
    global_batch: int | None = None
    """Sequences of a step on all replicas, dp * micro_batches * micro_batch_size; gives micro_batches where
    that is not given."""
    lr: float = 1e-3
    """Peak learning rate."""
    min_lr: float = 1e-4
    """Learning rate at the end of the cosine."""
    warmup_steps: int = 20
    """Steps of linear warm-up to lr."""
    optimizer: Literal["adamw", "lans", "sgd", "onebit-adam", "onebit-lamb", "zero-one-adam"] = "adamw"
    """AdamW; LANS, which normalises the gradient of each tensor and moves it in proportion to its norm; SGD with
    Nesterov's momentum; or one of those whose replicas exchange momenta, not gradients, after a warm-up, by signs or
    the policy's section momentum. See docs/axes.md."""
    freeze_step: int = 0
    """Steps of the warm-up of onebit-adam and onebit-lamb; 0: until the variance has settled. Of zero-one-adam the
    first steps that all renew the variance; 0: as many as warmup_steps."""
    var_update_scaler: int = 16
    """Renewals of zero-one-adam's variance, by gradients, after which the steps from one to the next double."""
    weight_decay: float = 0.1
    """Decoupled weight decay, on matrices other than embeddings."""
    beta1: float = 0.9
    """Decay of the mean of gradients, of all optimizers but SGD."""
    beta2: float = 0.95
    """Decay of the mean of squared gradients, of all optimizers but SGD."""
    momentum: float = 0.9
    """Momentum of SGD; 0 where error feedback has it: ef-sgdm, dgc."""
    clip: float = 1.0
    """Largest global norm of the gradient over all axes; 0 does not clip."""
    stream_rank: int | None = None
    """Columns of the factors that linear layers stream their gradients into; the gradients are not formed, and SGD
    takes AdamW's place there. By default no gradient is streamed. See docs/streaming.md."""
    stream_lr: float = 0.5
    """Peak learning rate of streamed weights, which then follows the schedule of lr."""
    seed: int = 1
    """Seed of the weights and of the batches."""

    eval_every: int = 0
    """Evaluate on the held-out tokens every so many steps, and at the end; 0: only at the end."""
    eval_batches: int = 4
    """Micro-batches per replica in an evaluation; 0: never evaluate."""
    checkpoint_every: int = 0
    """Write a checkpoint every so many steps, and at the end; 0: none."""
    keep: int = 2
    """Newest checkpoints that are kept."""
    resume: str | None = None
    """Checkpoint or run directory to go on from, or auto: the newest checkpoint of --out if there is one."""
    out: str | None = None
    """Run directory for config.toml, metrics.jsonl and checkpoints/. By default runs/<date and time>."""
    log_every: int = 10
    """Steps between the lines printed where there is no terminal."""
    threads: int = 1
    """Compute threads of each rank."""
    timeout: float = 300.0
    """Seconds after which a communication that does not complete is an error."""

    @property
    def ranks(self) -> int:
        """Return the number of ranks that the mesh needs: dp * pp * tp."""
        return self.dp * self.pp * self.tp

    @property
    def axes(self) -> tuple[str, ...]:
        """Return the axes by which traffic is counted.

        They are the mesh's axes, and those of experts' tokens and of an embedding that two stages share, where
        they exist.
        """
        shared = (EMBEDDING,) if self.tie_embeddings and self.pp > 1 else ()
        return (*AXES, *(("ep",) if self.experts else ()), *shared)

    @property
    def stages(self) -> int:
        """Return the number of parts that the layers are cut into."""
        return self.dp if self.schedule in CYCLIC else self.pp * self.virtual_stages

    @property
    def cut(self) -> tuple[int, ...]:
        """Return the number of layers of each stage."""
        if self.stage_layers is not None:
            return self.stage_layers
        return (self.layers // self.stages,) * self.stages

    def blocks_of(self, stage: int) -> range:
        """Return the numbers of the layers that a stage has."""
        cut = self.cut
        return range(sum(cut[:stage]), sum(cut[: stage + 1]))

    @property
    def neuron_borders(self) -> tuple[int, ...]:
        """Return the numbers of the layers after which only the largest values go on."""
        if not self.pp_neurons:
            return ()
        if self.pp_neurons_after is not None:
            return self.pp_neurons_after
        return self.stage_ends

    @property
    def stage_ends(self) -> tuple[int, ...]:
        """Return the numbers of the layers whose output is sent to another stage."""
        return tuple(end - 1 for end in itertools.accumulate(self.cut))[:-1]

    def recomputed(self, stage: int) -> range:
        """Return the numbers of a stage's layers that backward computes again."""
        return self.blocks_of(stage)[: self.recompute_blocks] if self.recompute == "blocks" else range(0)

    @property
    def replica_batch(self) -> int:
        """Return the number of sequences of a step on one replica."""
        return self.micro_batches * self.micro_batch_size

    @property
    def tokens_per_step(self) -> int:
        """Return the number of tokens that one optimizer step trains on."""
        return self.dp * self.replica_batch * self.seq_len
