"""The profile of a step: which part a frame or a sample belongs to, its arithmetic, its page."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.stepprofile import figures, parts, perf, tables
from benchmarks.stepprofile.parts import Place, part_of_code, part_of_sample
from benchmarks.stepprofile.records import RankRecord
from benchmarks.stepprofile.sampler import Sampler

ROOT = Path(__file__).parents[2]
SITE = "/home/u/hybridcomp/.venv/lib/python3.11/site-packages"
KERNEL = "[kernel.kallsyms]"


@pytest.mark.parametrize(
    ("path", "function", "part"),
    [
        ("/home/u/hybridcomp/hybridcomp_lab/train/model/gpt.py", "forward", parts.MODEL),
        ("/home/u/hybridcomp/hybridcomp_lab/train/parallel/tensor_parallel.py", "backward", parts.MODEL),
        ("/home/u/hybridcomp/hybridcomp_lab/train/parallel/exchange.py", "__init__", parts.TRAINER),
        ("/home/u/hybridcomp/hybridcomp_lab/train/parallel/exchange.py", "wait", parts.WAIT),
        ("/home/u/hybridcomp/hybridcomp_lab/train/trainer.py", "_train_step", parts.TRAINER),
        ("/home/u/hybridcomp/hybridcomp_lab/train/optimizer/update.py", "step", parts.OPTIMIZER),
        ("/home/u/hybridcomp/hybridcomp/torch/backend/process_group.py", "allreduce", parts.GROUP),
        ("/home/u/hybridcomp/hybridcomp/torch/backend/work.py", "wait", parts.WAIT),
        ("/home/u/hybridcomp/hybridcomp/torch/backend/work.py", "__init__", parts.COLLECTIVES),
        ("/home/u/hybridcomp/hybridcomp/torch/hook/state.py", "__call__", parts.DDP),
        ("/home/u/hybridcomp/hybridcomp/collectives/operations/fast_path.py", "_await", parts.WAIT),
        ("/home/u/hybridcomp/hybridcomp/collectives/starting.py", "start", parts.COLLECTIVES),
        (f"{SITE}/torch/autograd/graph.py", "_engine_run_backward", parts.AUTOGRAD),
        (f"{SITE}/torch/distributed/pipelining/schedules.py", "_step_microbatches", parts.PIPELINE),
        (f"{SITE}/torch/distributed/pipelining/schedules.py", "_wait_batch_p2p", parts.WAIT),
        (f"{SITE}/torch/distributed/distributed_c10d.py", "all_reduce", parts.GROUP),
        (f"{SITE}/torch/nn/parallel/distributed.py", "forward", parts.DDP),
        (f"{SITE}/torch/nn/modules/linear.py", "forward", None),
        ("/usr/lib/python3.11/threading.py", "wait", None),
    ],
)
def test_frames(path, function, part):
    assert part_of_code(path, function) == part


@pytest.mark.parametrize(
    ("pid", "stack", "part"),
    [
        (7, [("mkl_blas_avx512_sgemm", f"{SITE}/torch/lib/libtorch_cpu.so")], parts.TORCH),
        (7, [("gloo::transport::tcp::Pair::write", f"{SITE}/torch/lib/libtorch_cpu.so")], parts.GLOO),
        (7, [("[unknown]", "/tmp/perf-7.map")], parts.TORCH),
        (7, [("_PyEval_EvalFrameDefault", "/usr/lib/libpython3.11.so.1.0")], parts.PYTHON),
        (7, [("PyObject_Call", "/usr/bin/python3.11")], parts.PYTHON),
        (
            7,
            [("take", f"{SITE}/numpy/_core/_multiarray_umath.cpython-311-x86_64-linux-gnu.so")],
            parts.PYTHON,
        ),
        (7, [("MPI_Test", "/home/u/.venv/lib/libmpi.so.12")], parts.MPI),
        (7, [("[unknown]", f"{SITE}/mpi4py/MPI.cpython-311-x86_64-linux-gnu.so")], parts.MPI),
        (7, [("[unknown]", f"{SITE}/hybridcomp/_kernels.cpython-311-x86_64-linux-gnu.so")], parts.KERNELS),
        (7, [("__memmove_avx512", "/usr/lib/x86_64-linux-gnu/libc.so.6")], parts.LIBC),
        (7, [("[unknown]", "/opt/strange.so")], parts.UNKNOWN),
        (7, [], parts.UNKNOWN),
        (
            7,
            [("_copy_from_iter", KERNEL), ("tcp_sendmsg_locked", KERNEL), ("do_syscall_64", KERNEL)],
            parts.NETWORK,
        ),
        (7, [("do_sched_yield", KERNEL), ("__x64_sys_sched_yield", KERNEL)], parts.SWITCHING),
        (
            7,
            [("clear_page", KERNEL), ("do_anonymous_page", KERNEL), ("exc_page_fault", KERNEL)],
            parts.KERNEL,
        ),
        # A process's own functions are no functions of the kernel, whatever their names.
        (7, [("clear_page", KERNEL), ("tcp_sendmsg", "/opt/a.so")], parts.KERNEL),
        (9, [("veth_xmit", KERNEL), ("__dev_queue_xmit", KERNEL)], parts.NETWORK),
        (0, [("tbf_dequeue", "[sch_tbf]"), ("net_tx_action", KERNEL)], parts.NETWORK),
        (0, [("default_idle", KERNEL)], parts.IDLE),
        (9, [("main", "/usr/bin/cc1plus")], parts.OTHERS),
    ],
)
def test_samples(pid, stack, part):
    assert part_of_sample(pid, [Place(*place) for place in stack], frozenset({7, 8})) == part


PERF = """\
    7   100.500000:    1001001 
