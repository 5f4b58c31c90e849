"""Name models whose training can be planned: known ones, or the fields of a file for the trainer."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from typing import Any

from hybridcomp.errors import ConfigError
from hybridcomp_lab.planner.step.stages import BYTE_VOCABULARY
from hybridcomp_lab.train.config import TrainConfig
from hybridcomp_lab.train.reading import read_toml

DECIDED = (
    *("dp", "pp", "tp", "schedule", "virtual_stages", "micro_batches", "micro_batch_size", "global_batch"),
    *("stage_layers", "recompute", "recompute_blocks", "shard", "policy", "out", "resume"),
)
"""Fields of the trainer's configuration that a plan decides."""


def _gpt2(layers: int, d_model: int, heads: int) -> dict[str, Any]:
    shape = {"layers": layers, "d_model": d_model, "heads": heads, "seq_len": 1024, "vocab_size": 50257}
    return shape | {"tie_embeddings": True}


def _llama(layers: int, d_model: int, heads: int) -> dict[str, Any]:
    return {"layers": layers, "d_model": d_model, "heads": heads, "seq_len": 2048, "vocab_size": 32000}


MODELS: Mapping[str, Mapping[str, Any]] = {
    # Radford et al. 2019, table 2, with 12 to 25 heads of 64.
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    # Touvron et al. 2023 (arXiv 2302.13971), table 2, in the trainer's blocks: their GELU MLP of four times the width
    # has as many weights as the SwiGLU there, of 8/3 times the width and three matrices.
    "llama-7b": _llama(32, 4096, 32),
    "llama-13b": _llama(40, 5120, 40),
    "llama-33b": _llama(60, 6656, 52),
    "llama-65b": _llama(80, 8192, 64),
}
"""Fields of the trainer's configuration for a model's size, by the model's name."""


def model_config(name: str) -> TrainConfig:
    """Return a configuration on one rank with a model's size.

    Args:
        name: one of :data:`MODELS`, or the path of a TOML file with fields of the trainer; those in :data:`DECIDED` are
            ignored.

    Raises:
        ConfigError: no such model or file; or the file is wrong, with its line and key.
    """
    if name in MODELS:
        return dataclasses.replace(TrainConfig(), **MODELS[name])
    if not name.endswith(".toml") and not os.path.isfile(name):
        near = difflib.get_close_matches(name.lower(), MODELS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"unknown model {name!r}; {hint}Known: {', '.join(MODELS)}, or a .toml file with the trainer's fields"
        )
    values = {key: value for key, value in read_toml(name).items() if key not in DECIDED}
    config = dataclasses.replace(TrainConfig(), **values)
    if config.vocab_size is not None:
        return config
    if config.tokenizer is not None or config.data is not None:
        raise ConfigError(f"{name}: vocab_size is missing, by which the embedding is sized")
    return dataclasses.replace(config, vocab_size=BYTE_VOCABULARY)
