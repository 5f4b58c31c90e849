"""Every codec and its peers on one thread: speed beside memcpy, size, error.

python benchmarks/codecs.py --json runs/bench/codecs.json             # all codecs, peers, five data sets; 5 minutes
python benchmarks/codecs.py --sizes --json runs/bench/codecs_sizes.json    # do ratios hold at other sizes and types?
python benchmarks/codecs.py --codec 'int8;topk:ratio=0.01' --threads 2
python benchmarks/codecs.py --isa all --json runs/bench/codecs.json   # with every instruction set of the machine
python benchmarks/codecs.py --device cuda --json runs/bench/gpu.json  # on the GPU, beside a copy there, torch, nvCOMP

A codec's promise (exact, or its largest error), decode_add against decode and an addition, and that NaN survives are
checked before a speed is printed; the exit code is 1 if one does not hold. Speeds are of Gaussian data, in GB/s of
input as float32 and as a ratio to memcpy of the same buffer, taken in turn with it in the same run.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import resultfile
from codecbench import data, measure, specs
from codecbench.measure import OPERATIONS, CheckFailed, Memcpy, Ours, Subject, Theirs, Timing
from codecbench.output import (
    SPEED_HEADER,
    busy_cores,
    lines,
    print_asked,
    print_errors,
    size_line,
    speed_lines,
)
from codecbench.peers import PEERS, Peer

import hybridcomp as hc
from hybridcomp import native
from hybridcomp.results.provenance import facts

ELEMENTS = 1 << 24
SIZES = {"64 Ki": 1 << 16, "1 Mi + 1": (1 << 20) + 1, "16 Mi": ELEMENTS, "100 Mi": 100 << 20}
HALVES = ("float16", "bfloat16")
BUSY = 0.3  # cores that other programs use; from there on figures are not worth keeping
QUICK_ELEMENTS = 50_000
QUICK_SIZES = {"4 Ki": 1 << 12, "16 Ki": 1 << 14}

Row = dict[str, Any]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--codec", help="only these, separated by ';'; by default all")
    parser.add_argument("--elements", type=int, help=f"float32 values in each data set (default {ELEMENTS})")
    parser.add_argument(
        "--sizes", action="store_true", help="compare sizes and input types instead; without peers"
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda", "emulation"),
        default="cpu",
        help="where arrays are (emulation: the GPU's kernels on the CPU, to try this; the figures mean nothing)",
    )
    parser.add_argument("--no-peers", action="store_true", help="only our own codecs")
    parser.add_argument("--threads", type=int, default=1, help="threads of codecs, and of torch")
    parser.add_argument(
        "--seconds", type=float, help="time for each operation (default 0.6; 0.5 with --sizes)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small arrays and few repetitions: only to try it"
    )
    parser.add_argument(
        "--isa",
        help="instruction sets of the kernels, separated by ',', or 'all'; by default the best of the machine. Others "
        "than the first are timed only",
    )
    parser.add_argument("--json", type=Path, help="also write the results there")
    args = parser.parse_args()
    try:
        args.entries = specs.ENTRIES if args.codec is None else specs.find(args.codec.split(";"))
        args.codecs = [entry.codec() for entry in args.entries]  # an unknown spec is an error before the work
    except ValueError as error:
        parser.error(str(error))
    there = native.kernels().available_isas()  # the best first
    args.isas = (
        there if args.isa == "all" else [native.kernels().isa()] if args.isa is None else args.isa.split(",")
    )
    unknown = [isa for isa in args.isas if isa not in there]
    if unknown:
        parser.error(f"--isa: this machine runs {', '.join(there)}, not {', '.join(unknown)}")
    if (args.sizes or args.device != "cpu") and len(args.isas) > 1:
        parser.error("--isa: one instruction set with --sizes or --device")
    if args.elements is None:
        args.elements = QUICK_ELEMENTS if args.quick else ELEMENTS
    if args.elements < 1:
        parser.error(f"--elements must be positive, not {args.elements}")
    args.timing = Timing(0.01, 3, 5) if args.quick else Timing(args.seconds or (0.5 if args.sizes else 0.6))
    return args


# -- the comparison ----------------------------------------------------------------------------------------


def our_row(
    entry: specs.Entry, sets: list[data.DataSet], memcpy: Memcpy, timing: Timing, isas: list[str]
) -> Row:
    """Measure one codec of ours; its messages do not depend on the instruction set.

    Raises:
        CheckFailed: the codec does not hold what it promises.
    """
    codec = entry.codec()
    row: Row = {"name": entry.spec, "spec": codec.spec, "family": entry.family, "ours": True, "sets": {}}
    first = None
    for one in sets:
        subject = Ours(codec, one.values)
        row["sets"][one.name] = measure.quality(subject)
        measure.check_promise(entry, one, subject)
        if entry.by_tensor and one.tensors:
            row["sets"][one.name] = measure.quality_by_tensor(codec, one)
        first = first or subject
    assert first is not None
    if not measure.keeps_non_finite(lambda x: Ours(codec, x)):
        raise CheckFailed(f"{entry.spec}: NaN or an infinity decodes to a finite value")
    measure.check_sum(entry.spec, first)
    row["keeps_nan"] = True
    row["by_isa"] = {}
    for isa in isas:
        with native.using_isa(isa):
            row["by_isa"][isa] = timed(first, memcpy, timing)
    return row | row["by_isa"][isas[0]]


def peer_row(kind: type[Peer], sets: list[data.DataSet], memcpy: Memcpy, timing: Timing) -> Row:
    """Measure a peer; it promises nothing, so nothing is checked but that values come back."""
    row: Row = {"name": kind.name, "family": kind.family, "ours": False, "sets": {}}
    missing = kind.missing()
    if missing is not None:
        return row | {"missing": missing}
    peer = kind()
    first = None
    for one in sets:
        subject = Theirs(peer, one.values)
        row["sets"][one.name] = measure.quality(subject)
        first = first or subject
    assert first is not None
    with np.errstate(all="ignore"):
        row["keeps_nan"] = measure.keeps_non_finite(lambda x: Theirs(peer, x))
    return row | timed(first, memcpy, timing)


def timed(subject: Subject, memcpy: Memcpy, timing: Timing) -> Row:
    return {name: asdict(speed) for name, speed in measure.speeds(subject, memcpy, timing).items()}


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all codecs and peers on all data sets."""
    print("# making the data ...", flush=True)
    sets = data.every(args.elements, small=args.quick)
    for one in sets:
        print(f"#   {one.name}: {one.says}")
    memcpy = Memcpy(sets[0].values)
    jobs: list[tuple[str, Callable[[], Row]]] = [
        (e.spec, lambda e=e: our_row(e, sets, memcpy, args.timing, args.isas)) for e in args.entries
    ]
    if not args.no_peers:
        jobs += [(p.name, lambda p=p: peer_row(p, sets, memcpy, args.timing)) for p in PEERS]
    rows: list[Row] = []
    with lines(len(jobs)) as say:
        say(SPEED_HEADER)
        for name, job in jobs:
            try:
                rows.append(job())
            except CheckFailed as failure:
                rows.append({"name": name, "failed": str(failure)})
            say(speed_lines(rows[-1]), done=1)
    judged = judge(rows)
    print_errors(rows, [one.name for one in sets])
    print_asked(judged, as_asked=args.elements == ELEMENTS and args.threads == 1)
    return {"sets": {one.name: one.says for one in sets}, "rows": rows, "asked": judged}


