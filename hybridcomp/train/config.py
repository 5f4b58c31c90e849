"""The trainer's configuration: one dataclass, read from TOML, overridden on the command line."""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_type_hints

from hybridcomp.errors import ConfigError

AXES = ("pp", "dp", "tp")
"""The mesh's axes, slowest first in rank order."""

CYCLIC = ("cdp-v1", "cdp-v2")
"""Schedules of cyclic data parallelism."""

TERMINAL = "HYBRIDCOMP_TERMINAL"
"""Environment variable: columns of the terminal that mpiexec's output ends up on, which a rank cannot see."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train a decoder-only GPT over MPI with data, tensor and pipeline parallelism and compressed traffic."""

    config: str | None = None
    """TOML file that sets any of these fields; the command line overrides it."""

    dp: int = 1
    """Data-parallel size: replicas of the model, each on its own part of the batch."""
    pp: int = 1
    """Pipeline-parallel size: ranks that share the layers, consecutive ones each. Divides layers."""
    tp: int = 1
    """Tensor-parallel size: parts that each layer is split into. Divides heads. Fastest in rank order."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "2bw", "local", "cdp-v1", "cdp-v2"] = "1f1b"
    """Order of forward and backward passes: of a pipeline gpipe, 1f1b, interleaved, 2bw or local, of replicas
    alone cdp-v1 or cdp-v2. Without a pipeline 1f1b is the plain loop. See docs/schedules.md."""
    virtual_stages: int = 1
    """Stages of each pipeline rank, for schedule interleaved. pp * virtual_stages divides layers."""
    backend: Literal["hybridcomp", "gloo"] = "hybridcomp"
    """What carries the traffic. gloo is for comparison: only data-parallel gradients are compressed on it."""
    policy: str = "hybrid"
    """What to compress: a preset (none, naive, mzhybrid, zhybrid, hybrid), a TOML file, or a codec for all
    (int8:block=128)."""
    bucket_mb: float = 25.0
    """Largest gradient bucket of data parallelism in MiB; a bucket is reduced while backward goes on."""

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
    """Sequences of a micro-batch. The global batch is dp * micro_batches * micro_batch_size sequences."""
    lr: float = 1e-3
    """Peak learning rate."""
    min_lr: float = 1e-4
    """Learning rate at the end of the cosine."""
    warmup_steps: int = 20
    """Steps of linear warm-up to lr."""
    weight_decay: float = 0.1
    """AdamW's weight decay, on matrices other than embeddings."""
    beta1: float = 0.9
    """AdamW's decay of the mean of gradients."""
    beta2: float = 0.95
    """AdamW's decay of the mean of squared gradients."""
    clip: float = 1.0
    """Largest global norm of the gradient over all axes; 0 does not clip."""
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
        """Ranks that the mesh needs: dp * pp * tp."""
        return self.dp * self.pp * self.tp

    @property
    def stages(self) -> int:
        """Parts that the layers are cut into."""
        return self.dp if self.schedule in CYCLIC else self.pp * self.virtual_stages

    @property
    def replica_batch(self) -> int:
        """Sequences of a step on one replica."""
        return self.micro_batches * self.micro_batch_size

    @property
    def global_batch(self) -> int:
        """Sequences of a step on all replicas."""
        return self.dp * self.replica_batch

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step trains on."""
        return self.global_batch * self.seq_len

    def check(self) -> None:
        """Check what can be checked without data, ranks or files.

        Raises:
            ConfigError: says which value is wrong and what is allowed.
        """
        positive = (
            "dp pp tp virtual_stages layers d_model heads seq_len steps micro_batches micro_batch_size keep "
            "log_every threads lr timeout bucket_mb"
        )
        for name in positive.split():
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, not {getattr(self, name)}")
        natural = "warmup_steps weight_decay clip seed eval_every eval_batches checkpoint_every min_lr"
        for name in natural.split():
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must not be negative, as {getattr(self, name)} is")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 0 and below 1, not {getattr(self, name)}")
        if not 0 < self.val_fraction < 1:
            raise ConfigError(f"val_fraction must be above 0 and below 1, not {self.val_fraction}")
        if self.vocab_size is not None and not 1 < self.vocab_size <= 2**31:
            raise ConfigError(f"vocab_size must be from 2 to 2**31, not {self.vocab_size}")
        for name, divisor in (("layers", "pp"), ("heads", "tp"), ("d_model", "heads")):
            value, by = getattr(self, name), getattr(self, divisor)
            if value % by:
                raise ConfigError(f"{name} ({value}) must be divisible by {divisor} ({by})")
        self._check_schedule()

    def _check_schedule(self) -> None:
        if self.schedule in CYCLIC:
            self._check_cyclic()
        elif self.schedule != "1f1b" and self.pp == 1:
            raise ConfigError(f"schedule {self.schedule} is of a pipeline: pp must be at least 2, not 1")
        if self.schedule == "interleaved":
            if self.virtual_stages < 2:
                raise ConfigError(
                    f"virtual_stages ({self.virtual_stages}) must be at least 2 with schedule interleaved"
                )
            if self.layers % self.stages:
                raise ConfigError(
                    f"layers ({self.layers}) must be divisible by pp * virtual_stages ({self.stages})"
                )
            rounds = max(1, self.micro_batches // self.pp)
            if self.micro_batches % rounds:
                raise ConfigError(
                    f"micro_batches ({self.micro_batches}) must be divisible by micro_batches // pp "
                    f"({rounds}) with schedule interleaved, which runs them in as many rounds"
                )
        elif self.virtual_stages != 1:
            raise ConfigError(
                f"virtual_stages ({self.virtual_stages}) must be 1 with schedule {self.schedule}: "
                "only interleaved has several stages on a rank"
            )
        if self.micro_batches < self.pp:
            raise ConfigError(
                f"micro_batches ({self.micro_batches}) must be at least pp ({self.pp}): "
                "fewer leave stages of the pipeline without work"
            )

    def _check_cyclic(self) -> None:
        if self.dp < 2:
            raise ConfigError(
                f"schedule {self.schedule} is of replicas: dp must be at least 2, not {self.dp}"
            )
        for name in ("pp", "tp", "micro_batches"):
            if getattr(self, name) != 1:
                raise ConfigError(
                    f"{name} ({getattr(self, name)}) must be 1 with schedule {self.schedule}: "
                    "every replica has all layers, and one micro-batch of a step"
                )
        if self.layers % self.dp:
            raise ConfigError(
                f"layers ({self.layers}) must be divisible by dp ({self.dp}) with schedule {self.schedule}, "
                "which cuts the model into as many stages as there are replicas"
            )
        if self.schedule == "cdp-v2" and self.clip:
            raise ConfigError(
                f"clip ({self.clip}) must be 0 with schedule cdp-v2, which updates a stage before the "
                "gradients of the others, and so their norm, are known"
            )


def read_toml(path: str) -> dict[str, Any]:
    """Read fields from a TOML file.

    Raises:
        ConfigError: the file is missing, no TOML, or a key is unknown or of a wrong type; names file, line
        and key.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from error
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {_with_line(str(error), text)}") from error
    types = _field_types()
    values: dict[str, Any] = {}
    for key, value in document.items():
        if key not in types or key == "config":
            near = difflib.get_close_matches(key, types, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; allowed: {', '.join(types)}"
            _fail(path, text, key, f"unknown key {key!r}{hint}")
        values[key] = _convert(value, types[key], lambda what, key=key: _fail(path, text, key, what))
    return values


def _field_types() -> dict[str, Any]:
    hints = get_type_hints(TrainConfig)
    return {field.name: hints[field.name] for field in dataclasses.fields(TrainConfig)}


def _convert(value: Any, kind: Any, fail: Any) -> Any:
    options = get_args(kind)
    if options and all(isinstance(o, str) for o in options):
        if value not in options:
            fail(f"must be one of {', '.join(options)}, not {value!r}")
        return value
    allowed = [o for o in (options or (kind,)) if o is not type(None)]
    if float in allowed and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) not in allowed:
        names = " or ".join({int: "an integer", float: "a number", str: "a string"}[k] for k in allowed)
        fail(f"must be {names}, not {value!r}")
    return value


