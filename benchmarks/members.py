"""Train with replicas that are lost and come back, in the lab: tokens/s, losses and bits beside undisturbed runs.

python benchmarks/members.py --rate 200mbit --json runs/members.json     # ten minutes of faults
python benchmarks/members.py --seconds 240 --period 40

Four hosts train by ``hybridcomp train --elastic``; a lighthouse is on a fifth. In each period one of three hosts loses
its replica: the process is killed, the host's link is cut, or the process is stopped; after a third of the period it is
started again, the link mended, or the process continued, and once it is back the others have half a period of rest. The
fourth host is never touched. Undisturbed runs, of two seeds, train on as many tokens, then on to as many steps; the
first one goes on with three replicas for a while.

Nothing is printed of the results unless: no other replica has ended; replicas have the same bits after each step that
they committed; the loss is within the spread of the undisturbed runs; the memory and the descriptors of the fourth
replica are flat; tokens/s are at least 0.9 of what the replicas that were there do undisturbed: by the median step of
as many replicas in the same period, since others may use the machine's cores, too.

A step of fewer replicas takes fewer tokens. So on as many tokens the disturbed run makes more steps than the
undisturbed ones, and in as many steps it sees fewer tokens: its loss must lie between theirs after as many steps and
theirs after as many tokens, give or take their spread.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resultfile import write

from hybridcomp.net import Lab
from hybridcomp.net.launch import resolve

HOSTS = 4
LIGHTHOUSE = HOSTS + 1
FAULTS = ("kill", "cut", "stop")
LEAST = 0.9  # of the undisturbed tokens/s
WINDOWS = 8  # parts of a run whose mean losses are compared
DESCRIPTORS = 8  # that a replica may have more of at its end
MEMORY = 0.05  # share that its memory may have grown by
_UP_SECONDS = 240.0
_SETTLING = 5  # committed steps that are not counted: allocations, first connections
_THREE_SECONDS = 45.0  # of the undisturbed run with three replicas
TRAIN = (
    "--layers 4 --d-model 128 --heads 4 --seq-len 64 --micro-batches 1 --micro-batch-size 4 --steps 1000000 "
    "--eval-batches 0 --digest-every 1 --min-replicas 2 --timeout 4 --warmup-steps 50 --log-every 50"
)

TOKENS = 4 * 64  # of a step on each replica


class FailedError(RuntimeError):
    """A run is not as it must be."""


@dataclass
class Host:
    """A host, and the replica on it.

    Attributes:
        number: number in the lab, from 1.
        process: newest process of the replica.
        starts: times of its starts.
        touched: whether a fault is on it now.
    """

    number: int
    process: subprocess.Popen[bytes] | None = None
    starts: list[float] = field(default_factory=list)
    touched: bool = False


class Run:
    """Replicas on the hosts of a lab, and their lighthouse; a context manager.

    Args:
        lab: lab, up.
        out: run directory.
        seed: seed of the training.
        policy: policy of the replicas.
    """

    def __init__(self, lab: Lab, out: Path, seed: int, policy: str) -> None:
        self._lab = lab
        self.out = out
        self._train = [*TRAIN.split(), "--seed", str(seed), "--policy", policy, "--out", str(out)]
        self.hosts = [Host(number) for number in range(1, HOSTS + 1)]
        self.faults: list[dict[str, Any]] = []
        self.samples: list[
            tuple[float, int, int]
        ] = []  # of the host that is not touched: time, KiB, descriptors
        self._sampled = 0.0
        self._lighthouse: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Run:
        self.out.mkdir(parents=True)
        program = str(Path(sys.executable).with_name("torchft_lighthouse"))
        waits = (
            "--min_replicas",
            "2",
            "--join_timeout_ms",
            "1000",
            "--quorum_tick_ms",
            "50",
            "--heartbeat_timeout_ms",
            "2000",
        )
        self._lighthouse = self._on(LIGHTHOUSE, [program, *waits, "--bind", "[::]:29510"], "lighthouse")
        time.sleep(1.0)
        for host in self.hosts:
            self.start(host)
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            self._end(host.process)
        self._end(self._lighthouse)

    def start(self, host: Host) -> None:
        """Start the replica of a host."""
        argv = resolve(["hybridcomp", "train", "--elastic", "--replica", f"host{host.number}", *self._train])
        host.process = self._on(host.number, argv, f"host{host.number}")
        host.starts.append(time.time())

    def _on(self, host: int, argv: list[str], name: str) -> subprocess.Popen[bytes]:
        # torchft tells others the name of its host, which must lead there.
        named = ["unshare", "--uts", "sh", "-c", f'hostname 10.9.0.{host} && exec "$@"', "sh", *argv]
        environment = self._lab.environment(
            env={"GLOO_SOCKET_IFNAME": "eth0", "HYBRIDCOMP_SUMMARY": "0", "PYTHONFAULTHANDLER": "1"}
        )
        environment["TORCHFT_LIGHTHOUSE"] = f"http://10.9.0.{LIGHTHOUSE}:29510"
        with (self.out / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                self._lab.host_command(host, named),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @staticmethod
    def _end(process: subprocess.Popen[bytes] | None) -> None:
        if process is not None:
            process.kill()
            process.wait()

    def begin(self, fault: str, host: Host) -> None:
        """Plant a fault on a host."""
        assert host.process is not None
        host.touched = True
        if fault == "cut":
            self._link(host, "down")
        else:
            host.process.send_signal(signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        if fault == "kill":
            host.process.wait()
        self.faults.append({"fault": fault, "host": host.number, "began": time.time()})

    def mend(self, fault: str, host: Host) -> None:
        """Take the fault back; start the replica again if it has ended."""
        assert host.process is not None
        if fault == "cut":
            self._link(host, "up")
        if fault == "stop":
            host.process.send_signal(signal.SIGCONT)
        ended = host.process.poll()
        if ended is not None:
            self.start(host)
        self.faults[-1] |= {"mended": time.time(), "restarted": ended is not None}
        host.touched = False

    def _link(self, host: Host, state: str) -> None:
        subprocess.run(self._lab.host_command(host.number, ["ip", "link", "set", "eth0", state]), check=True)

    def watch(self, seconds: float) -> None:
        """Let the replicas train for a while; start again the one that ended by the last fault.

        Raises:
            FailedError: another one has ended.
        """
        until = time.time() + seconds
        while time.time() < until:
            last = self.hosts[HOSTS - 1].process
            if time.time() - self._sampled >= 1.0 and last is not None:
                self._sampled = time.time()
                with contextlib.suppress(OSError, ValueError):  # it has ended, as is found below
                    self.samples.append((self._sampled, *resources(last.pid)))
            for host in self.hosts:
                code = None if host.touched or host.process is None else host.process.poll()
                if code is None:
                    continue
                if not self.faults or self.faults[-1]["host"] != host.number:
                    raise FailedError(
                        f"the replica of host {host.number} ended with {code}: {self.told(host)}"
                    )
                self.faults[-1]["restarted"] = (
                    True  # what it had waited for while the fault lasted failed after it
                )
                self.start(host)
            time.sleep(min(0.1, max(0.0, until - time.time())))

    def told(self, host: Host) -> str:
        """Return the end of what a replica printed."""
        return (self.out / f"host{host.number}.log").read_text(errors="replace")[-2000:]

    def steps(self, number: int) -> list[dict[str, Any]]:
        """Return what the replica of a host has written of the steps that it committed."""
        path = self.out / f"host{number}" / "metrics.jsonl"
        if not path.exists():
            return []
        found = []
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # of a replica that was killed as it wrote
                entry = json.loads(line)
                if entry["kind"] == "train":
                    found.append(entry)
        return found

    def last(self) -> dict[str, Any]:
        """Return the last step that the replica of the host without faults committed; it has committed some."""
        return self.steps(HOSTS)[-1]

    def wait_back(self, host: Host) -> None:
        """Wait until the replica that the last fault was on commits steps with the others again."""
        deadline = time.time() + _UP_SECONDS
        while not any(step["time"] > self.faults[-1]["mended"] for step in self.steps(host.number)[-1:]):
            if time.time() > deadline:
                raise FailedError(f"the replica of host {host.number} is not back: {self.told(host)}")
            self.watch(0.5)

    def wait_for(self, steps: int, replicas: int) -> None:
        """Wait until so many steps were committed by so many replicas."""
        deadline = time.time() + _UP_SECONDS
        while sum(entry["replicas"] == replicas for entry in self.steps(HOSTS)) < steps:
            if time.time() > deadline:
                raise FailedError(
                    f"no {steps} steps of {replicas} replicas: {self.told(self.hosts[HOSTS - 1])}"
                )
            self.watch(0.5)


def resources(process: int) -> tuple[int, int]:
    """Return a process's resident memory in KiB, and the number of its descriptors."""
    status = Path(f"/proc/{process}/status").read_text()
    (memory,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))
    return memory, len(os.listdir(f"/proc/{process}/fd"))


