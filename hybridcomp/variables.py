"""Define every environment variable of hybridcomp: its values, its default, and what it does.

A variable is read by :meth:`Variable.read`, which checks it, and nowhere by its name; ``docs/variables.md`` is made of
this table. :func:`check` reads all that are set, where a communicator or a hook is made, so that a wrong value is an
error there and not in the first operation that asks. A variable that is set to nothing counts as not set.

``import torch`` may load this module (:mod:`hybridcomp.plugin`): it imports little.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from hybridcomp.errors import ConfigError, printable

PREFIX = "HYBRIDCOMP_"
_MOST_SHOWN = 200  # characters of a wrong value in its error
LEAST, MOST = 1e-12, 1e18  # bounds of a number by default; no product or quotient of a few overflows
MAX_THREADS = 64
_MOST_HOSTS, _MOST_RANKS = 1 << 16, 1 << 20
T = TypeVar("T")

COLLECTIVES = "Operations"
PYTORCH = "PyTorch"
OBSERVING = "What is shown and written"
COSTS = "Costs of links, where no profile was measured"
MACHINE = "Kernels and GPUs"
SITE = "Batch scripts"
INTERNAL = "Set by hybridcomp itself"
TESTS = "Set for the tests"


class Variable(Generic[T]):
    """An environment variable.

    Attributes:
        name: its whole name.
        section: one of the sections of the documentation's page; :data:`INTERNAL` and :data:`TESTS` are not for users.
        allowed: values that it takes, in words.
        default: what holds where it is not set, in words.
        does: what it does, in words.
        names: the values of a variable that takes one of a few, or several; else empty.
    """

    def __init__(
        self,
        name: str,
        section: str,
        parse: Callable[[str], T],
        allowed: str,
        unset: T,
        default: str,
        does: str,
        names: tuple[str, ...] = (),
    ) -> None:
        """Define a variable; ``parse`` raises ValueError for a value that is not allowed, ``unset`` is its default."""
        self.name = PREFIX + name
        self.section = section
        self.allowed = allowed
        self.default = default
        self.does = does
        self.names = names
        self._parse = parse
        self._unset = unset

    def __str__(self) -> str:
        """Return the variable's name."""
        return self.name

    def read(self, environ: Mapping[str, str] | None = None) -> T:
        """Return the variable's value, or its default where it is not set.

        Args:
            environ: variables to look in; None for this process's.

        Raises:
            ConfigError: the value is not allowed; names the variable, the value and what is allowed.
        """
        return self.parse((os.environ if environ is None else environ).get(self.name, ""))

    def parse(self, text: str) -> T:
        """Return the value that a text stands for; the default for an empty one.

        Raises:
            ConfigError: the value is not allowed; names the variable, the value and what is allowed.
        """
        if not text:
            return self._unset
        try:
            return self._parse(text)
        except ValueError:
            raise self.wrong(text) from None

    def wrong(self, value: str, allowed: str | None = None) -> ConfigError:
        """Return the error for a value.

        Args:
            value: the value.
            allowed: what is allowed, in words; None for what the table says.
        """
        shown = repr(value if len(value) <= _MOST_SHOWN else f"{value[:_MOST_SHOWN]}...")
        words = (allowed or self.allowed).replace("`", "")  # Markdown is for the page
        return ConfigError(f"{self.name} is {shown}; allowed: {words}")


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError
    return text == "1"


def _whole(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and least <= int(text) <= most):
            raise ValueError
        return int(text)

    return parse


