"""Describe the speed of links and codecs: a profile, built in or from the file that ``doctor --calibrate`` writes.

.. code-block:: toml

    version = 1
    memory = 1.1e10                        # bytes/s of a copy in memory
    message = 6e-5                         # seconds of a core for a message, however short: to send, receive, decode it
    wire = 5e-10                           # seconds of a core for each byte to another host, or from one
    cores = 0.5                            # cores of a rank, where ranks outnumber them; 1 if left out

    [host]                                 # between ranks of a host
    latency = 5e-6                         # seconds of a small message
    bandwidth = 5e9                        # bytes/s that one rank sends

    [network]                              # between hosts
    latency = 6e-5
    bandwidth = 1.17e8                     # bytes/s that a host sends, all its ranks together
    burst = 5e5                            # bytes that a shaped link passes at once after a rest; none if left out
    incoming = 4e8                         # bytes/s that enter a host; as bandwidth if left out

    [codecs."int8:block=128"]              # of fp32 data on one thread
    encode = 1.7e10                        # bytes/s, uncompressed
    decode = 1.5e10
    add = 1.6e10                           # decode and add
    overhead = 2e-6                        # seconds of a call, however little it does
    size = 0.258                           # bytes of a message over those it encodes

    [mpi]                                  # MPI's own operations: curves for as many hosts and ranks, none if left out
    hosts = 4
    ranks = 8

    [mpi.all_gather]                       # hybridcomp.perfmodel.curves says what each is
    overhead = 2e-4
    L = 3.2
    k = 0.4
    x0 = 14.5
    b = 5.9
    ln_p = 12.0
    sat_p = 21.0
    max_bw = 1.1e8

Where collectives were timed, latencies, ``wire``, ``start`` and the other costs that only the simulator uses are
fitted to them, and so are the speeds of links, memory and codecs, which are slower there than alone. Values that a
file leaves out are as built in. ``codecs.default`` is for codecs without an entry.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridcomp.codecs import Codec, get_codec
from hybridcomp.codecs.table import missing
from hybridcomp.errors import ConfigError, UnknownCodecError, printable
from hybridcomp.files import decoded, parse_toml, shown, write_bytes
from hybridcomp.perfmodel.checks import MOST_KEY, Checker
from hybridcomp.perfmodel.curves import OPERATIONS, Curve, MpiCurves

VERSION = 1
DEFAULT = "default"
MAX_BYTES = 65536  # bytes of a profile as text, at most
_MOST_CODECS = 256


@dataclass(frozen=True, slots=True)
class Tier:
    """Links of one kind.

    Attributes:
        latency: seconds of a small message, one way.
        bandwidth: bytes/s of one rank's sends inside a host, of one host's sends between hosts.
        burst: bytes beyond that rate which an idle link passes at once, as a token bucket lets it; 0 for none.
        incoming: bytes/s that enter a host, if more, as where only outgoing traffic is shaped; 0: as ``bandwidth``.
    """

    latency: float
    bandwidth: float
    burst: float = 0.0
    incoming: float = 0.0


@dataclass(frozen=True, slots=True)
class Speed:
    """Speed of a codec on one thread, in bytes of uncompressed fp32 data.

    Attributes:
        encode, decode, add: bytes/s; ``add`` is ``decode_add``.
        overhead: seconds of a call on next to no data.
        size: bytes of a message over those it encodes, for Gaussian data.
    """

    encode: float
    decode: float
    add: float
    overhead: float
    size: float


_ENGINE = ("start", "slow_start", "call", "near", "far", "wake", "look", "eager")
_OPTIONS = ("message", "wire", "cores", *_ENGINE)
_OTHERS = ("compute", "cluster")  # sections that hybridcomp_lab.planner reads
_TIER_KEYS = ("latency", "bandwidth")
_TIER_OPTIONS = ("burst", "incoming")
_SPEED_KEYS = tuple(f.name for f in dataclasses.fields(Speed))
_CURVE_KEYS = tuple(f.name for f in dataclasses.fields(Curve))
# Bounds of exponents, so that no power overflows.
_CURVE_LIMITS: dict[str, tuple[float, ...]] = {
    "L": (0.0, 20.0),
    "k": (0.0, 50.0),
    "x0": (-64.0, 128.0),
    "b": (-20.0, 20.0),
    "ln_p": (0.0, 64.0),
    "sat_p": (0.0, 64.0),
}


@dataclass(frozen=True)
class Profile:
    """Measurements of this machine and its network that the model uses.

    Attributes:
        host: links between ranks of a host.
        network: links between hosts.
        memory: bytes/s of a copy in memory by one thread.
        message: seconds of a core for a message however short it is, all its work included.
        wire: seconds of a core for each byte that goes to another host or comes from there.
        cores: cores of a rank, at most 1: less where ranks share them.
        start: seconds of a core before the first step of an operation.
        slow_start: the same for an operation that starts in Python at each call, as a reduction to one rank does.
        call: seconds of a codec's call in the compiled engine, at most.
        near, far: seconds of a core for a message in the compiled engine inside a host, or between hosts, all its work
            included: half of them at each end.
        wake: seconds until a rank that sleeps has noticed a message.
        look: seconds of a core that a waiting rank takes to look for messages.
        eager: bytes of the longest message that leaves before it is expected.
        codecs: speeds by spec string, with an entry ``"default"``.
        mpi: curves of MPI's own operations; None: not measured.
        name: name of the profile's file, for people.
    """

    host: Tier
    network: Tier
    memory: float
    codecs: Mapping[str, Speed]
    message: float = 60e-6
    wire: float = 0.5e-9
    cores: float = 1.0
    start: float = 20e-6
    slow_start: float = 500e-6
    call: float = 0.2e-6
    near: float = 1e-6
    far: float = 16e-6
    wake: float = 50e-6
    look: float = 5e-6
    eager: float = 16384.0
    mpi: MpiCurves | None = None
    name: str = field(default="built-in", compare=False)

    def speed(self, codec: Codec) -> Speed:
        """Return a codec's speed: measured, else of its kin with the most parameters in common, else the default."""
        exact = self.codecs.get(codec.spec)
        if exact is not None:
            return exact
        best, shared = self.codecs[DEFAULT] if codec.speed is None else _speed(*codec.speed), -1
        mine = codec.params.items()
        for spec, speed in self.codecs.items():
            if spec.partition(":")[0] == codec.name and spec != DEFAULT:
                theirs = get_codec(spec).params
                common = sum(theirs.get(key) == value for key, value in mine)
                if common > shared:
                    best, shared = speed, common
        return best

    def to_toml(self) -> str:
        """Return the text of the profile's file."""
        lines = [f"version = {VERSION}"]
        lines += [f"{key} = {getattr(self, key)!r}" for key in ("memory", *_OPTIONS)]
        for tier in ("host", "network"):
            lines += ["", f"[{tier}]", *_lines(getattr(self, tier))]
        for spec, speed in self.codecs.items():
            lines += ["", f"[codecs.{json.dumps(spec)}]", *_lines(speed)]
        if self.mpi is not None:
            lines += ["", "[mpi]", f"hosts = {self.mpi.hosts}", f"ranks = {self.mpi.ranks}"]
            for op, curve in self.mpi.of.items():
                lines += ["", f"[mpi.{op}]", *_lines(curve)]
        return "\n".join(lines) + "\n"

    def to_bytes(self) -> bytes:
        """Return the profile's text in UTF-8 for other ranks, at most :data:`MAX_BYTES`.

        Raises:
            ConfigError: the profile has more codecs than fit.
        """
        data = self.to_toml().encode()
        if len(data) > MAX_BYTES:
            raise ConfigError(f"profile {self.name}: {len(data)} bytes are more than {MAX_BYTES}")
        return data

    @classmethod
    def from_bytes(cls, data: bytes, name: str = "another rank's") -> Profile:
        """Read the bytes of :meth:`to_bytes`, or of a file.

        Raises:
            ConfigError: the profile is wrong; names it, the key and what is allowed.
        """
        return cls.from_document(parse_document(data, name), name)

    @classmethod
    def from_document(cls, document: dict[str, Any], name: str) -> Profile:
        """Read a document that :func:`parse_document` returned.

        Raises:
            ConfigError: the profile is wrong; names it, the key and what is allowed.
        """
        return _Reader(name).profile(document)

    def write(self, path: Path, others: str = "") -> None:
        """Write the profile's file, whole or not at all; make the directory.

        Args:
            path: path of the file.
            others: text of the sections that :mod:`hybridcomp_lab.planner` reads.

        Raises:
            ConfigError: the file cannot be written.
        """
        write_bytes(path, self.to_bytes() + others.encode(), what="profile")