def _with_line(message: str, text: str) -> str:
    found = re.search(r"^(.*) \(at (?:line (\d+), column (\d+)|end of document)\)$", message)
    if not found:
        return message
    number = int(found[2] or max(1, len(text.splitlines())))
    line = text.splitlines()[number - 1] if text else ""
    key = re.match(r"\s*([\w.\"'-]+)\s*(=|$)", line)
    where = f", key {key[1]}" if key else ""
    return f"line {number}{where}: {found[1]}"


def _fail(path: str, text: str, key: str, what: str) -> NoReturn:
    pattern = re.compile(rf"\s*\[*\s*[\"']?{re.escape(key)}[\"']?\s*[.=\]]")
    line = next((n for n, line in enumerate(text.splitlines(), 1) if pattern.match(line)), 1)
    raise ConfigError(f"{path}: line {line}, key {key}: {what}")


def to_toml(values: Mapping[str, Any]) -> str:
    """Write fields as TOML; None (unset) fields are left out."""
    lines = []
    for key, value in values.items():
        if isinstance(value, bool):
            lines.append(f"{key} = {str(value).lower()}")
        elif isinstance(value, str):
            lines.append(f"{key} = {_quote(value)}")
        elif value is not None:
            lines.append(f"{key} = {value!r}")
    return "\n".join(lines) + "\n"


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c >= " " and c != "\x7f" else f"\\u{ord(c):04x}" for c in escaped) + '"'


def parse(arguments: Sequence[str], *, prog: str = "hybridcomp train") -> TrainConfig:
    """Make the configuration from command-line arguments: defaults, then ``--config``'s file, then the flags.

    Raises:
        ConfigError: a wrong value, on the command line or in the file.
        SystemExit: a flag that does not exist or does not parse (2, with a message), or ``--help`` (0).
    """
    import tyro  # noqa: PLC0415  (an extra; and --help of the other commands should not wait for it)

    default = TrainConfig()
    path = _config_path(arguments)
    if path is not None:
        default = dataclasses.replace(default, **read_toml(path), config=path)
    config = tyro.cli(TrainConfig, prog=prog, args=list(arguments), default=default)
    config.check()
    return config


def _config_path(arguments: Sequence[str]) -> str | None:
    path = None
    for i, argument in enumerate(arguments):
        if argument == "--config" and i + 1 < len(arguments):
            path = arguments[i + 1]
        elif argument.startswith("--config="):
            path = argument.removeprefix("--config=")
    return path
