"""Check the values of a configuration, beyond their types."""

from __future__ import annotations

import math
import re

from hybridcomp.arrays import DType
from hybridcomp.errors import ConfigError
from hybridcomp.policy import Message, Policy
from hybridcomp_lab.train.config import CYCLIC, DELAYED, EXCHANGE_MOMENTA, FLUSHED, TrainConfig
from hybridcomp_lab.train.sync import check_sync

MOST_SECONDS = 1e8  # of a timeout: three years, which clocks of all libraries hold


def check_config(config: TrainConfig) -> None:
    """Check the values that need no data, ranks or files.

    Raises:
        ConfigError: a value is wrong; names it and what is allowed.
    """
    positive = (
        "dp pp tp virtual_stages layers d_model heads seq_len steps micro_batches micro_batch_size keep "
        "log_every threads lr stream_lr timeout bucket_mb expert_every capacity_factor pp_neurons_refresh min_replicas "
        "quorum_timeout var_update_scaler"
    )
    for name in positive.split():
        if not 0 < getattr(config, name) < math.inf:
            raise ConfigError(f"{name} must be positive and finite, not {getattr(config, name)}")
    natural = (
        "warmup_steps freeze_step weight_decay clip seed eval_every eval_batches checkpoint_every min_lr experts "
        "balance_loss digest_every"
    )
    for name in natural.split():
        if not getattr(config, name) >= 0:
            raise ConfigError(f"{name} must not be negative, as {getattr(config, name)} is")
    _check_largest(config)
    for name in ("beta1", "beta2", "momentum"):
        if not 0 <= getattr(config, name) < 1:
            raise ConfigError(f"{name} must be at least 0 and below 1, not {getattr(config, name)}")
    if not 0 < config.val_fraction < 1:
        raise ConfigError(f"val_fraction must be above 0 and below 1, not {config.val_fraction}")
    if config.vocab_size is not None and not 1 < config.vocab_size <= 2**31:
        raise ConfigError(f"vocab_size must be from 2 to 2**31, not {config.vocab_size}")
    _check_batch(config)
    _check_sequence(config)
    _check_cut(config)
    _check_recomputed(config)
    for name, divisor in (("heads", "tp"), ("d_model", "heads")):
        value, by = getattr(config, name), getattr(config, divisor)
        if value % by:
            raise ConfigError(f"{name} ({value}) must be divisible by {divisor} ({by})")
    if config.tie_embeddings and config.schedule in (*CYCLIC, "local"):
        raise ConfigError(
            f"tie_embeddings must be false with schedule {config.schedule}, in which the stages' weights change at "
            "different times"
        )
    _check_schedule(config)
    _check_neurons(config)
    _check_replicas(config)
    _check_elastic(config)


def _check_elastic(config: TrainConfig) -> None:
    if not config.elastic:
        for name in ("lighthouse", "replica", "min_replicas", "quorum_timeout", "digest_every"):
            if (value := getattr(config, name)) != getattr(TrainConfig(), name):
                raise ConfigError(
                    f"{name} ({value}) is of replicas that come and go: give --elastic, or leave it out"
                )
        return
    _check_goes_with(
        config,
        "elastic is of whole replicas, each a process, that sum gradients in every step and hand each other their "
        "weights",
        dp=1, pp=1, tp=1, schedule="1f1b", backend="hybridcomp", shard="none", sync=None, experts=0, stream_rank=None,
        pp_neurons=0.0, freeze=None,
    )  # fmt: skip
    if config.replica is not None and not re.fullmatch(
        r"[A-Za-z0-9._-]*[A-Za-z0-9_-][A-Za-z0-9._-]*", config.replica
    ):
        raise ConfigError(f"replica must be a name of letters, digits, dots, - and _, not {config.replica!r}")


def _check_cut(config: TrainConfig) -> None:
    cut = config.stage_layers
    if cut is None:
        if config.layers % config.pp:
            raise ConfigError(
                f"layers ({config.layers}) must be divisible by pp ({config.pp}), or stage_layers say how many each "
                "stage has"
            )
        return
    if config.schedule in CYCLIC:
        raise ConfigError(
            f"stage_layers are of a pipeline's stages, and schedule {config.schedule} has none: leave them out"
        )
    if len(cut) != config.stages or sum(cut) != config.layers or min(cut) < 1:
        raise ConfigError(
            f"stage_layers ({', '.join(map(str, cut))}) must be {config.stages} numbers from 1 up, one for each stage, "
            f"that add up to layers ({config.layers})"
        )