def parse_document(data: bytes, name: str) -> dict[str, Any]:
    """Parse the TOML of a profile.

    Raises:
        ConfigError: the text is longer than :data:`MAX_BYTES`, or no TOML.
    """
    called = f"profile {printable(name)}"
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{called}: more than {MAX_BYTES} bytes")
    return parse_toml(decoded(data, called), called)


def _lines(values: Tier | Speed | Curve) -> list[str]:
    entries = dataclasses.asdict(values).items()
    return [f"{key} = {value!r}" for key, value in entries if value or key not in _TIER_OPTIONS]


class _Reader(Checker):
    """Reader of a parsed document."""

    def profile(self, document: dict[str, Any]) -> Profile:
        self.keys(
            "", document, ("version", "memory", *_OPTIONS, "host", "network", "codecs", "mpi", *_OTHERS)
        )
        version = document.get("version")
        if isinstance(version, bool) or version != VERSION:
            self.fail(
                "version",
                f"must be {VERSION}, not {shown(version)}; `hybridcomp doctor --calibrate` writes one",
            )
        tiers = {
            key: Tier(**self.numbers(key, document[key], _TIER_KEYS, _TIER_OPTIONS))
            for key in ("host", "network")
            if key in document
        }
        codecs = self._codecs(document.get("codecs", {}))
        return Profile(
            host=tiers.get("host", BUILT_IN.host),
            network=tiers.get("network", BUILT_IN.network),
            memory=self.number("memory", document.get("memory", BUILT_IN.memory)),
            message=self.number("message", document.get("message", BUILT_IN.message)),
            wire=self.number("wire", document.get("wire", BUILT_IN.wire)),
            cores=self.number("cores", document.get("cores", BUILT_IN.cores), most=1.0),
            **{key: self.number(key, document.get(key, getattr(BUILT_IN, key))) for key in _ENGINE},
            codecs=codecs,
            mpi=self._mpi(document["mpi"]) if "mpi" in document else None,
            name=self._name,
        )

    def _mpi(self, table: Any) -> MpiCurves:
        if not isinstance(table, dict):
            self.fail("mpi", f"must be a table of hosts, ranks and operations, not {shown(table)}")
        self.keys("mpi.", table, ("hosts", "ranks", *OPERATIONS))
        hosts, ranks = (self.count(f"mpi.{key}", table.get(key)) for key in ("hosts", "ranks"))
        if hosts > ranks:
            self.fail("mpi.hosts", f"must be at most {ranks}, the number of ranks, not {hosts}")
        return MpiCurves(
            hosts, ranks, {op: self._curve(f"mpi.{op}", table[op]) for op in OPERATIONS if op in table}
        )

    def _curve(self, key: str, table: Any) -> Curve:
        self.table(key, table, _CURVE_KEYS)
        numbers = {
            name: self.number(f"{key}.{name}", table[name], *_CURVE_LIMITS.get(name, ()))
            for name in _CURVE_KEYS
        }
        if numbers["ln_p"] > numbers["sat_p"]:
            self.fail(f"{key}.ln_p", f"must be at most sat_p, {numbers['sat_p']:g}, not {numbers['ln_p']:g}")
        return Curve(**numbers)

    def _codecs(self, tables: Any) -> dict[str, Speed]:
        if not isinstance(tables, dict):
            self.fail("codecs", f"must be tables by spec, not {shown(tables)}")
        if len(tables) > _MOST_CODECS:
            self.fail("codecs", f"must be at most {_MOST_CODECS}, not {len(tables)}")
        found: dict[str, Speed] = {}
        for spec, table in tables.items():
            key = f"codecs.{json.dumps(spec[:MOST_KEY])}"
            canonical = self._spec(key, spec)
            if canonical in found:
                self.fail(key, f"is the codec {canonical!r}, which is there already")
            found[canonical] = Speed(**self.numbers(key, table, _SPEED_KEYS))
        # Measured ones come first: where two of one name are as near, the first counts.
        return found | {spec: speed for spec, speed in BUILT_IN.codecs.items() if spec not in found}

    def _spec(self, key: str, spec: str) -> str:
        if spec == DEFAULT:
            return spec
        if len(spec) > MOST_KEY:
            self.fail(key, f"must have at most {MOST_KEY} characters, not {len(spec)}")
        try:
            return get_codec(spec).spec
        except UnknownCodecError as error:
            if missing(spec.partition(":")[0]):  # its package is not installed: no message is of it either
                return spec
            self.fail(key, f"is no codec: {error}")
        except (ValueError, TypeError) as error:
            self.fail(key, f"is no codec: {error}")


