"""Check, before ranks exist, all that can be wrong with a run. Imports no torch."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridcomp.errors import ConfigError, MismatchError, missing_module
from hybridcomp.files import listed
from hybridcomp.launcher import inside_mpi
from hybridcomp.policy import Policy, default_policy, frozen_to, load_policy
from hybridcomp.policy.message import MOMENTUM
from hybridcomp_lab.train.checkpoints.resume import (
    Checkpoint,
    check_fits,
    find_checkpoint,
    read_checkpoint,
    run_identity,
)
from hybridcomp_lab.train.checks import check_policy
from hybridcomp_lab.train.config import CYCLIC, EXCHANGE_MOMENTA, TrainConfig
from hybridcomp_lab.train.data import Batches
from hybridcomp_lab.train.reading import parse
from hybridcomp_lab.train.sync import frozen_shares
from hybridcomp_lab.train.techniques import check_techniques, with_sparse_sends
from hybridcomp_lab.train.text import Corpus, load_corpus

_EXTRAS = ("torch", "tyro", "rich")


@dataclass(frozen=True)
class Job:
    """Run that can start.

    Attributes:
        config: configuration as given, ``out`` filled in.
        policy: policy that ``config.policy`` names.
        corpus: text to train on.
        batches: batches of the text.
        identity: settings that a checkpoint of this run must match.
        checkpoint: checkpoint to go on from, or None.
    """

    config: TrainConfig
    policy: Policy
    corpus: Corpus
    batches: Batches
    identity: dict[str, Any]
    checkpoint: Checkpoint | None


def read_policy(config: TrainConfig) -> Policy:
    """Load the policy and check that it speaks of axes that the mesh has, and suits the configuration.

    Raises:
        PolicyError: the policy is wrong; names the file, line and key.
        ConfigError: the policy does not suit the configuration, or needs what the schedule does not have.
    """
    policy = with_sparse_sends(_named_policy(config), config)
    policy.require_axes((*config.axes, *((MOMENTUM,) if config.optimizer in EXCHANGE_MOMENTA else ())))
    check_policy(config, policy)
    check_techniques(policy, config)
    return policy


def _named_policy(config: TrainConfig) -> Policy:
    if config.policy is None and config.optimizer in EXCHANGE_MOMENTA:
        policy = load_policy("onebit")
    elif config.policy is None:
        # Cyclic schedules have exchanges of their own, which auto does not measure; from rare ones it cannot learn.
        measured = config.schedule not in CYCLIC and config.sync is None
        policy = default_policy() if measured else load_policy("hybrid")
    else:
        policy = load_policy(config.policy)
    if config.freeze is None:
        return policy
    if not (policy.decides or policy.adapts):
        raise ConfigError(
            f"freeze {config.freeze} is for choices of auto, or of rules with adapt, and policy {policy.name} makes "
            "none: give --policy auto, or leave --freeze out"
        )
    if policy.adapts and not policy.decides and config.pp > 1:
        raise ConfigError(
            f"freeze {config.freeze}: with pp {config.pp} the replicas of each stage decide apart, and only decisions "
            "of all ranks together can be written: leave out --freeze, or pp"
        )
    if not os.path.isdir(folder := Path(config.freeze).absolute().parent):
        raise ConfigError(f"freeze {config.freeze}: there is no folder {folder}")
    return frozen_to(policy, config.freeze)


def prepare(arguments: Sequence[str]) -> Job:
    """Read configuration, policy, text and checkpoint; compare the sizes of the checkpoint's files, not their contents.

    Raises:
        HybridcompError: an input is wrong; in one sentence.
        SystemExit: the command line does not parse, or asks for help.
    """
    for module in _EXTRAS:
        if importlib.util.find_spec(module) is None:
            raise missing_module(module, "train")
    config = parse(arguments)
    if config.elastic and inside_mpi():
        raise ConfigError(
            "elastic replicas are no ranks of MPI: start each by itself, on Slurm by srun --mpi=none"
        )
    if config.elastic and config.checkpoint_every and config.resume is None and config.out is not None:
        # A replica begins like any other, whether others train, or all have gone.
        config = dataclasses.replace(config, resume="auto")
    policy = read_policy(config)
    checkpoint = find_checkpoint(config, contents=False)
    config = dataclasses.replace(config, out=_run_directory(config, checkpoint))
    corpus = load_corpus(config.data, config.tokenizer, config.val_fraction, config.vocab_size)
    batches = Batches(corpus, config)
    identity = run_identity(config, corpus.vocab_size, corpus.fingerprint)
    if checkpoint is not None:
        check_fits(checkpoint, identity, config)
    return Job(config, policy, corpus, batches, identity, checkpoint)


def _run_directory(config: TrainConfig, checkpoint: Checkpoint | None) -> str:
    out = config.out
    if out is None and checkpoint is not None and checkpoint.path.parent.name == "checkpoints":
        return str(checkpoint.path.parent.parent)
    if out is None:
        return time.strftime("runs/%Y-%m-%d-%H%M%S")
    if os.path.exists(out) and not os.path.isdir(out):
        raise ConfigError(f"out {out} is a file; it must be a directory or not exist")
    if config.resume is None and listed(out, "checkpoints/step-*"):
        raise ConfigError(
            f"{out} holds the checkpoints of a run: go on with --resume auto, or give another --out"
        )
    return out


def with_run_directory(job: Job, out: str) -> Job:
    """Return the job with another run directory: the ranks' clocks may name different ones."""
    return dataclasses.replace(job, config=dataclasses.replace(job.config, out=out))