def _check_recomputed(config: TrainConfig) -> None:
    count = config.recompute_blocks
    if count is None:
        return
    if config.recompute != "blocks":
        raise ConfigError(
            f"recompute_blocks ({count}) counts blocks that are computed again: recompute must be blocks, not none"
        )
    if not 1 <= count <= max(config.cut):
        raise ConfigError(
            f"recompute_blocks ({count}) must be from 1 to the layers of a stage ({max(config.cut)}); "
            "for 0 leave recompute out"
        )


def _check_replicas(config: TrainConfig) -> None:
    """Check the settings of replicas: shared state and synchronisation."""
    _check_shard(config)
    if config.experts:
        _check_experts(config)
    if config.sync is not None:
        check_sync(config.sync, config)
    if config.stream_rank is not None:
        _check_streamed(config.stream_rank, config)
    if config.optimizer in EXCHANGE_MOMENTA:
        _check_momenta(config)
    elif config.freeze_step:
        raise ConfigError(
            f"freeze_step ({config.freeze_step}) ends the warm-up of optimizers that exchange momenta: optimizer must "
            f"be one of {', '.join(EXCHANGE_MOMENTA)}, not {config.optimizer}"
        )
    if config.var_update_scaler != 16 and config.optimizer != "zero-one-adam":
        raise ConfigError(
            f"var_update_scaler ({config.var_update_scaler}) is of optimizer zero-one-adam, not of {config.optimizer}"
        )


def _check_streamed(rank: int, config: TrainConfig) -> None:
    if rank < 1:
        raise ConfigError(f"stream_rank must be at least 1, not {rank}; to stream nothing leave it out")
    why = f"stream_rank ({rank}) is of replicas that sum whole gradients in every step"
    _check_goes_with(config, why, pp=1, tp=1, schedule="1f1b", shard="none", experts=0, sync=None)


def _check_goes_with(config: TrainConfig, why: str, **allowed: object) -> None:
    """Check settings that something else needs: each is the value given, None for left out, or one of a tuple.

    Raises:
        ConfigError: one is another; begins with ``why``.
    """
    for name, value in allowed.items():
        choices = value if isinstance(value, tuple) else (value,)
        if (found := getattr(config, name)) not in choices:
            must = "be left out" if value is None else f"be {' or '.join(map(str, choices))}"
            raise ConfigError(f"{why}: {name} must {must}, not {found}")


def _check_momenta(config: TrainConfig) -> None:
    name = config.optimizer
    if config.dp < 2:
        raise ConfigError(
            f"optimizer {name} has replicas exchange momenta: dp must be at least 2, not {config.dp}"
        )
    needs: dict[str, object] = {
        "schedule": ("1f1b", "gpipe"),
        "shard": "none",
        "sync": None,
        "experts": 0,
        "stream_rank": None,
        "sequence_parallel": False,
    }
    if config.pp > 1:
        needs["tie_embeddings"] = False
    if name == "onebit-lamb":
        needs["tp"] = 1
    _check_goes_with(
        config,
        f"optimizer {name} takes the gradients of each replica's own whole parameters where they are made, in every "
        "step",
        **needs,
    )
    if config.tp > 1 and name != "zero-one-adam" and not config.freeze_step:
        raise ConfigError(
            f"optimizer {name} with tp {config.tp}: freeze_step must be given, as parts of a layer would end their "
            "warm-ups at different steps"
        )


def _check_experts(config: TrainConfig) -> None:
    if config.experts % config.dp:
        raise ConfigError(f"experts ({config.experts}) must be divisible by dp ({config.dp})")
    if config.expert_every > config.layers:
        raise ConfigError(
            f"expert_every ({config.expert_every}) must be at most layers ({config.layers}): "
            "else no block has a mixture"
        )
    if config.schedule not in FLUSHED:
        raise ConfigError(
            f"experts ({config.experts}) are met by all replicas at the same time: schedule must be one of "
            f"{', '.join(FLUSHED)}, not {config.schedule}"
        )
    if config.sequence_parallel:
        raise ConfigError(
            f"experts ({config.experts}) take whole sequences: sequence_parallel must be false beside them"
        )


