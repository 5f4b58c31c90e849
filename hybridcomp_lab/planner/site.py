"""Read the description of a cluster: a profile with the device's speed, and a section that counts hosts and ranks.

.. code-block:: toml

    # all of a profile (hybridcomp.perfmodel.profile): version, [host], [network], [codecs.*], and

    [cluster]
    hosts = 16
    ranks_per_host = 8
    memory = 8.5e10                # bytes that a rank has; without it plans are not held to any
    cores = 2.0                    # shared by the ranks of all hosts; left out where each rank has its own
    speeds = [1.0, 0.5]            # of each host's processors, relative to [compute]; left out where they are alike
    rates = [1.25e10, 1.25e9]      # bytes/s of each host's link; left out where it is [network]'s
    swap = 2.5e10                  # bytes/s between a rank's memory and its host's; left out: no swap is predicted

    [compute]                      # a device by its datasheet
    flops = 3.12e14                # a second at best, in 16 bits
    bandwidth = 2.0e12             # bytes/s of its memory
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn

from hybridcomp.errors import ConfigError
from hybridcomp.files import read_bytes, shown
from hybridcomp.perfmodel import Profile
from hybridcomp.perfmodel.profile import MAX_BYTES, parse_document
from hybridcomp_lab.planner.cluster import Cluster
from hybridcomp_lab.planner.compute import read_compute

_COUNTS = ("hosts", "ranks_per_host")
_AMOUNTS = ("memory", "cores", "swap")
_LISTS = ("speeds", "rates")
_MOST = 1 << 20  # hosts, or ranks of one host, at most


def read_site(
    path: str, hosts: int | None = None, ranks_per_host: int | None = None, memory: float | None = None
) -> Cluster:
    """Read the description of a cluster.

    Args:
        path: path of the file.
        hosts, ranks_per_host, memory: values in the place of those in ``[cluster]``; at most as many hosts, and ranks
            on each, as it has.

    Raises:
        ConfigError: the file is wrong (names it, the key and what is allowed), or is for other machines.
    """
    document = parse_document(read_bytes(path, what="the profile", most=MAX_BYTES), path)
    compute = read_compute(document, path)
    profile = Profile.from_document(document, path)
    if compute is None:
        raise ConfigError(
            f"{path} says nothing of how fast a rank computes: write a section [compute] with flops and bandwidth of "
            "the device, as examples/cluster_16x8.toml has them"
        )
    section = document.get("cluster", {})
    if not isinstance(section, dict):
        _fail(path, "cluster", f"must be a table of {', '.join(_COUNTS)}, not {shown(section)}")
    known = _section(path, section)
    given = {"hosts": hosts, "ranks_per_host": ranks_per_host}
    flags = {"hosts": "--hosts", "ranks_per_host": "--ppn"}
    for key, wanted in given.items():
        if wanted is None and key not in known:
            raise ConfigError(
                f"{path} does not count its {key}: say {flags[key]} N, or {key} in its [cluster]"
            )
        if wanted is not None and wanted < 1:
            raise ConfigError(f"{flags[key]} must be at least 1, not {wanted}")
        if wanted is not None and wanted > known.get(key, wanted):
            raise ConfigError(
                f"{path} is of other machines: its {key} is {known[key]}, and {flags[key]} asks for {wanted}; "
                f"{flags[key]} {known[key]} is the most that it describes"
            )
    count = known["hosts"] if hosts is None else hosts
    return Cluster(
        count,
        known["ranks_per_host"] if ranks_per_host is None else ranks_per_host,
        profile,
        compute,
        cores=known.get("cores"),
        memory=known.get("memory") if memory is None else memory,
        speeds=tuple(known.get("speeds", ())[:count]),
        rates=tuple(known.get("rates", ())[:count]),
        swap=known.get("swap"),
    )


def _section(path: str, section: Mapping[str, Any]) -> dict[str, Any]:
    """Check the section ``[cluster]``."""
    for key, value in section.items():
        name = f"cluster.{key[:40]}"
        if key in _COUNTS:
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
                _fail(path, name, f"must be an integer from 1 to {_MOST}, not {shown(value)}")
        elif key in _AMOUNTS:
            if not _positive(value):
                _fail(path, name, f"must be a number above 0, not {shown(value)}")
        elif key in _LISTS:
            if not isinstance(value, list) or not all(map(_positive, value)):
                _fail(path, name, f"must be a list of numbers above 0, one for each host, not {shown(value)}")
            if len(value) != section.get("hosts"):
                _fail(path, name, f"has {len(value)} numbers for {section.get('hosts', 'no')} hosts")
        else:
            _fail(path, name, f"is unknown; allowed: {', '.join((*_COUNTS, *_AMOUNTS, *_LISTS))}")
    return dict(section)


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _fail(path: str, key: str, what: str) -> NoReturn:
    raise ConfigError(f"profile {path}: {key} {what}")