def _number(least: float, most: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        number = float(text)
        if not least <= number <= most:
            raise ValueError
        return number

    return parse


def _pairs(text: str) -> dict[str, str]:
    found = {}
    for part in filter(None, (one.strip() for one in text.split(","))):
        name, given, value = part.partition("=")
        if not (name and given and value):
            raise ValueError
        found[name] = value
    return found


def _one_of(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError
        return text

    return parse


def _some_of(*names: str) -> Callable[[str], frozenset[str]]:
    def parse(text: str) -> frozenset[str]:
        found = frozenset(one for part in text.split(",") if (one := part.strip().lower()))
        if not found <= set(names):
            raise ValueError
        return found

    return parse


def _counts(text: str) -> tuple[int, ...]:
    hosts, times, each = text.partition("x")
    if times:
        return (_whole(1, _MOST_RANKS)(each),) * _whole(1, _MOST_HOSTS)(hosts)
    counts = text.split(",")
    if len(counts) > _MOST_HOSTS:
        raise ValueError
    return tuple(_whole(1, _MOST_RANKS)(count) for count in counts)


def _file_or_switch(text: str) -> str | bool:
    return text == "1" if text in ("0", "1") else text


_LEVELS = ("off", "detail")
_BACKENDS = ("gloo", "nccl")
_ISAS = ("portable", "avx2", "avx512")
_USES = ("encode", "trust", "off")
_NOTHING: frozenset[str] = frozenset()

ALGORITHM: Variable[dict[str, str]] = Variable(
    "ALGORITHM", COLLECTIVES, _pairs, "`OPERATION=ALGORITHM`, several separated by commas, such as "
    "`all_reduce=ring,broadcast=tree`", {}, "the cost model chooses",
    "Takes those algorithms wherever they can be used; rank 0's counts.",
)  # fmt: skip
CHUNK_BYTES: Variable[int | None] = Variable(
    "CHUNK_BYTES", COLLECTIVES, _whole(64, 1 << 40), "a number of bytes from 64 to 2^40", None,
    "the cost model chooses", "Cuts messages into chunks of as many uncompressed bytes; rank 0's counts.",
)  # fmt: skip
SHARED_MEMORY: Variable[bool] = Variable(
    "SHARED_MEMORY", COLLECTIVES, _switch, "`1`, or `0`: ranks of one host send each other messages by MPI", True,
    "`1`", "Lets ranks of one host exchange messages in shared memory.",
)  # fmt: skip
HOSTS: Variable[tuple[int, ...] | None] = Variable(
    "HOSTS", COLLECTIVES, _counts,
    "hosts x ranks on each, such as `2x4`, or the number of ranks on each host, such as `3,1,2`, in the order of the "
    "job's ranks; the same on all ranks", None, "ranks that can share memory are on one host",
    "Says which ranks are on which host: for nodes that are several islands, and for tests. Ranks of unlike hosts "
    "share no memory.",
)  # fmt: skip
DEBUG: Variable[str] = Variable(
    "DEBUG", COLLECTIVES, _one_of(*_LEVELS), "`off` or `detail`; the same on all ranks", "off", "`off`",
    "Compares every collective on all ranks before it moves data: [failures](failures.md).", _LEVELS,
)  # fmt: skip
FREEZE: Variable[str] = Variable(
    "FREEZE", COLLECTIVES, str, "a file's path", "", "no file",
    "Writes there, as the job ends, what the policies `auto` and `adapt` have decided.",
)  # fmt: skip
POLICY: Variable[str] = Variable(
    "POLICY", PYTORCH, str, "a preset, `auto`, a TOML file, or a codec such as `int8`", "",
    "`auto` where a profile was calibrated, else `hybrid`", "Names the policy of groups and hooks that are given none.",
)  # fmt: skip
REPLACE: Variable[frozenset[str]] = Variable(
    "REPLACE", PYTORCH, _some_of(*_BACKENDS), "`gloo` or `nccl`, or both with a comma between", _NOTHING, "none",
    "Makes the groups that a program wants of those backends.", _BACKENDS,
)  # fmt: skip
HOOK: Variable[bool] = Variable(
    "HOOK", PYTORCH, _switch, "`0` or `1`", False, "`0`",
    "Registers the hook on every `DistributedDataParallel` that has none.",
)  # fmt: skip
INTERFACE: Variable[str] = Variable(
    "INTERFACE", PYTORCH, str, "a network interface of this host, such as `eth0`", "",
    "the one that reaches `MASTER_ADDR`",
    "Carries MPI's messages between hosts, where torchrun or its like starts the ranks.",
)  # fmt: skip
SUMMARY: Variable[bool | None] = Variable(
    "SUMMARY", OBSERVING, _switch, "`0`: never, or `1`: also if nothing was compressed", None,
    "printed where something was compressed", "Has rank 0 print the table of what was sent, as the program ends.",
)  # fmt: skip
TRACE: Variable[str] = Variable(
    "TRACE", OBSERVING, str, "a folder's path", "", "no trace",
    "Has every rank write a Chrome trace of its operations there, as the program ends.",
)  # fmt: skip
TOP: Variable[str | bool] = Variable(
    "TOP", OBSERVING, _file_or_switch, "a folder's path, `1`, or `0`: ranks keep no file", True,
    "`1`: a folder of this user in `/tmp`",
    "Names the folder in which ranks, of several hosts too, show themselves to `hybridcomp top`.",
)  # fmt: skip
PROFILE: Variable[str] = Variable(
    "PROFILE", COSTS, str, "the path of a file that `hybridcomp doctor --calibrate` wrote", "",
    "`~/.config/hybridcomp/profile.toml`, if it exists", "Names the profile of links and codecs; rank 0's counts.",
)  # fmt: skip
BANDWIDTH: Variable[float | None] = Variable(
    "BANDWIDTH", COSTS, _number(LEAST, MOST), "bytes per second, such as 125e6", None, "the interface's, or 117e6",
    "Says how fast links between hosts are; a lab sets it.",
)  # fmt: skip
LATENCY: Variable[float | None] = Variable(
    "LATENCY", COSTS, _number(LEAST, MOST), "seconds, such as 2e-5", None, "4e-5",
    "Says how long a short message between hosts takes; a lab sets it.",
)  # fmt: skip
BURST: Variable[float | None] = Variable(
    "BURST", COSTS, _number(0.0, MOST), "bytes, such as 5e5", None, "0",
    "Says how many bytes links shaped by a token bucket pass at once after a rest; a lab sets it.",
)  # fmt: skip
CORES: Variable[float | None] = Variable(
    "CORES", COSTS, _number(LEAST, 1.0), "a number of cores up to 1, such as 0.5", None, "1",
    "Says how much of a core a rank has where ranks share them; a lab sets it.",
)  # fmt: skip
ISA: Variable[str] = Variable(
    "ISA", MACHINE, _one_of(*_ISAS), "`portable`, `avx2` or `avx512`, where the machine has it", "",
    "the best that the machine has", "Takes the kernels that were compiled for that instruction set.", _ISAS,
)  # fmt: skip
NUM_THREADS: Variable[int | None] = Variable(
    "NUM_THREADS", MACHINE, _whole(1, MAX_THREADS), f"an integer from 1 to {MAX_THREADS}", None, "1",
    "Sets the number of threads of each encode and decode.",
)  # fmt: skip
CUDA_AWARE: Variable[bool | None] = Variable(
    "CUDA_AWARE", MACHINE, _switch, "`1` (MPI takes device pointers), `0` (it does not), or unset (MPI is asked)", None,
    "MPI is asked", "Says whether MPI takes pointers to a GPU's memory: [GPUs](cuda.md).",
)  # fmt: skip
NVCOMP: Variable[str] = Variable(
    "NVCOMP", MACHINE, _one_of(*_USES), "`encode`, `trust` (all senders; decompress by it, too) or `off`", "encode",
    "`encode`", "Says what nvCOMP does for the codec `lossless` on a GPU: [GPUs](cuda.md).", _USES,
)  # fmt: skip
CACHE_DIR: Variable[str] = Variable(
    "CACHE_DIR", MACHINE, str, "a folder's path", "", "`~/.cache/hybridcomp`", "Keeps compiled CUDA kernels there.",
)  # fmt: skip
VENV: Variable[str] = Variable(
    "VENV", SITE, str, "a folder's path", "", "`.venv`",
    "Names the virtual environment that `slurm/env.sh` activates on the nodes.",
)  # fmt: skip
TERMINAL: Variable[int | None] = Variable(
    "TERMINAL", INTERNAL, _whole(1, 1 << 16), "a number of columns", None, "no terminal",
    "Tells the ranks of `hybridcomp train` how wide the terminal is that mpiexec's output ends up on.",
)  # fmt: skip
COMPARE: Variable[str] = Variable(
    "COMPARE", INTERNAL, str, "a folder's path", "", "no comparison",
    "Has ranks record their optimizer steps for `hybridcomp compare`, and end after the last.",
)  # fmt: skip
LAB_ID: Variable[str] = Variable(
    "LAB_ID", INTERNAL, str, "text", "", "no lab", "Marks the processes that a lab has started."
)
LAB_KIND: Variable[str] = Variable(
    "LAB_KIND", INTERNAL, str, "text", "", "no lab", "Tells programs in a lab of which kind it is."
)
LAB_RATE: Variable[str] = Variable(
    "LAB_RATE", INTERNAL, str, "text", "", "no lab", "Tells programs in a lab the rate of its slowest link."
)
LAB_HOSTS: Variable[int | None] = Variable(
    "LAB_HOSTS",
    INTERNAL,
    _whole(1, 1 << 20),
    "a number",
    None,
    "no lab",
    "Tells programs how many hosts their lab has.",
)
LAB_PPN: Variable[int | None] = Variable(
    "LAB_PPN", INTERNAL, _whole(1, 1 << 20), "a number", None, "no lab", "Tells programs a lab's ranks on each host."
)  # fmt: skip
WARNED: Variable[bool] = Variable(
    "WARNED",
    INTERNAL,
    _switch,
    "`0` or `1`",
    False,
    "`0`",
    "Says that a parent has warned of unknown variables.",
)
TEST_DEVICE: Variable[str] = Variable(
    "TEST_DEVICE", TESTS, str, "`cuda`", "", "the emulation", "Has tests of device arrays use the GPU."
)
TEST_COLD: Variable[str] = Variable(
    "TEST_COLD",
    TESTS,
    str,
    "anything",
    "",
    "forks",
    "Has tests start Python itself, not forks of a warm one.",
)
TEST_MARK: Variable[str] = Variable(
    "TEST_MARK", TESTS, str, "text", "", "none", "Marks the processes that a test has started."
)
FUZZ_KERNELS: Variable[str] = Variable(
    "FUZZ_KERNELS",
    TESTS,
    str,
    "a file's path",
    "",
    "the installed ones",
    "Names the kernels that are fuzzed.",
)

VARIABLES: dict[str, Variable[object]] = {
    one.name: one for one in list(globals().values()) if isinstance(one, Variable)
}


def check(rank: int) -> None:
    """Check the value of every variable that is set, as far as the rest of the package is not needed for it.

    Unknown ones are warned of (:func:`warn_of_unknown`).

    Args:
        rank: rank of this process; 0 where it is none.

    Raises:
        ConfigError: a value is not allowed; names the variable, the value and what is allowed.
    """
    for name in os.environ:
        if name.startswith(PREFIX) and name in VARIABLES:
            VARIABLES[name].read()
    warn_of_unknown(rank)


def unknown(environ: Mapping[str, str] | None = None) -> dict[str, str | None]:
    """Return the names in hybridcomp's way that are no variables, each with the variable that is nearest, if one is.

    Args:
        environ: variables to look in; None for this process's.
    """
    given = os.environ if environ is None else environ
    names = [name for name in given if name.startswith(PREFIX) and name not in VARIABLES]
    if not names:
        return {}
    import difflib  # noqa: PLC0415  (few processes need it)

    own = [
        name.removeprefix(PREFIX) for name, one in VARIABLES.items() if one.section not in (INTERNAL, TESTS)
    ]
    nearest = {name: difflib.get_close_matches(name.removeprefix(PREFIX), own, 1) for name in names}
    return {name: PREFIX + found[0] if found else None for name, found in nearest.items()}


_warned = False


def warn_of_unknown(rank: int) -> None:
    """Print on rank 0, once a job, which variables are set and unknown, and which ones are near.

    Processes that this one starts do not warn again.

    Args:
        rank: rank of this process; 0 where it is none.
    """
    global _warned  # noqa: PLW0603
    if _warned:
        return
    _warned = True
    if rank or os.environ.get(WARNED.name):
        return
    for name, nearest in sorted(unknown().items()):
        meant = f"; did you mean {nearest}?" if nearest else ""
        print(f"hybridcomp: there is no variable {printable(name[:_MOST_SHOWN])}{meant}", file=sys.stderr)
        os.environ[WARNED.name] = "1"