def judge(rows: list[Row]) -> list[Row]:
    """Return the speeds that were asked for, by instruction set, and whether each is met (None: not measured)."""
    by_name = {row["name"]: row for row in rows if "encode" in row}
    judged = []
    for asked in specs.ASKED:
        own = by_name.get(asked.spec)
        for isa, speeds in ({} if own is None else own["by_isa"]).items():
            if isa not in asked.isas:
                continue
            speed = speeds[asked.operation]
            if asked.than == specs.MEMCPY:
                times = speed["ratio"]
            else:
                other = own["by_isa"].get(asked.than) or by_name.get(asked.than)
                times = other and speed["gb_s"] / other[asked.operation]["gb_s"]
            judged.append(
                asdict(asked)
                | {"isa": isa, "measured": times, "met": None if times is None else times >= asked.times}
            )
    return judged


# -- sizes and types ---------------------------------------------------------------------------------------


def size_row(entry: specs.Entry, x: Any, memcpy: Memcpy, timing: Timing) -> Row:
    """Measure one codec on one array of Gaussian values.

    Raises:
        CheckFailed: the codec does not hold what it promises (of float32), or decode_add is not decode and an addition.
    """
    subject = Ours(entry.codec(), x)
    subject.decode()
    if isinstance(x, np.ndarray) and x.dtype == np.float32:
        measure.check_promise(entry, data.DataSet("Gaussian", "", x), subject)
    measure.check_sum(entry.spec, subject)
    bits = subject.nbytes * 8 / len(x)
    cold = Ours(entry.codec(), x, measure.copies_of(len(x)))
    return {"name": entry.spec, "bits": bits} | timed(cold, memcpy, timing)


