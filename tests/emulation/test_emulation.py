"""The emulator itself: good kernels give the right results, and each planted fault is caught."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from tests.emulation import good
from tests.emulation.emulator import EmulationError, Emulator, checked_environment

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler"),
]


@dataclass(frozen=True)
class Fault:
    """Launch of a kernel of planted.cu, and the error that each flavour must raise."""

    kernel: str
    race: str | None  # regular expressions; None: that flavour need not see it
    checked: str | None = None
    grid: int = 1
    block: int = 32
    values: tuple[int, ...] = ()  # arguments after the buffer of 1024 bytes, which is the first
    buffers: int = 1
    shared: int = 0
    seeds: tuple[int, ...] = (0, 1, 2, 3)

    @property
    def in_checked(self) -> str:
        return (self.race if self.checked == SAME else self.checked) or ""


SAME = "the same"  # checked: as race
NAMES_LANE = r"its mask 0x[0-9a-f]{8} names lane \d+, but thread \d+ "
OVERRUN = r"ERROR: AddressSanitizer: heap-buffer-overflow"
FAULTS = (
    Fault("shared_race", r"race: it (reads|writes) shared array 'tile' \+ \d+ \(of 256 bytes\)", block=64),
    Fault("write_after_read", r"race: it (writes|reads) shared array 'tile'", block=64),
    Fault("read_by_all", r"race: it (writes|reads) shared array 'word' \+ 0", block=64),
    Fault("same_value", r"race: it writes shared array 'flag' \+ 0 .* where thread \d+ wrote", block=64),
    Fault("no_syncwarp", r"race: it (reads|writes) shared array 'tile'"),
    Fault("shuffle_is_no_fence", r"race: it reads shared array 'tile'"),
    Fault("half_syncwarp", r"race: it reads shared array 'tile'|no thread of the block has written"),
    Fault("global_race", r"race: it (reads|writes) global buffer 0 \+ \d+ \(of 1024 bytes\)", block=64),
    Fault("byte_race", r"race: it writes global buffer 0 \+ 8 .* where thread (8|9) wrote"),
    Fault("byte_against_word", r"race: it (reads|writes) global buffer 0 \+ [4-7] "),
    Fault("block_race", r"race: it writes global buffer 0 .* where thread \d+ of block \d wrote", grid=3),
    Fault("block_reads_other", r"race: it (reads|writes) global buffer 0 .* of block \d", grid=3),
    Fault("no_fence", r"race: it reads global buffer 0 .* of block \d wrote", grid=3, buffers=3),
    Fault("early_fence", r"race: it reads global buffer 0 .* of block \d wrote", grid=3, buffers=3),
    Fault("no_barrier", r"race: it reads global buffer 0 .* of block \d wrote", grid=3, block=64, buffers=3),
    Fault("mixed_atomic", r"race: it (reads|does an atomic on) global buffer 0 \+ 0 .* did an atomic|read"),
    Fault("barrier_in_branch", r"divergent barrier: it waits in __syncthreads at planted.cu:\d+", SAME, block=64),
    Fault(
        "barrier_after_return",
        r"divergent barrier: it waits in __syncthreads at .*, but thread \d+ has exited", SAME,
        block=64,
        values=(40,),
    ),
    Fault(
        "barrier_against_shuffle",
        r"__shfl_sync at .*: " + NAMES_LANE + "waits in __syncthreads", SAME,
        block=64,
    ),
    Fault("shuffle_exited", r"__shfl_down_sync at .*: " + NAMES_LANE + "has exited", SAME),
    Fault("shuffle_elsewhere", r"__shfl_sync at .*: " + NAMES_LANE + "waits in __shfl_sync at", SAME),
    Fault("shuffle_not_named", r"its mask 0x7fffffff does not name the calling lane 31", SAME),
    Fault("global_overrun", r"writes 4 bytes at global buffer 0 \+ 1024 \(of 1024 bytes\)", OVERRUN, values=(256,)),
    Fault("global_underrun", r"reads 4 bytes at global buffer 0 - 4 \(of 1024 bytes\)", OVERRUN, buffers=2),
    Fault("atomic_overrun", r"an atomic on 4 bytes at global buffer 0 \+ 1024 ", OVERRUN, values=(256,)),
    Fault("vector_overrun", r"out of bounds: it writes .* at global buffer 0 \+ 1024 ", OVERRUN, values=(256,)),
    Fault("wild", r"writes 4 bytes at address 0x40, near no global buffer", "SEGV", values=(64,)),
    Fault("shared_overrun", r"writes 4 bytes at shared array 'first' \+ 128 \(of 128 bytes\)", OVERRUN),
    Fault("dynamic_overrun", r"writes 4 bytes at shared array 'tile' \+ 128 \(of 128", OVERRUN, shared=128),
    Fault("unwritten", r"reads shared array 'tile' \+ 124 .*, which no thread of the block has written"),
    Fault("misaligned", r"misaligned: an access of 4 bytes to global buffer 0 \+ 1 ", "misaligned address"),
    Fault("overflow", None, "signed integer overflow", values=(2**31 - 9,)),
    Fault("shift", None, "shift exponent 32 is too large", values=(32,)),
    Fault("cast", None, "is outside the range of representable values", values=(0x7F800000,)),
    Fault("spins", r"does not seem to end", seeds=(0,)),
    Fault("shuffle_far", r"__shfl_down_sync at .*: it asks for 32 lanes", SAME),
    Fault("writes_module", r"out of bounds: it writes 4 bytes at address"),
    Fault("for_ever", r"does not seem to end", SAME, block=64, seeds=(0, 2)),
    Fault("waits_for_flag", r"does not seem to end", SAME, seeds=(0, 2)),
    Fault("big_shared", r"static shared arrays of 64000 bytes", SAME, seeds=(0,)),
    Fault("traps", r"__trap at planted.cu:\d+", SAME),
)  # fmt: skip
IN_MESSAGE = [f for f in FAULTS if f.checked == SAME]
BY_ABORT = [f for f in FAULTS if f.checked not in (None, SAME)]


@pytest.fixture(scope="module")
def emulator() -> Iterator[Emulator]:
    """The race flavour, its checks on."""
    if os.environ.get("HC_EMULATION_FLAVOUR", "race") != "race":
        pytest.skip("this process emulates in the other flavour")
    made = Emulator("race")
    made.checks(True)
    made.limit(1_000_000)
    yield made
    made.limit(1 << 28)
    made.checks(os.environ.get("HC_EMULATION_CHECKS", "1") != "0")


def launch(emulator: Emulator, fault: Fault, seed: int) -> None:
    """Run a kernel of planted.cu."""
    emulator.seed = seed
    with good.device(emulator) as d:
        pointers = [d.put(np.zeros(256), np.uint32)[0] for _ in range(fault.buffers)]
        arguments = [*pointers, *fault.values]
        emulator.launch("emulation_planted", fault.kernel, fault.grid, fault.block, arguments, fault.shared)


@pytest.mark.parametrize("seed", good.SEEDS)
@pytest.mark.parametrize("check", good.CHECKS, ids=lambda check: check.__name__)
def test_good(emulator: Emulator, check: Callable[..., None], seed: int) -> None:
    emulator.seed = seed
    with good.device(emulator) as d:
        check(d, np.random.default_rng(seed))


@pytest.mark.parametrize("fault", [f for f in FAULTS if f.race], ids=lambda fault: fault.kernel)
def test_fault(emulator: Emulator, fault: Fault) -> None:
    assert fault.race
    for seed in fault.seeds:
        with pytest.raises(EmulationError, match=fault.race) as caught:
            launch(emulator, fault, seed)
        assert str(caught.value).startswith(f"emulation_planted.{fault.kernel}: block ")


def test_message_says_where(emulator: Emulator) -> None:
    fault = next(f for f in FAULTS if f.kernel == "shared_race")
    with pytest.raises(EmulationError, match=r"\(planted.cu:\d+\), where thread \d+ read \(planted.cu:\d+\)"):
        launch(emulator, fault, 0)


def test_without_checks(emulator: Emulator) -> None:
    emulator.checks(False)
    try:
        for kernel in ("shared_race", "block_race", "unwritten"):
            launch(emulator, next(f for f in FAULTS if f.kernel == kernel), 0)
        with pytest.raises(EmulationError, match="divergent barrier"):
            launch(emulator, next(f for f in FAULTS if f.kernel == "barrier_in_branch"), 0)
    finally:
        emulator.checks(True)


def test_unwritten_shared_memory_varies(emulator: Emulator) -> None:
    seen = set()
    emulator.checks(False)
    try:
        for emulator.seed in range(3):
            with good.device(emulator) as d:
                address, out = d.put(np.zeros(32), np.uint32)
                emulator.launch("emulation_planted", "unwritten", 1, 32, [address])
                assert (out[:31] == 5).all()
                seen.add(int(out[31]))
    finally:
        emulator.checks(True)
    assert len(seen) == 3


def test_after_a_fault(emulator: Emulator) -> None:
    for seed in (0, 7):
        with pytest.raises(EmulationError):
            launch(emulator, next(f for f in FAULTS if f.kernel == "barrier_after_return"), seed)
        with good.device(emulator) as d:
            good.scan(d, np.random.default_rng(seed))


def test_refusals(emulator: Emulator) -> None:
    for block in (0, 31, 1056):
        with pytest.raises(EmulationError, match=f"scan: .*({block} threads|empty)"):
            emulator.launch("emulation_good", "scan", 1, block, [0])
    with pytest.raises(EmulationError, match="traps: 64 threads, but it is bounded to 32"):
        emulator.launch("emulation_planted", "traps", 1, 64, [0])
    with pytest.raises(EmulationError, match="over 20 arguments"):
        emulator.launch("emulation_planted", "traps", 1, 32, [0] * 21)
    with pytest.raises(EmulationError, match="no kernel absent"):
        emulator.launch("emulation_planted", "absent", 1, 32, [])
    with pytest.raises(EmulationError, match="could not build hc_absent"):
        emulator.launch("absent", "absent", 1, 32, [])
    with pytest.raises(EmulationError, match="checked_environment"):
        Emulator("checked")
    with pytest.raises(ValueError, match="flavour"):
        Emulator("fast")


def test_registered_memory(emulator: Emulator) -> None:
    words = np.zeros(256, np.uint32)
    fault = next(f for f in FAULTS if f.kernel == "global_overrun")
    stray = "it writes 4 bytes at .*(near no global buffer|a global buffer that is no argument)"  # another's is near
    with pytest.raises(EmulationError, match=stray):
        emulator.launch("emulation_planted", fault.kernel, 1, 32, [words.ctypes.data, 255])
    emulator.register(words.ctypes.data, words.nbytes, "words")
    try:
        emulator.launch("emulation_planted", fault.kernel, 1, 32, [words.ctypes.data, 255])
        with pytest.raises(EmulationError, match=r"global buffer 'words' \+ 1024"):
            emulator.launch("emulation_planted", fault.kernel, 1, 32, [words.ctypes.data, 256])
    finally:
        emulator.unregister(words.ctypes.data)
    assert words[224:].all()


def run_checked(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module where the checked flavour can be loaded."""
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        env=checked_environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.long
def test_good_checked() -> None:
    done = run_checked("tests.emulation.good", "checked")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "60 checks passed" in done.stdout


def test_messages_checked() -> None:
    done = run_checked("tests.emulation.test_emulation", *[fault.kernel for fault in IN_MESSAGE])
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == len(IN_MESSAGE)
    for line, fault in zip(done.stdout.splitlines(), IN_MESSAGE, strict=True):
        assert re.search(fault.in_checked, line), line


@pytest.mark.parametrize("fault", BY_ABORT, ids=lambda fault: fault.kernel)
def test_abort_checked(fault: Fault) -> None:
    done = run_checked("tests.emulation.test_emulation", fault.kernel)
    assert done.returncode != 0
    assert re.search(fault.in_checked, done.stderr), done.stdout + done.stderr
    assert "planted.cu" in done.stderr
    assert f"emulation: emulation_planted.{fault.kernel}: block 0, thread " in done.stderr


def main(kernels: list[str]) -> None:
    """Launch faulty kernels in the checked flavour, and print what is said of them."""
    emulator = Emulator("checked")
    emulator.limit(100_000)
    for fault in (f for f in FAULTS if f.kernel in kernels):
        try:
            launch(emulator, fault, fault.seeds[-1])
            print(f"{fault.kernel}: nothing")
        except EmulationError as error:
            print(error)


if __name__ == "__main__":
    main(sys.argv[1:])
