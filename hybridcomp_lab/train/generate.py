"""Generate text from a trained model: put its checkpoint together on one process, and sample."""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridcomp.errors import ConfigError, printable
from hybridcomp.files import checked
from hybridcomp_lab.train.checkpoints.resume import RECORD, Checkpoint
from hybridcomp_lab.train.checkpoints.stored import described, read
from hybridcomp_lab.train.model.gpt import GPT, ModelShape
from hybridcomp_lab.train.parallel.tensor_parallel import joined

_SIZES = {
    **dict.fromkeys(("vocab_size", "layers", "d_model", "heads", "seq_len"), int),
    "tie_embeddings?": bool,
    **dict.fromkeys(("experts?", "expert_every?", "tp_autoencoder?", "tp_autoencoder_from?"), int),
    **dict.fromkeys(("capacity_factor?", "pp_neurons?"), float),
    "pp_neurons_after?": [int],
}
_KEY = re.compile(r"pp(\d+)\.tp(\d+)\.(?:dp(\d+)\.)?model\.(.+)")


def load_model(checkpoint: Checkpoint) -> GPT:
    """Load the whole model of a checkpoint, whatever axes it was trained over.

    Raises:
        ConfigError: the checkpoint lacks a parameter, or cannot be read.
    """
    state = {
        key: torch.empty_like(tensor, device="cpu")
        for key, tensor in described(checkpoint.path).items()
        if _KEY.fullmatch(key)
    }
    shape = _shape(checkpoint, sum(tensor.numel() for tensor in state.values()))
    read(state, checkpoint.path, alone=True)
    parts: dict[str, dict[tuple[int, int, int], Tensor]] = {}
    for key, tensor in state.items():
        match = _KEY.fullmatch(key)
        assert match is not None
        parts.setdefault(match[4], {})[int(match[1]), int(match[3] or 0), int(match[2])] = tensor
    try:
        model = GPT(shape)
    except (ValueError, ArithmeticError, RuntimeError) as error:
        raise ConfigError(f"{printable(checkpoint.path)} is of no model: {error}") from error
    trained = dict(model.named_parameters()) | dict(model.named_buffers())
    missing = sorted(set(trained) - set(parts))
    if missing:
        raise ConfigError(f"{checkpoint.path} lacks {missing[0]} and {len(missing) - 1} other parameters")
    with torch.no_grad():
        for name, parameter in trained.items():
            last = max(stage for stage, *_ in parts[name])  # with schedule local every stage has a head
            replicas: dict[int, list[Tensor]] = {}
            for (stage, replica, _), piece in sorted(parts[name].items()):
                if stage == last:
                    replicas.setdefault(replica, []).append(piece)
            # Replicas that have parts of their own have experts.
            parameter.copy_(torch.cat([joined(name, pieces) for pieces in replicas.values()]))
    return model.eval()


def _shape(checkpoint: Checkpoint, elements: int) -> ModelShape:
    """Return the sizes in a checkpoint's record; a model of them has so many elements at most."""
    where = f"{printable(checkpoint.path / RECORD)}: key run"
    sizes = checked(checkpoint.run, _SIZES, where)
    width = sizes["d_model"]
    least = width * (
        sizes["vocab_size"] + sizes["seq_len"] + sizes["layers"] * max(width, sizes.get("experts", 0))
    )
    if (
        min(sizes[name] for name in ("vocab_size", "layers", "d_model", "heads", "seq_len")) < 1
        or least > elements
    ):
        raise ConfigError(
            f"{where}: its sizes are not those of a model with {elements} elements, which are here"
        )
    return ModelShape.of(sizes)


@torch.no_grad()
def sample(
    model: GPT, context: Tensor, *, temperature: float, top_k: int, generator: torch.Generator
) -> Iterator[int]:
    """Draw tokens one after another, without end.

    Args:
        model: whole model.
        context: int64 [tokens], at least one; of a longer context the model sees the end.
        temperature: divisor of the logits; 0 takes the likeliest token.
        top_k: number of likeliest tokens to draw from; 0: all.
        generator: random generator of the draws.
    """
    window = context[-model.shape.seq_len :]
    while True:
        logits = model(window[None])[0, -1]
        if temperature == 0:
            token = logits.argmax()
        else:
            logits = logits / temperature
            if 0 < top_k < logits.numel():
                logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
            token = torch.multinomial(logits.softmax(0), 1, generator=generator)[0]
        yield int(token)
        window = torch.cat([window, token[None]])[-model.shape.seq_len :]


class Vocabulary:
    """Vocabulary: text to tokens and back, by bytes or a Hugging Face tokenizer."""

    def __init__(self, tokenizer: str | None) -> None:
        """Load the tokenizer.

        Raises:
            ConfigError: the tokenizer cannot be read.
        """
        self._tokenizer: Any = None
        if tokenizer is not None:
            from hybridcomp_lab.train.text import read_tokenizer  # noqa: PLC0415  (an extra)

            self._tokenizer = read_tokenizer(tokenizer)

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        if self._tokenizer is None:
            return list(text.encode())
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def texts(self, tokens: Iterator[int]) -> Iterator[str]:
        """Yield the text of tokens, as far as each next one completes characters."""
        if self._tokenizer is None:
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            for token in tokens:
                yield decoder.decode(bytes([token]) if token < 256 else b"")
            return
        seen: list[int] = []
        told = ""
        for token in tokens:
            seen.append(token)
            text = self._tokenizer.decode(seen)
            if not text.endswith("�"):  # the character's other bytes are in the next token
                yield text[len(told) :]
                told = text


def wants_tokenizer(config_data: str | None, tokenizer: str | None) -> bool:
    """Tell whether a run's tokens mean nothing without a tokenizer that must be given."""
    if tokenizer is not None or config_data is None:
        return False
    root = Path(config_data)
    return root.suffix == ".bin" or os.path.isfile(root / "train.bin")
