"""hybridcomp: compressed collectives for distributed training.

>>> import numpy as np, hybridcomp as hc
>>> codec = hc.get_codec("int8:block=128")
>>> msg = codec.encode(np.linspace(-1, 1, 1000, dtype=np.float32))
>>> hc.decode(msg).shape
(1000,)

Importing this package takes a millisecond: each name loads its module when first used, ``hc.Communicator`` mpi4py, too.
``hybridcomp.torch`` is the PyTorch side. It loads neither torch nor CuPy, and does not initialise MPI.
"""

from __future__ import annotations

import atexit
import importlib
import sys
from typing import TYPE_CHECKING, Any

from hybridcomp.moved import find_moved

if TYPE_CHECKING:
    from hybridcomp import trace
    from hybridcomp.codecs import Codec, ErrorFeedback, decode, decode_add, get_codec, register_codec
    from hybridcomp.collectives import Communicator
    from hybridcomp.errors import (
        CodecMismatchError,
        CollectiveTimeoutError,
        ConfigError,
        CudaUnavailableError,
        DivergedError,
        HybridcompError,
        MismatchError,
        NativeUnavailableError,
        PolicyError,
        RemoteError,
        UnknownCodecError,
        WireError,
    )
    from hybridcomp.native import get_num_threads, set_num_threads
    from hybridcomp.policy import Message, Policy, load_policy
    from hybridcomp.schedules.registry import register_algorithm
    from hybridcomp.version import __version__

__all__ = [
    "get_codec",
    "register_codec",
    "register_algorithm",
    "Codec",
    "decode",
    "decode_add",
    "ErrorFeedback",
    "set_num_threads",
    "get_num_threads",
    "Communicator",
    "Message",
    "Policy",
    "load_policy",
    "trace",
    "HybridcompError",
    "WireError",
    "UnknownCodecError",
    "CodecMismatchError",
    "PolicyError",
    "ConfigError",
    "MismatchError",
    "CollectiveTimeoutError",
    "RemoteError",
    "DivergedError",
    "NativeUnavailableError",
    "CudaUnavailableError",
    "__version__",
]

_HOMES = {
    "codecs": ("get_codec", "register_codec", "Codec", "decode", "decode_add", "ErrorFeedback"),
    "schedules.registry": ("register_algorithm",),
    "native": ("set_num_threads", "get_num_threads"),
    "collectives": ("Communicator",),
    "policy": ("Message", "Policy", "load_policy"),
    "version": ("__version__",),
}
_MODULES = ("arrays", "codecs", "errors", "native", "policy", "trace", "version", "wire")
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"hybridcomp.{name}")
    home = _HOME.get(name) or ("errors" if name in __all__ else None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"hybridcomp.{home}"), name)
    globals()[name] = value
    return value


def _leave() -> None:
    """Tell the other ranks, if this process has any, that it ends."""
    progress = sys.modules.get("hybridcomp.collectives.execution.progress")
    if progress is not None:
        progress.leave()


find_moved()
atexit.register(_leave)  # here, before what a program registers itself, so that it runs after that


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *__all__})
