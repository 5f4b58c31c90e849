"""Make tokens from text files, nanoGPT's .bin files, or the running interpreter's standard library."""

from __future__ import annotations

import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridcomp.errors import ConfigError, printable
from hybridcomp.files import MOST_BYTES, read_bytes, read_text

Tokens = npt.NDArray[Any]

_BYTE_VOCABULARY = 256
_BIN_VOCABULARY = 50304  # GPT-2's 50257, rounded up as nanoGPT does
_NOT_SOURCES = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_MOST_TEXT = 1 << 40  # bytes of a text, which takes as much memory
_PIECE = 1 << 20  # characters handed to a tokenizer at once
_PIECES_CHECKED = 1024  # pieces checked: at most twice as many, of a MiB or two each: a second or two
_CHECKED_AT_ONCE = 1 << 26  # tokens, 128 MiB


@dataclass(frozen=True)
class Corpus:
    """Text as tokens, in two parts.

    Attributes:
        train: 1-D unsigned integers; may be a memory map.
        held_out: tokens for evaluation, like ``train``.
        vocab_size: size of the vocabulary; tokens are below it.
        source: description of the source, for people.
    """

    train: Tokens
    held_out: Tokens
    vocab_size: int
    source: str

    @property
    def fingerprint(self) -> str:
        """Return lengths and a checksum (of some pieces of a very long text), which tell texts and tokenizers apart."""
        digest = 0
        for part in (self.train, self.held_out):
            for piece in _sampled(part):
                digest = zlib.crc32(np.ascontiguousarray(piece).data, digest)
        return f"{self.train.size}+{self.held_out.size}:{digest:08x}"


def _sampled(tokens: Tokens) -> Iterator[Tokens]:
    """Yield an array in pieces; of a very long one some that lie evenly, the first and the last among them."""
    count = -(-tokens.size // _PIECE)
    step = max(1, count // _PIECES_CHECKED)
    for number in sorted({*range(0, count, step), *range(max(0, count - 1), count)}):
        yield tokens[number * _PIECE : (number + 1) * _PIECE]


def load_corpus(
    data: str | None, tokenizer: str | None, val_fraction: float, vocab_size: int | None
) -> Corpus:
    """Read the text that the configuration names.

    Args:
        data: a file, a folder, or None for the standard library's sources.
        tokenizer: path of a Hugging Face ``tokenizer.json``, or None for bytes.
        val_fraction: share held out, taken from the end; a folder with train.bin and val.bin has its own split.
        vocab_size: size in the place of the vocabulary's own.

    Raises:
        ConfigError: a file is missing or unreadable, is no UTF-8 text, or the vocabulary is too small.
    """
    root = Path(data) if data is not None else None
    if root is not None and not os.path.exists(root):
        raise ConfigError(f"data {data} does not exist")
    pair = root is not None and os.path.isfile(root / "train.bin") and os.path.isfile(root / "val.bin")
    if root is not None and (pair or root.suffix == ".bin"):
        if tokenizer is not None:
            raise ConfigError(f"{data} holds tokens already; --tokenizer is for text")
        size = vocab_size or _BIN_VOCABULARY
        if pair:
            train, held_out = _map_bin(root / "train.bin", size), _map_bin(root / "val.bin", size)
            return Corpus(train, held_out, size, str(root))
        return _split(_map_bin(root, size), size, val_fraction, str(root))
    texts = _standard_library() if root is None else _read_texts(root)
    source = str(root) if root is not None else "the standard library's sources"
    if tokenizer is not None:
        tokens, size = _tokenize(texts, tokenizer)
    else:
        tokens, size = np.frombuffer(b"\n".join(texts), np.uint8), _BYTE_VOCABULARY
    if vocab_size is not None and vocab_size < size:
        raise ConfigError(f"vocab_size ({vocab_size}) is smaller than the vocabulary of the text ({size})")
    return _split(tokens, vocab_size or size, val_fraction, source)


def _split(tokens: Tokens, vocab_size: int, val_fraction: float, source: str) -> Corpus:
    cut = int(tokens.size * (1 - val_fraction))
    return Corpus(tokens[:cut], tokens[cut:], vocab_size, source)


def _map_bin(path: Path, vocab_size: int) -> Tokens:
    if not os.path.isfile(path):
        raise ConfigError(f"{path} is not a file")
    size = path.stat().st_size
    if size == 0 or size % 2:
        raise ConfigError(f"{path} is no file of uint16 tokens: its size is {size} bytes")
    tokens = np.memmap(path, np.dtype("<u2"), mode="r")
    # Later tokens are checked batch by batch; most mistakes show at once.
    check_range(tokens[:_CHECKED_AT_ONCE], vocab_size, str(path))
    return tokens


def check_range(tokens: Tokens, vocab_size: int, source: str) -> None:
    """Check that no token lies outside the vocabulary.

    Raises:
        ConfigError: a token does.
    """
    largest = int(tokens.max())
    if largest >= vocab_size:
        raise ConfigError(
            f"{source} holds token {largest}, outside a vocabulary of {vocab_size}: set vocab_size"
        )


def _standard_library() -> list[bytes]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in _files_below(root, _NOT_SOURCES) if path.suffix == ".py"]
    texts = _read_utf8(files)
    if not texts:
        raise ConfigError(f"no sources of the standard library in {root}; give a text with --data")
    return texts


def _read_texts(root: Path) -> list[bytes]:
    if os.path.isdir(root):
        texts = _read_utf8(_files_below(root))
        if not texts:
            raise ConfigError(f"no UTF-8 text in the folder {root}")
        return texts
    content = read_bytes(root, what="data", most=_MOST_TEXT)
    try:
        content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"data {printable(root)} is not UTF-8 text (byte {error.start})") from error
    return [content]


