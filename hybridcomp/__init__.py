"""hybridcomp: compressed collectives for distributed training.

>>> import numpy as np, hybridcomp as hc
>>> codec = hc.get_codec("int8:block=128")
>>> msg = codec.encode(np.linspace(-1, 1, 1000, dtype=np.float32))
>>> hc.decode(msg).shape
(1000,)

Importing it loads neither torch nor CuPy and does not initialise MPI; ``hc.Communicator`` loads mpi4py on
first use, ``hybridcomp.torch`` is the PyTorch side.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hybridcomp import trace
from hybridcomp.codecs import ErrorFeedback, decode, decode_add, get_codec
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
from hybridcomp.version import __version__

if TYPE_CHECKING:
    from hybridcomp.collectives import Communicator

__all__ = [
    "get_codec",
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


def __getattr__(name: str) -> Any:
    if name == "Communicator":
        return importlib.import_module("hybridcomp.collectives").Communicator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