\tffffffff81bdde2d _copy_to_iter ([kernel.kallsyms])
\tffffffff81633c39 tcp_recvmsg (some, arguments) ([kernel.kallsyms])
\t          7fc3b8 __libc_recv (/usr/lib/libc.so.6)

    0   100.501001:    1001001 
\tffffffff81bdde2d default_idle ([kernel.kallsyms])

    7   100.502002:    1001001 
    8   200.000000:    1001001 
\t          7fc3b8 at::native::add(at::Tensor const&) (/x/torch/lib/libtorch_cpu.so)
"""  # noqa: W291  (as perf prints it)


def test_perfs_lines_are_read():
    samples = list(perf.read(PERF.splitlines(keepends=True)))
    assert [(one.pid, one.time, len(one.stack)) for one in samples] == [
        (7, 100.5, 3),
        (0, 100.501001, 1),
        (7, 100.502002, 0),
        (8, 200.0, 1),
    ]
    assert samples[0].stack[1] == Place("tcp_recvmsg (some, arguments)", KERNEL)
    by_part, places = perf.by_part(samples, frozenset({7, 8}), 100, 101)
    assert by_part == pytest.approx(
        {parts.NETWORK: 1001001e-9, parts.IDLE: 1001001e-9, parts.UNKNOWN: 1001001e-9}
    )
    assert list(places) == [(parts.NETWORK, "_copy_to_iter ([kernel.kallsyms])")]


def test_missing_perf_is_named(monkeypatch):
    monkeypatch.setattr(perf.shutil, "which", lambda _: None)
    monkeypatch.setattr(perf.os, "access", lambda *_: False)
    with pytest.raises(perf.PerfError, match="/usr/bin/perf"):
        perf.find_perf()


def spin(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def rest(seconds):
    time.sleep(seconds)


def test_sampler_charges_all_time():
    """The sampler runs in a process of its own, for it takes a signal and the main thread."""
    program = "from tests.benchmarks.test_step_profile import sample; sample()"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    seconds, wall, spun, rested, count = json.loads(done.stdout)
    assert wall == pytest.approx(
        seconds, rel=0.1, abs=0.05
    )  # a busy machine may stop it between the two clocks
    assert spun["core"] > 0.2
    assert rested["wall"] > 0.3
    assert rested["wall"] - rested["core"] - rested["ready"] > 0.1
    assert count > 5


def sample():
    sampler = Sampler(lambda _, name: name if name in ("spin", "rest") else None)
    sampler.start(25)  # seldom: on a busy machine each sample of a sleep waits for a core
    began = time.perf_counter()
    spin(0.3)
    rest(0.4)
    sampler.stop()
    seconds = time.perf_counter() - began
    wall = sum(times.wall for times in sampler.parts.values())
    records = [
        {key: getattr(sampler.parts[name], key) for key in ("wall", "core", "ready")}
        for name in ("spin", "rest")
    ]
    print(json.dumps([seconds, wall, *records, sampler.count]))


def result(scale=1.0):
    """Return the figures of two ranks that did 10 steps of 100 ms on two cores."""
    records = [
        RankRecord(
            rank=rank,
            pid=7 + rank,
            plain_seconds=0.9,
            plain_core=0.5,
            began=100.0,
            ended=101.0,
            samples=250,
            other_threads=0.05,
            parts={
                parts.MODEL: {"wall": 0.6 * scale, "core": 0.4, "ready": 0.1},
                parts.WAIT: {"wall": 0.4 * scale, "core": 0.1, "ready": 0.0},
            },
            places=[[parts.MODEL, "gpt.py:forward", 0.6], [parts.WAIT, "work.py:wait", 0.4]],
        )
        for rank in range(2)
    ]
    variant = {
        "name": "none",
        "steps": 10,
        **figures.of_plain_steps(records, 10, 2048),
        **figures.of_main_threads(records, 10),
        **figures.of_cores({parts.TORCH: 1.0, parts.IDLE: 0.9}, {(parts.TORCH, "add"): 1.0}, 2.0, 10),
    }
    machine = {"processor": "a processor, 2 cores for this process"}
    return {
        "machine": machine,
        "cores": 2,
        "ranks": 2,
        "rate": "1gbit",
        "variants": [variant, {**variant, "name": "gloo"}],
    }


def rows(text):
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return {line[0]: line[1:] for line in lines}


def test_figures():
    variants = result()["variants"]
    assert rows(tables.steps(variants))["gloo"] == ["22,756", "90.0", "100.0", "100.0", "110.0"]
    main = rows(tables.main_thread(variants))
    assert main[parts.MODEL] == ["60.0", "40.0"] * 2
    assert main["sum"] == ["100.0", "50.0"] * 2
    assert main["of it ready, but without a core"] == ["10.0", ""] * 2
    assert main["of it waiting"] == ["40.0", ""] * 2
    assert main["the rank's other threads"] == ["", "5.0"] * 2
    assert parts.OPTIMIZER not in main
    cores = rows(tables.processor(variants))
    assert cores["sum"] == ["200.0"] * 2  # what perf lost is shared out
    assert cores[parts.TORCH] == [f"{200 / 1.9:.1f}"] * 2
    assert variants[0]["perf_sampled"] == 0.95
    assert "gpt.py:forward" in tables.places(variants[0])
    with pytest.raises(ValueError, match="nothing"):
        figures.of_cores({}, {}, 2.0, 10)


def test_page(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "pages"))
    writer = importlib.import_module("step_profile_doc")
    text = writer.written(result())
    assert "10 steps of 2 ranks, links at 1gbit:" in text
    assert (
        "*Measured: a processor, 2 cores for this process; commit, date, instruction set, load not recorded.*"
        in text
    )
    assert text.count("| sum") == 2
    page = (ROOT / "docs" / "study.md").read_text(encoding="utf-8")
    assert "<!-- STEP: written by benchmarks/pages/step_profile_doc.py -->" in page
    assert "<!-- END STEP -->" in page
    with pytest.raises(ValueError, match="main threads'"):
        writer.written(result(scale=1.1))