def _check_shard(config: TrainConfig) -> None:
    if config.shard == "none":
        return
    if config.dp < 2:
        raise ConfigError(f"shard {config.shard} is of replicas: dp must be at least 2, not {config.dp}")
    if config.shard == "stages":
        if config.schedule not in CYCLIC:
            raise ConfigError(
                f"shard stages hands weights from replica to replica: schedule must be one of {', '.join(CYCLIC)}, "
                f"not {config.schedule}"
            )
        return
    if config.schedule not in FLUSHED:
        raise ConfigError(
            f"shard {config.shard} updates whole steps: schedule must be one of {', '.join(FLUSHED)}, "
            f"not {config.schedule}"
        )
    if config.tie_embeddings and config.pp > 1:
        raise ConfigError(
            f"shard {config.shard} sums gradients over replicas, and an embedding that two stages share is summed "
            "over the stages, too: tie_embeddings must be false, or pp 1"
        )


def _check_batch(config: TrainConfig) -> None:
    if config.global_batch is None:
        return
    if config.global_batch < 1 or config.global_batch % (config.dp * config.micro_batch_size):
        raise ConfigError(
            f"global_batch ({config.global_batch}) must be a multiple of dp * micro_batch_size "
            f"({config.dp * config.micro_batch_size})"
        )
    if config.global_batch != config.dp * config.replica_batch:
        raise ConfigError(
            f"global_batch ({config.global_batch}) must be dp * micro_batches * micro_batch_size "
            f"({config.dp * config.replica_batch}); leave micro_batches ({config.micro_batches}) out to have it follow"
        )


def _check_sequence(config: TrainConfig) -> None:
    if not 0 <= config.tp_autoencoder <= config.d_model:
        raise ConfigError(
            f"tp_autoencoder must be from 0 to d_model ({config.d_model}), not {config.tp_autoencoder}"
        )
    if not 0 <= config.tp_autoencoder_from < config.layers:
        raise ConfigError(
            f"tp_autoencoder_from must be from 0 to below layers ({config.layers}), not {config.tp_autoencoder_from}"
        )
    if config.tp_autoencoder and config.experts:
        raise ConfigError(
            f"experts ({config.experts}) are not summed over tp: tp_autoencoder must be 0 beside them"
        )
    if config.sequence_parallel and config.tp < 2:
        raise ConfigError(f"sequence_parallel splits over tp, which must be at least 2, not {config.tp}")
    if config.sequence_parallel and config.seq_len % config.tp:
        raise ConfigError(
            f"seq_len ({config.seq_len}) must be divisible by tp ({config.tp}) with sequence_parallel"
        )


def _check_neurons(config: TrainConfig) -> None:
    if not 0 <= config.pp_neurons <= 1:
        raise ConfigError(f"pp_neurons must be from 0 to 1, not {config.pp_neurons}")
    if not config.pp_neurons:
        if config.pp_neurons_after is not None:
            raise ConfigError(
                "pp_neurons_after says where only a share of values goes on: pp_neurons must be above 0"
            )
        return
    of = f"pp_neurons ({config.pp_neurons})"
    borders = config.neuron_borders
    if not borders:
        raise ConfigError(
            f"{of} is of what stages send: pp must be at least 2, or pp_neurons_after name layers"
        )
    after = f"pp_neurons_after ({', '.join(map(str, borders))})"
    if list(borders) != sorted({*borders}) or borders[0] < 0 or borders[-1] >= config.layers - 1:
        raise ConfigError(
            f"{after} must be ascending numbers of layers, from 0 to the last but one ({config.layers - 2})"
        )
    if not set(config.stage_ends) <= set(borders):
        ends = ", ".join(map(str, config.stage_ends))
        raise ConfigError(f"{after} must have the last layers of all stages but the last one ({ends})")
    allowed = (*FLUSHED, "2bw")
    if config.schedule not in allowed:
        raise ConfigError(
            f"{of} are kept forward and backward: schedule must be one of {', '.join(allowed)}, not {config.schedule}"
        )
    if config.sync is not None:
        raise ConfigError(
            f"{of} are found by all replicas in every step: sync must be left out, not {config.sync}"
        )


_OF_BLOCKS = ("all_reduce", "all_gather", "reduce_scatter")  # operations over tp