def _files_below(root: Path, without: Set[str] = frozenset()) -> list[Path]:
    """Return all files that are not hidden, in an order that does not depend on the file system.

    Args:
        root: folder to look in.
        without: names of folders to skip: tens of thousands of files may be there.
    """
    found: list[Path] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in without]
        found += [Path(folder, name) for name in files if not name.startswith(".")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _read_utf8(files: Iterable[Path]) -> list[bytes]:
    """Read the files that are UTF-8 text; others, such as pictures, are passed over."""
    texts = []
    for path in files:
        try:
            content = read_bytes(path, most=_MOST_TEXT)
            content.decode()
        except (ConfigError, UnicodeDecodeError):
            continue
        texts.append(content)
    return texts


def read_tokenizer(path: str) -> Any:
    """Read a Hugging Face tokenizer.

    Raises:
        ConfigError: the file does not exist, or holds no tokenizer.
    """
    content = read_text(path, what="tokenizer", most=MOST_BYTES)
    from tokenizers import Tokenizer  # noqa: PLC0415  (an extra, only for those who use it)

    try:
        return Tokenizer.from_str(content)
    except Exception as error:  # its Rust core raises a bare Exception
        raise ConfigError(f"{printable(path)} is no Hugging Face tokenizer.json: {error}") from error


def _tokenize(texts: list[bytes], path: str) -> tuple[Tokens, int]:
    tokenizer = read_tokenizer(path)
    size = int(tokenizer.get_vocab_size())
    dtype = np.uint16 if size <= 1 << 16 else np.uint32
    parts = [
        np.array(tokenizer.encode(piece, add_special_tokens=False).ids, dtype)
        for text in texts
        for piece in _pieces(text.decode())
    ]
    return np.concatenate([*parts, np.empty(0, dtype)]), size


def _pieces(text: str) -> Iterator[str]:
    """Yield pieces of about a MiB that end with a line where there is one."""
    start = 0
    while start < len(text):
        end = min(len(text), start + _PIECE)
        if end < len(text):
            newline = text.rfind("\n", start, end)
            end = newline + 1 if newline > start else end
        yield text[start:end]
        start = end