# -- what was measured -------------------------------------------------------------------------------


def committed(run: Run) -> list[dict[str, Any]]:
    """Return the steps that were committed, in order: time, tokens, replicas, and the mean loss of those.

    Raises:
        FailedError: two replicas have other bits after a step that both committed.
    """
    by_step: dict[int, list[dict[str, Any]]] = {}
    for host in run.hosts:
        for entry in run.steps(host.number):
            by_step.setdefault(entry["step"], []).append(entry | {"host": host.number})
    found = []
    for step, entries in sorted(by_step.items()):
        if len({entry["digest"] for entry in entries}) > 1:
            told = {entry["host"]: (entry["digest"], entry["replicas"], entry["time"]) for entry in entries}
            raise FailedError(f"{run.out}: replicas have other bits after step {step}: {told}")
        found.append(
            {
                "step": step,
                "time": max(entry["time"] for entry in entries),
                "tokens": entries[0]["tokens"],
                "replicas": entries[0]["replicas"],
                "loss": statistics.mean(entry["loss"] for entry in entries),
                "committed_by": len(entries),
                "seconds": max(entry["step_seconds"] for entry in entries),
            }
        )
    return found


def speed(steps: list[dict[str, Any]], replicas: int) -> float:
    """Return the tokens/s of the longest stretch of steps of so many replicas, without its first steps."""
    stretches = [list(group) for _, group in itertools.groupby(steps, lambda step: step["replicas"])]
    longest = max((s for s in stretches if s[0]["replicas"] == replicas), key=len)[_SETTLING:]
    return (longest[-1]["tokens"] - longest[0]["tokens"]) / (longest[-1]["time"] - longest[0]["time"])