# Values for 64 MiB of Gaussian fp32 on one thread of an AMD EPYC with AVX-512 (benchmarks/results/codecs.json), in GB/s
# and microseconds; the network has 1 Gb/s.
_MEASURED = {
    DEFAULT: (3.0, 3.0, 3.0, 5, 0.5),
    "none": (10.7, 7.6, 7.8, 2, 1.0),
    "lossless": (2.0, 3.9, 3.6, 20, 0.83),
    "mpc": (4.9, 6.6, 4.4, 3, 0.91),
    "exponent": (9.0, 7.5, 6.7, 2, 0.853),  # from its ratios to memcpy on another machine
    "fp16": (13.4, 17.0, 12.0, 2, 0.5),
    "bf16": (12.0, 14.2, 12.4, 2, 0.5),
    "int8": (17.2, 14.6, 15.8, 2, 0.258),
    "int8:rounding=stochastic": (5.4, 16.1, 12.4, 2, 0.258),
    "int4": (18.7, 18.9, 18.5, 2, 0.133),
    "int4:rounding=stochastic": (4.2, 16.2, 15.7, 2, 0.133),
    "int4:hadamard=true": (3.2, 5.0, 5.5, 2, 0.133),
    "int2": (18.4, 21.2, 19.0, 2, 0.07),
    "sign": (24.6, 21.6, 21.7, 2, 0.032),
    "fp8": (13.4, 16.3, 15.3, 2, 0.258),
    "mxfp8": (10.6, 14.2, 14.7, 2, 0.258),
    "mxfp4": (8.1, 17.4, 16.8, 2, 0.133),
    "zfp:rate=8": (5.5, 4.1, 3.5, 2, 0.25),
    "zfp:rate=16": (2.5, 1.8, 1.7, 2, 0.5),
    "bounded:abs=1e-3": (11.9, 11.0, 9.9, 3, 0.38),
    "topk:ratio=0.01": (17.5, 21.2, 40.1, 2, 0.015),
    "topk:ratio=0.001": (20.0, 21.2, 200.0, 2, 0.0016),
    "threshold": (12.2, 25.6, 133.0, 2, 0.0041),
    "sidco:ratio=0.01": (20.8, 22.6, 40.5, 2, 0.015),
    "sidco:ratio=0.001": (24.3, 21.4, 238.0, 2, 0.0016),
}


def _speed(encode: float, decode: float, add: float, overhead: float, size: float) -> Speed:
    """Return a speed given in GB/s and microseconds."""
    return Speed(encode * 1e9, decode * 1e9, add * 1e9, overhead * 1e-6, size)


BUILT_IN = Profile(
    host=Tier(latency=2e-6, bandwidth=5e9),
    network=Tier(latency=40e-6, bandwidth=117e6),
    memory=11e9,
    codecs={
        spec if spec == DEFAULT else get_codec(spec).spec: _speed(*measured)
        for spec, measured in _MEASURED.items()
    },
)