def check_policy(config: TrainConfig, policy: Policy) -> None:
    """Check that the policy suits the configuration.

    Raises:
        ConfigError: a block that is computed again would not get the messages that it got before.
    """
    if config.recompute == "none" or config.tp == 1:
        return
    measured = policy.decides and "tp" not in policy.axes
    if measured and any(not c.lossless for op in _OF_BLOCKS for c in policy.codecs("tp", op)):
        raise ConfigError(
            f"recompute blocks needs messages of tp that are the same when they are sent again, and policy "
            f"{policy.name} decides anew as it measures: add tp=exact, as in auto:tp=exact, or take choices that "
            "--freeze has written"
        )
    if config.schedule != "2bw":
        return
    # Ranks of 2bw run a forward pass ahead of the step that its backward pass is in.
    for op in _OF_BLOCKS:
        taken = {
            policy.choose(Message("tp", op, "forward", DType.FLOAT32, 2**40, step=step)).codec
            for step in policy.changes
        }
        drawn = [c for c in policy.codecs("tp", op) if c.linear and c.at_step(0) != c.at_step(1)]
        if len(taken) > 1 or drawn:
            what = "warmup_steps, or steps," if len(taken) > 1 else drawn[0].spec
            raise ConfigError(
                f"recompute blocks with schedule 2bw needs messages of tp that are the same in every step: "
                f"policy {policy.name} has {what} for {op} there"
            )


def _check_largest(config: TrainConfig) -> None:
    for name in ("weight_decay", "min_lr", "balance_loss"):
        if math.isinf(getattr(config, name)):
            raise ConfigError(f"{name} must be finite, not {getattr(config, name)}")
    if config.seed >= 2**63:
        raise ConfigError(f"seed must be below 2**63, not {config.seed}")
    for name in ("timeout", "quorum_timeout"):
        if getattr(config, name) > MOST_SECONDS:
            raise ConfigError(f"{name} must be at most {MOST_SECONDS:.0e} s, not {getattr(config, name)}")


def _check_schedule(config: TrainConfig) -> None:
    if config.schedule in CYCLIC:
        _check_cyclic(config)
    elif config.schedule != "1f1b" and config.pp == 1:
        raise ConfigError(f"schedule {config.schedule} is of a pipeline: pp must be at least 2, not 1")
    if config.predict_weights:
        _check_prediction(config)
    if config.synthetic_labels and config.schedule != "local":
        raise ConfigError(
            f"synthetic_labels are for stages with losses of their own: schedule must be local, not {config.schedule}"
        )
    if config.schedule == "interleaved":
        if config.virtual_stages < 2:
            raise ConfigError(
                f"virtual_stages ({config.virtual_stages}) must be at least 2 with schedule interleaved"
            )
        if config.stage_layers is None and config.layers % config.stages:
            raise ConfigError(
                f"layers ({config.layers}) must be divisible by pp * virtual_stages ({config.stages})"
            )
        rounds = max(1, config.micro_batches // config.pp)
        if config.micro_batches % rounds:
            raise ConfigError(
                f"micro_batches ({config.micro_batches}) must be divisible by micro_batches // pp "
                f"({rounds}) with schedule interleaved, which runs them in as many rounds"
            )
    elif config.virtual_stages != 1:
        raise ConfigError(
            f"virtual_stages ({config.virtual_stages}) must be 1 with schedule {config.schedule}: "
            "only interleaved has several stages on a rank"
        )
    if config.micro_batches < config.pp:
        raise ConfigError(
            f"micro_batches ({config.micro_batches}) must be at least pp ({config.pp}): "
            "fewer leave stages of the pipeline without work"
        )


def _check_prediction(config: TrainConfig) -> None:
    if config.schedule not in DELAYED:
        raise ConfigError(
            f"predict_weights is for gradients that are applied a step late: schedule must be one of "
            f"{', '.join(DELAYED)}, not {config.schedule}"
        )
    if config.shard == "stages":
        raise ConfigError(
            "predict_weights must be false with shard stages, whose replicas keep one version of a stage: a "
            "prediction needs two"
        )


def _check_cyclic(config: TrainConfig) -> None:
    if config.dp < 2:
        raise ConfigError(
            f"schedule {config.schedule} is of replicas: dp must be at least 2, not {config.dp}"
        )
    for name in ("pp", "tp", "micro_batches"):
        if getattr(config, name) != 1:
            raise ConfigError(
                f"{name} ({getattr(config, name)}) must be 1 with schedule {config.schedule}: "
                "every replica has all layers, and one micro-batch of a step"
            )
    if config.layers % config.dp:
        raise ConfigError(
            f"layers ({config.layers}) must be divisible by dp ({config.dp}) with schedule {config.schedule}, "
            "which cuts the model into as many stages as there are replicas"
        )
    if config.schedule == "cdp-v2" and config.clip:
        raise ConfigError(
            f"clip ({config.clip}) must be 0 with schedule cdp-v2, which updates a stage before the "
            "gradients of the others, and so their norm, are known"
        )
