"""Write the tables of docs/mpi4py.md from the classes of mpi4py and of hybridcomp, and from measured calls.

python benchmarks/pages/mpi_methods_doc.py            # rewrite them between their markers
python benchmarks/pages/mpi_methods_doc.py --check    # exit 1 if the page and the code differ
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from mpi4py import MPI
from page import ROOT, origin, read, rewrite

from hybridcomp.collectives import communicator

_CLASSES = {
    MPI.Intracomm: communicator.Communicator,
    MPI.Cartcomm: communicator.CartCommunicator,
    MPI.Graphcomm: communicator.GraphCommunicator,
    MPI.Distgraphcomm: communicator.DistGraphCommunicator,
}
_KINDS = {
    "compressed": "Compressed where the policy says so; waits end after the communicator's `timeout`.",
    "timed": "MPI's own, uncompressed; waits end after the communicator's `timeout`.",
    "inherited": "mpi4py's own method, inherited: it waits as MPI does.",
}
_RESULTS = ROOT / "benchmarks" / "results" / "mpi4py_calls.json"


def kind_of(mpi: type, ours: type, name: str) -> str:
    """Return how a method of mpi4py's class is provided."""
    method = inspect.getattr_static(ours, name)
    if method is inspect.getattr_static(mpi, name):
        return "inherited"
    if name.endswith("_init"):  # as its starts
        name = f"I{name[0].lower()}{name[1:].removesuffix('_init')}"
    parameters = inspect.signature(getattr(ours, name)).parameters
    passed_on = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return "compressed" if "codec" in parameters or passed_on else "timed"


def methods() -> dict[str, dict[str, str]]:
    """Return the kind of each method by name, by the class of mpi4py that first has it."""
    found: dict[str, dict[str, str]] = {}
    seen: set[str] = set()
    for mpi, ours in _CLASSES.items():
        rows = found.setdefault(mpi.__name__, {})
        for name in dir(mpi):
            own = inspect.getattr_static(mpi, name)
            if (
                name.startswith("_")
                or name in seen
                or isinstance(own, property)
                or not callable(getattr(mpi, name))
            ):
                continue
            seen.add(name)
            rows[name] = kind_of(mpi, ours, name)
    return found


def tables() -> Iterator[str]:
    for kind, words in _KINDS.items():
        yield f"\n**{words}**\n"
        for mpi, rows in methods().items():
            names = sorted(name for name, one in rows.items() if one == kind)
            if names:
                yield f"- `{mpi}`: {', '.join(f'`{name}`' for name in names)}"


def costs() -> Iterator[str]:
    if not _RESULTS.exists():
        return
    measured = read(_RESULTS)
    about = measured["about"]
    yield (
        f"Processor time of a call on 8 bytes (one rank, `none`), {' '.join(about['mpi'].split())}, "
        f"`{about['command']}`:\n"
    )
    yield "| call | mpi4py, array | ours | mpi4py, `[array, type]` | ours |"
    yield "|---|---:|---:|---:|---:|"
    rows = measured["calls"]
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        yield (
            f"| {first['call']} | {first['mpi4py_us']} us | {first['us']} us | {second['mpi4py_us']} us | "
            f"{second['us']} us |"
        )
    yield "\n| two ranks of one host | mpi4py | ours | |"
    yield "|---|---:|---:|---:|"
    for row in measured["latency"]:
        yield f"| half a round trip, {row['bytes']} B | {row['mpi4py_us']} us | {row['us']} us | {row['over']} times |"
    for row in measured["bandwidth"]:
        yield (
            f"| window of 64 messages of {row['bytes']} B | {row['mpi4py_mb_s']} MB/s | {row['mb_s']} MB/s | "
            f"{row['of']} of it |"
        )
    yield f"\n{origin(about)}"
    if "windows" not in measured:
        return
    about = measured["about_lab"]
    yield (
        "\nWindows of 64 messages of 1 MiB of float32, by policy, between two hosts of the lab (1 Gb/s); shares of "
        "what the link carries in that time:\n"
    )
    yield "| | bytes on the link | processor time | median | of the link | least | of the link |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for row in measured["windows"]:
        yield (
            f"| `{row['policy']}` | {row['wire_mb']} MB | {row['processor_seconds']} s | {row['seconds']} s | "
            f"{row['of_link']} | {row['least_seconds']} s | {row['most_of_link']} |"
        )
    yield f"\n{origin(about)}"


def main() -> None:
    rewrite(ROOT / "docs" / "mpi4py.md", __file__, METHODS="\n".join(tables()), COSTS="\n".join(costs()))


if __name__ == "__main__":
    main()
