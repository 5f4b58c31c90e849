"""Errors that hybridcomp raises. Wrong arguments are ValueError or TypeError, as everywhere."""

from __future__ import annotations


def printable(text: object, keep: str = "") -> str:
    """Return a text in which each character that a terminal would act on is written as its escape.

    Args:
        text: text from a file or a program, or an object that has one, such as a path.
        keep: characters that stay as they are, such as a line's end.
    """
    given = str(text)
    if given.isprintable():
        return given
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in given)


class HybridcompError(Exception):
    """Base class of every error below. Its text may quote a file; it has no character that a terminal acts on."""

    def __str__(self) -> str:
        return printable(super().__str__(), keep="\n\t")


class WireError(HybridcompError, ValueError):
    """Bytes that are no valid message: truncated, damaged, or not of hybridcomp."""


class UnknownCodecError(HybridcompError, ValueError):
    """A codec name or wire id that the registry does not hold."""


class CodecMismatchError(HybridcompError, TypeError):
    """A codec that cannot carry this message (dtype, shape, device)."""


class ConfigError(HybridcompError, ValueError):
    """Run that cannot start as configured: the wrong value, and what is allowed."""


class PolicyError(ConfigError):
    """A policy that cannot be read, with the file, line and key at fault."""


class MismatchError(HybridcompError, RuntimeError):
    """Two ranks that do not agree: on a policy, a codec, a count. Names both sides.

    Attributes:
        everywhere: every rank finds the mismatch by itself, so that none need be told.
    """

    everywhere = False


class CollectiveTimeoutError(HybridcompError, TimeoutError, RuntimeError):
    """Operation that did not end in time. Names the operation, this rank and the ranks that have not arrived.

    A RuntimeError, too: programs for torch's own backends expect one.
    """


class RemoteError(HybridcompError, RuntimeError):
    """An operation that failed on another rank. Names the operation and the rank, and repeats its error."""


class DivergedError(HybridcompError, ArithmeticError):
    """Training loss that is no longer a number. Names the step, the replica and its rank."""


class NativeUnavailableError(HybridcompError, ImportError):
    """The compiled CPU kernels are missing or do not fit this Python."""


class CudaUnavailableError(HybridcompError, RuntimeError):
    """A CUDA buffer where this build or machine cannot handle one."""


def missing_module(name: str, extra: str) -> ConfigError:
    """Return the error for a module that an extra of this package brings, with the line that installs it.

    The package is on no index, so that the line is for a clone; the index in it has PyTorch's builds for CPUs alone.

    Args:
        name: name of the module.
        extra: name of the extra, which brings PyTorch, too.
    """
    return ConfigError(
        f"{name} is missing: in a clone of hybridcomp, pip install '.[{extra}]' --extra-index-url "
        "https://download.pytorch.org/whl/cpu (without that index, PyTorch comes with CUDA's libraries)"
    )
