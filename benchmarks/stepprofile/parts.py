"""Assign a frame of Python's stack, or a sample of perf's, to a part of a step."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

MODEL, AUTOGRAD, OPTIMIZER = "model, forward", "autograd", "optimizer"
PIPELINE, TRAINER = "PyTorch's pipeline schedule", "trainer's own Python"
GROUP, DDP, COLLECTIVES, WAIT = "process group", "DDP and its hook", "collectives and engine", "waits"
ELSEWHERE = "elsewhere"
MAIN_THREAD = (MODEL, AUTOGRAD, OPTIMIZER, PIPELINE, TRAINER, GROUP, DDP, COLLECTIVES, WAIT, ELSEWHERE)
"""Parts of the main thread's time, in the order of the tables."""

# The first pattern found in a path gives the part. Code that matches none, such as torch.nn, counts for its caller.
_MODULES = tuple(
    (re.compile(pattern), part)
    for pattern, part in (
        (r"/hybridcomp_lab/train/model/", MODEL),
        (r"/hybridcomp_lab/train/parallel/exchange\.py", TRAINER),
        (r"/hybridcomp_lab/train/parallel/", MODEL),  # layers split over tp
        (r"/hybridcomp_lab/train/optimizer/", OPTIMIZER),
        (r"/hybridcomp_lab/train/", TRAINER),
        (r"/hybridcomp/torch/hook/", DDP),
        (r"/hybridcomp/torch/exchange/", COLLECTIVES),
        (r"/hybridcomp/torch/", GROUP),
        (r"/hybridcomp/((collectives|codecs|policy|perfmodel|schedules)/|\w+\.py$)", COLLECTIVES),
        (r"/torch/autograd/", AUTOGRAD),
        (r"/torch/optim/", OPTIMIZER),
        (r"/torch/distributed/pipelining/", PIPELINE),
        (r"/torch/distributed/algorithms/", DDP),
        (r"/torch/distributed/", GROUP),
        (r"/torch/nn/parallel/", DDP),
    )
)
# Functions that are charged the time of native code before them: the engine's calls return without Python looking for
# signals, which it does when it enters the next function.
_AFTER = {("/hybridcomp/torch/backend/work.py", "__init__"): COLLECTIVES}
_WAITS = ("wait", "await")


def part_of_code(path: str, function: str) -> str | None:
    """Return the part that a function's code belongs to, or None for code that counts for its caller."""
    for (mark, name), part in _AFTER.items():
        if name == function and mark in path:
            return part
    part = next((part for mark, part in _MODULES if mark.search(path)), None)
    waits = part is not None and function.lstrip("_").lower().startswith(_WAITS)
    return WAIT if waits else part


TORCH, GLOO, PYTHON, MPI = "PyTorch's native code", "gloo", "Python and NumPy", "MPI"
KERNELS, LIBC = "engine and codecs (compiled)", "C library"
NETWORK, SWITCHING, KERNEL = "kernel: TCP and network", "kernel: waiting and switching", "kernel: the rest"
UNKNOWN, OTHERS, IDLE = "other code of the ranks", "other processes", "idle"
PROCESSOR = (
    TORCH,
    GLOO,
    PYTHON,
    MPI,
    KERNELS,
    LIBC,
    NETWORK,
    SWITCHING,
    KERNEL,
    UNKNOWN,
    OTHERS,
    IDLE,
)
"""Parts of the cores' time, in the order of the tables."""

# Code without a file (perf-PID.map) is made at run time by MKL and oneDNN: nothing else in a rank makes such code.
_LIBRARIES = (
    (re.compile(r"/_kernels\.[^/]*so$"), KERNELS),
    (re.compile(r"/(libmpi|libuc[pstm]|libfabric|libpmi|libhwloc)|/mpi4py/"), MPI),
    (re.compile(r"/(libtorch|libc10|libgomp|libmkl|libopenblas|libscipy_openblas|libshm)|/torch/"), TORCH),
    (re.compile(r"/perf-\d+\.map$"), TORCH),
    (re.compile(r"/libpython|/python3?[\d.]*$|/lib-dynload/|\.cpython-[^/]*\.so$|\.abi3\.so$"), PYTHON),
    (
        re.compile(
            r"/(libc|ld-linux[^/]*|libm|libpthread|libdl|librt|libstdc\+\+|libgcc_s)[-.][^/]*so|\[vdso\]"
        ),
        LIBC,
    ),
)
# A kernel function of these anywhere on the stack decides: copies, locks and interrupts below it count for it.
_NETWORK = re.compile(
    r"_*(tcp|udp|ip|ip6|ipv6|inet6?|sock|skb|kfree_skb|consume_skb|veth|dev|netif|netdev|napi|net_rx|net_tx|sch|tbf|"
    r"qdisc|br|nf|neigh|eth|loopback|unix|arp|tasklet_tcp|sk|dst|fib|gro|validate_xmit|process_backlog)(_|$)"
    r"|_*(x64_)?sys_(send|recv|accept|connect|socket|shutdown)"
)
_SWITCHING = re.compile(
    r"_*(schedule|do_sched|sched|pick_next|finish_task_switch|try_to_wake_up|wake_up|futex|do_futex|hrtimer_nanosleep|"
    r"do_nanosleep|poll|do_poll|do_sys_poll|ep|do_epoll|eventfd|pipe|dequeue|enqueue|update_curr|ttwu|select)(_|$)"
    r"|(asm_)?sysvec_reschedule_ipi|_*(x64_)?sys_(sched|futex|poll|ppoll|select|pselect|epoll|nanosleep|clock_nanosleep|eventfd)"
)


class Place(NamedTuple):
    """A place in code, as perf names it.

    Attributes:
        symbol: symbol of the function; ``[unknown]`` without one.
        library: path of the file it is in; ``[kernel.kallsyms]`` for the kernel's.
    """

    symbol: str
    library: str

    @property
    def in_kernel(self) -> bool:
        """Tell whether the code is the kernel's."""
        return self.library.startswith(("[kernel", "[guest.kernel")) or self.library.endswith(
            (".ko", ".ko.xz")
        )


def part_of_sample(pid: int, stack: Sequence[Place], ranks: frozenset[int]) -> str:
    """Return the part that a sample of a core belongs to.

    Args:
        pid: id of the process that the core ran; 0 where it was idle.
        stack: places on the stack, innermost first.
        ranks: process ids of the ranks.
    """
    kernel = [place.symbol for place in stack if place.in_kernel]
    # The kernel moves packets in whichever process it interrupts, so that network samples of all processes count.
    if any(_NETWORK.match(symbol) for symbol in kernel):
        return NETWORK
    if pid == 0:
        return IDLE
    if pid not in ranks:
        return OTHERS
    if kernel:
        return SWITCHING if any(_SWITCHING.match(symbol) for symbol in kernel) else KERNEL
    if not stack:
        return UNKNOWN
    if stack[0].symbol.startswith("gloo::"):
        return GLOO
    return next((part for mark, part in _LIBRARIES if mark.search(stack[0].library)), UNKNOWN)
