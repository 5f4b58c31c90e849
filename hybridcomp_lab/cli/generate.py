"""Run ``hybridcomp generate``: generate text from a checkpoint of ``hybridcomp train``."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from pathlib import Path
from typing import Any

from hybridcomp.errors import ConfigError, printable
from hybridcomp_lab.train.checkpoints.resume import checkpoint_in
from hybridcomp_lab.train.reading import read_toml

EXAMPLES = """examples:
  hybridcomp train --data shakespeare.txt --steps 2000 --checkpoint-every 500 --out runs/shakespeare
  hybridcomp generate runs/shakespeare --prompt "ROMEO:" --tokens 400
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``hybridcomp generate``."""
    result = argparse.ArgumentParser(
        prog="hybridcomp generate",
        description="Write text by a model that `hybridcomp train` has trained, on one process.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = result.add_argument
    add(
        "run",
        type=Path,
        metavar="RUN",
        help="the folder of a run, for its newest checkpoint, or of a checkpoint",
    )
    add("--prompt", default="\n", help="text to go on from (default: a new line)")
    add("--tokens", type=int, default=200, help="how many to write (default 200)")
    add(
        "--temperature",
        type=float,
        default=0.8,
        help="0 writes the likeliest, 1 as the model says (default 0.8)",
    )
    add("--top-k", type=int, default=40, help="draw from the likeliest so many; 0: from all (default 40)")
    add("--samples", type=int, default=1, help="texts, of seeds one after another (default 1)")
    add("--seed", type=int, default=1, help="of the first text (default 1)")
    add("--tokenizer", help="tokenizer.json, where the run was given tokens (.bin) and none")
    return result


def main(argv: list[str]) -> int:
    """Run ``hybridcomp generate ARGV`` and return the exit code.

    Raises:
        ConfigError: no checkpoint, a damaged one, or a wrong argument.
    """
    args = parser().parse_args(argv)
    _check(args)
    checkpoint = checkpoint_in(args.run)
    if checkpoint is None:
        raise ConfigError(
            f"no checkpoint in {args.run}: `hybridcomp train` writes them with --checkpoint-every"
        )
    config = _config(checkpoint.path)
    import torch  # noqa: PLC0415  (seconds, that wrong input should not take)

    from hybridcomp_lab.train.generate import Vocabulary, load_model, sample, wants_tokenizer  # noqa: PLC0415

    tokenizer = args.tokenizer or config.get("tokenizer")
    if wants_tokenizer(config.get("data"), tokenizer):
        raise ConfigError(f"{args.run} was trained on tokens: give their tokenizer.json with --tokenizer")
    vocabulary = Vocabulary(tokenizer)
    context = vocabulary.tokens(args.prompt)
    model = load_model(checkpoint)
    if not context:
        raise ConfigError("prompt must hold at least one token")
    if max(context) >= model.shape.vocab_size:
        raise ConfigError(
            f"the prompt has token {max(context)}, outside the model's vocabulary of {model.shape.vocab_size}"
        )
    for i in range(args.samples):
        generator = torch.Generator().manual_seed(args.seed + i)
        tokens = sample(
            model, torch.tensor(context), temperature=args.temperature, top_k=args.top_k, generator=generator
        )
        for text in itertools.chain([args.prompt], vocabulary.texts(itertools.islice(tokens, args.tokens))):
            # A model writes any character, and a terminal is not to act on it; a file gets what was written.
            sys.stdout.write(printable(text, keep="\n\t") if sys.stdout.isatty() else text)
            sys.stdout.flush()
        sys.stdout.write("\n" if i + 1 == args.samples else "\n\n")
    return 0


def _check(args: argparse.Namespace) -> None:
    for name, least in (("tokens", 1), ("samples", 1), ("temperature", 0), ("top_k", 0)):
        if not getattr(args, name) >= least:
            raise ConfigError(f"{name.replace('_', '-')} must be at least {least}, not {getattr(args, name)}")


def _config(checkpoint: Path) -> dict[str, Any]:
    """Return the run's configuration; nothing where the checkpoint was copied away from it."""
    path = checkpoint.parent.parent / "config.toml"
    return read_toml(str(path)) if os.path.isfile(path) else {}