def study(args: argparse.Namespace) -> dict[str, Any]:
    """Measure ratios to memcpy of as many float32, none of it in the cache, at other sizes and types than the base."""
    sizes = QUICK_SIZES if args.quick else SIZES
    base = "16 Ki" if args.quick else "16 Mi"
    cases = [(label, n, "float32") for label, n in sizes.items()] + [(base, sizes[base], d) for d in HALVES]
    rows: list[Row] = []
    with lines(len(cases) * len(args.entries)) as say:
        say(
            f"{'codec':32} {'elements':>9} {'type':>9}  "
            + "".join(f"{name + ' x memcpy':>22}" for name in OPERATIONS)
        )
        values = {n: data.gaussian(n).values for n in sizes.values()}
        memcpys = {n: Memcpy(values[n], measure.copies_of(n)) for n in values}
        inputs = [as_type(values[n], dtype) for _, n, dtype in cases]
        # A codec's cases follow one another, so that figures that are compared are measured within a few seconds.
        for entry in args.entries:
            for (label, n, dtype), x in zip(cases, inputs, strict=True):
                try:
                    row = size_row(entry, x, memcpys[n], args.timing)
                except CheckFailed as failure:
                    row = {"name": entry.spec, "failed": str(failure)}
                rows.append(row | {"size": label, "elements": n, "dtype": dtype})
                say(size_line(rows[-1]), done=1)
    falls = fallen(rows, base)
    print(
        f"\n# ratio lower by more than {specs.LARGEST_FALL:.0%} than at {base} float32: {len(falls)} of {len(rows) * 3}"
    )
    for fall in falls:
        print(
            f"#   {fall['name']} {fall['operation']}, {fall['size']} {fall['dtype']}: {fall['part']:.2f} of it"
        )
    return {"base": base, "rows": rows, "fallen": falls}


def as_type(x: Any, dtype: str) -> Any:
    if dtype != "bfloat16":
        return x.astype(dtype, copy=False)
    import torch  # noqa: PLC0415  (NumPy has no bfloat16)

    return torch.from_numpy(x).to(torch.bfloat16)


def fallen(rows: list[Row], base: str) -> list[Row]:
    """Return the operations whose ratio is lower than at the base by more than allowed."""
    usual = {
        r["name"]: r for r in rows if r["size"] == base and r["dtype"] == "float32" and "failed" not in r
    }
    found = []
    for row in rows:
        if "failed" in row or row["name"] not in usual:
            continue
        for name in OPERATIONS:
            part = row[name]["ratio"] / usual[row["name"]][name]["ratio"]
            if part < 1 - specs.LARGEST_FALL:
                where = {key: row[key] for key in ("name", "size", "dtype")}
                found.append(where | {"operation": name, "part": part})
    return found


def on_device(args: argparse.Namespace, keep: Callable[[Row], None]) -> Row:
    """Measure all codecs on a GPU."""
    from gpubench.compare import compare as compare_on_device  # noqa: PLC0415  (only who has one needs it)

    sys.path.insert(0, str(Path(__file__).parent.parent))  # the emulation is among the tests
    with lines(len(args.entries)) as say:
        return compare_on_device(args, say, keep)


def write(args: argparse.Namespace, found: Row, load: float) -> None:
    """Write the results, with the machine on which they were measured."""
    record = {
        "benchmark": {"cpu": "codec sizes" if args.sizes else "codecs"}.get(
            args.device, "codecs on a device"
        ),
        "machine": facts("none") | {"load": round(load, 2)},
        "elements": None if args.sizes else args.elements,
        "threads": args.threads,
        "quick": args.quick,
        **found,
    }
    resultfile.write(args.json, record)


def main() -> None:
    args = arguments()
    load = busy_cores()
    hc.set_num_threads(args.threads)
    with contextlib.suppress(ImportError):
        import torch  # noqa: PLC0415

        torch.set_num_threads(args.threads)
    native.kernels().set_isa(args.isas[0])
    print(
        f"# {', '.join(args.isas)}; {args.threads} thread(s), {'sizes' if args.sizes else args.elements} elements"
    )
    if load > BUSY and not args.quick:
        print(f"# the machine is busy ({load:.1f} cores): what others do shows in the figures")

    def keep(found: Row) -> None:
        if args.json is not None:
            write(args, found, load)

    found = on_device(args, keep) if args.device != "cpu" else study(args) if args.sizes else compare(args)
    keep(found)
    sys.exit(any("failed" in row for row in found["rows"]))


if __name__ == "__main__":
    main()