class Speeds:
    """Tokens/s that replicas do undisturbed, by their number and the time.

    Args:
        steps: steps that were committed.
        began: time from which periods count.
        period: seconds of a period.
    """

    def __init__(self, steps: list[dict[str, Any]], began: float, period: float) -> None:
        self._began, self._period = began, period
        self._seconds: dict[tuple[int, int | None], list[float]] = {}
        for step in steps:
            for part in (self._part(step["time"]), None):
                self._seconds.setdefault((step["replicas"], part), []).append(step["seconds"])

    def _part(self, when: float) -> int:
        return int((when - self._began) // self._period)

    def of(self, replicas: int, when: float) -> float:
        """Return the tokens/s of so many replicas: by the median step of the period, or of the run if it has few."""
        of_period = self._seconds.get((replicas, self._part(when)), [])
        seconds = of_period if len(of_period) >= _SETTLING else self._seconds[replicas, None]
        return replicas * TOKENS / statistics.median(seconds)


def present(run: Run, begin: float, end: float, period: float) -> Iterator[tuple[float, float, int]]:
    """Yield spans of time, and how many replicas were there: from a fault to the first step that its host commits
    after it is mended, there is one less."""
    edges = [begin + period * number for number in range(int((end - begin) / period) + 1)] + [end]
    away = []
    for fault in run.faults:
        back = next((s["time"] for s in run.steps(fault["host"]) if s["time"] > fault["mended"]), end)
        fault["back"] = back
        away.append((fault["began"], back))
        edges += [fault["began"], back]
    edges = sorted(edge for edge in set(edges) if begin <= edge <= end)
    for first, last in itertools.pairwise(edges):
        yield first, last, HOSTS - sum(a <= first and last <= b for a, b in away)


def means(steps: list[dict[str, Any]], by: str, last: int) -> list[float]:
    """Return the mean losses in equal parts of so many tokens or steps."""
    parts: list[list[float]] = [[] for _ in range(WINDOWS)]
    for step in steps:
        if step[by] <= last:
            parts[min(WINDOWS - 1, step[by] * WINDOWS // last)].append(step["loss"])
    return [statistics.mean(part) for part in parts]


def check_losses(disturbed: dict[str, list[float]], *undisturbed: dict[str, list[float]]) -> float:
    """Return the spread of the undisturbed runs: the most by which their mean losses differ in any part.

    Args:
        disturbed: mean losses in equal parts, by ``"tokens"`` and by ``"step"``.
        undisturbed: the same of each undisturbed run.

    Raises:
        FailedError: a loss of the disturbed run is above all theirs after as many tokens, or below all theirs after
            as many steps, by more than the spread.
    """
    spread = max(
        max(losses) - min(losses)
        for by in ("tokens", "step")
        for losses in zip(*(run[by] for run in undisturbed), strict=True)
    )
    high = [max(losses) + spread for losses in zip(*(run["tokens"] for run in undisturbed), strict=True)]
    low = [min(losses) - spread for losses in zip(*(run["step"] for run in undisturbed), strict=True)]
    if any(a > b for a, b in zip(disturbed["tokens"], high, strict=True)):
        raise FailedError(
            f"the loss is above that of undisturbed runs on as many tokens: {disturbed}, {undisturbed}"
        )
    if any(a < b for a, b in zip(disturbed["step"], low, strict=True)):
        raise FailedError(
            f"the loss is below that of undisturbed runs in as many steps: {disturbed}, {undisturbed}"
        )
    return spread


def flat(samples: list[tuple[float, int, int]]) -> dict[str, Any]:
    """Return memory and descriptors of the replica that lived throughout, early and late.

    Raises:
        FailedError: they have grown.
    """
    quarter = max(1, len(samples) // 4)
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    found: dict[str, Any] = {}
    for index, name in ((1, "memory_kib"), (2, "descriptors")):
        found[name] = [round(statistics.median(sample[index] for sample in part)) for part in (early, late)]
    if found["memory_kib"][1] > (1 + MEMORY) * found["memory_kib"][0]:
        raise FailedError(f"the memory of the replica that was not touched grew: {found['memory_kib']} KiB")
    if found["descriptors"][1] > found["descriptors"][0] + DESCRIPTORS:
        raise FailedError(f"the descriptors of the replica that was not touched grew: {found['descriptors']}")
    return found


def undisturbed(
    lab: Lab, args: argparse.Namespace, out: Path, seed: int, last: dict[str, Any], *, three: bool
) -> list[dict[str, Any]]:
    """Train without faults until as many tokens and steps as ``last``; with ``three``, go on with three replicas."""
    with Run(lab, out, seed, args.policy) as run:
        run.wait_for(_SETTLING, HOSTS)
        while any(run.last()[by] < last[by] for by in ("tokens", "step")):
            run.watch(1.0)
        if three:
            run.begin("kill", run.hosts[0])
            run.watch(_THREE_SECONDS)
        return committed(run)


def disturbed(lab: Lab, args: argparse.Namespace, out: Path) -> tuple[Run, float]:
    """Train with a fault in each period; return the run, and when the faults began."""
    with Run(lab, out, 1, args.policy) as run:
        run.wait_for(4 * _SETTLING, HOSTS)
        began = time.time()
        faults, hosts = itertools.cycle(FAULTS), itertools.cycle(run.hosts[: HOSTS - 1])
        for number in range(round(args.seconds / args.period)):
            fault, host = next(faults), next(hosts)
            if number and number % len(FAULTS) == 0:
                host = next(hosts)  # another fault than last time
            run.watch(args.period / 6)
            run.begin(fault, host)
            run.watch(args.period / 3)
            run.mend(fault, host)
            run.wait_back(host)
            run.watch(args.period / 2)
            print(
                f"{time.time() - began:5.0f} s: {fault} of host {host.number}, {run.last()['tokens']:,} tokens",
                flush=True,
            )
        return run, began


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run all, and check it.

    Raises:
        FailedError: a run is not as it must be.
    """
    with Lab(HOSTS + 1, args.rate, kind="namespaces") as lab:
        run, began = disturbed(lab, args, args.out / "disturbed")
        steps = committed(run)
        end, tokens = steps[-1]["time"], steps[-1]["tokens"]
        print(f"undisturbed: {tokens:,} tokens, {steps[-1]['step']:,} steps", flush=True)
        first = undisturbed(lab, args, args.out / "undisturbed-1", 1, steps[-1], three=True)
        second = undisturbed(lab, args, args.out / "undisturbed-2", 2, steps[-1], three=False)
    speeds = {
        HOSTS: statistics.mean([speed(first, HOSTS), speed(second, HOSTS)]),
        HOSTS - 1: speed(first, HOSTS - 1),
    }
    spans = list(present(run, began, end, args.period))
    of = Speeds(steps, began, args.period)
    wanted = sum((last - start) * of.of(count, start) for start, last, count in spans)
    done = tokens - max(step["tokens"] for step in steps if step["time"] <= began)
    losses = [
        {by: means(these, by, steps[-1][by]) for by in ("tokens", "step")} for these in (steps, first, second)
    ]
    spread = check_losses(*losses)
    record = {
        "rate": args.rate,
        "policy": args.policy,
        "hosts": HOSTS,
        "seconds": round(end - began, 1),
        "faults": [
            {k: round(v - began, 2) if isinstance(v, float) else v for k, v in f.items()} for f in run.faults
        ],
        "tokens": done,
        "tokens_per_s": round(done / (end - began), 1),
        "undisturbed_tokens_per_s": {str(count): round(value, 1) for count, value in speeds.items()},
        "of_undisturbed": round(done / wanted, 4),
        "losses": dict(zip(("disturbed", "undisturbed", "undisturbed, another seed"), losses, strict=True)),
        "spread": round(spread, 4),
        "steps": len(steps),
        "same_bits": sum(step["committed_by"] > 1 for step in steps),
        **flat(run.samples),
        "curve": curve(steps, began),
        "undisturbed_curve": curve(first, first[0]["time"]),
    }
    if record["of_undisturbed"] < LEAST:
        raise FailedError(
            f"tokens/s are {record['of_undisturbed']} of what the replicas do undisturbed: {record}"
        )
    return record


def curve(steps: list[dict[str, Any]], began: float, seconds: float = 1.0) -> list[list[float]]:
    """Return time in seconds, tokens, replicas and mean loss of the steps committed in each second that had some."""
    found = []
    for second, group in itertools.groupby(steps, lambda step: int((step["time"] - began) // seconds)):
        these = list(group)
        loss = statistics.mean(step["loss"] for step in these)
        found.append([second * seconds, these[-1]["tokens"], these[-1]["replicas"], round(loss, 4)])
    return found


def main() -> int:
    """Read the command line; return 1 if a run is not as it must be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0, help="of the run with faults (default: 600)")
    parser.add_argument(
        "--period", type=float, default=60.0, help="seconds from fault to fault (default: 60)"
    )
    parser.add_argument("--rate", default="200mbit", help="of the hosts' links (default: 200mbit)")
    parser.add_argument("--policy", default="hybrid", help="policy of the replicas (default: hybrid)")
    parser.add_argument("--out", type=Path, default=Path(time.strftime("runs/members-%Y-%m-%d-%H%M%S")))
    parser.add_argument("--json", type=Path, help="file of the results")
    args = parser.parse_args()
    if args.seconds < args.period:
        parser.error(f"--seconds ({args.seconds:g}) must be at least --period ({args.period:g})")
    try:
        record = measure(args)
    except FailedError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    if args.json is not None:
        write(args.json, record, "namespaces")
    shown = (
        "seconds",
        "tokens_per_s",
        "undisturbed_tokens_per_s",
        "of_undisturbed",
        "spread",
        "steps",
        "same_bits",
    )
    for name in (*shown, "memory_kib", "descriptors", "losses"):
        print(f"{name}: {record[name]}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