def with_whole_checkpoint(job: Job) -> Job:
    """Return the job with a checkpoint whose contents are whole, too; one rank reads all of it.

    Raises:
        ConfigError: there is none, or it does not fit.
    """
    if job.checkpoint is None:
        return job
    checkpoint = find_checkpoint(job.config)
    if checkpoint is not None:
        check_fits(checkpoint, job.identity, job.config)
    return dataclasses.replace(job, checkpoint=checkpoint)


def with_checkpoint(job: Job, path: str) -> Job:
    """Return the job with the checkpoint that rank 0 has found whole; with none where this rank cannot read it."""
    if job.checkpoint is None or path == str(job.checkpoint.path):
        return job
    try:
        return dataclasses.replace(job, checkpoint=read_checkpoint(Path(path), contents=False))
    except ConfigError:
        return dataclasses.replace(job, checkpoint=None)


def agreed_text(job: Job) -> str:
    """Return the settings that all ranks must have alike, as text in a fixed order."""
    values = dataclasses.asdict(job.config)
    del values["config"], values["out"], values["freeze"]
    values["policy's rules"] = job.policy.digest
    values["text"] = job.corpus.fingerprint
    values["frozen shares"] = hashlib.sha256(repr(frozen_shares(job.config)).encode()).hexdigest()
    values["checkpoint's step"] = None if job.checkpoint is None else job.checkpoint.step
    return json.dumps(values)


def with_policy(job: Job, name: str) -> Job:
    """Return the job with the default policy that rank 0 has: not every host has a profile."""
    if not job.policy.default or job.policy.name == name:
        return job
    policy = with_sparse_sends(dataclasses.replace(load_policy(name), default=True), job.config)
    check_policy(job.config, policy)
    return dataclasses.replace(job, policy=policy)


def check_agreement(texts: Sequence[str]) -> None:
    """Compare the :func:`agreed_text` of all ranks.

    Raises:
        MismatchError: a setting differs; names the first such value, and both sides.
    """
    first = json.loads(texts[0])
    for rank, text in enumerate(texts):
        other = json.loads(text)
        for key, value in first.items():
            if other[key] != value:
                raise MismatchError(
                    f"ranks disagree on {key}: rank 0 has {value!r}, rank {rank} has {other[key]!r}"
                )
