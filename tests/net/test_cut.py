"""A link is cut for five seconds: an operation with a longer timeout completes with right data, another one raises."""

import subprocess
import time
from pathlib import Path

import pytest

from hybridcomp.net import Lab

pytestmark = pytest.mark.timeout(90)
PROGRAM = str(Path(__file__).with_name("rank_lost.py"))
CUT_SECONDS = 5.0


@pytest.mark.lab
@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize(("timeout", "outcome"), [("60", "right"), ("3", "raised")])
def test_a_link_that_is_cut_and_restored(timeout: str, outcome: str) -> None:
    with Lab(3, "200mbit", kind="namespaces") as lab:
        ranks = lab.popen(
            ["python", PROGRAM, "cut", timeout],
            1,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            assert ranks.stdout is not None
            first = [ranks.stdout.readline() for _ in range(3)]
            assert first == ["started\n"] * 3, first
            time.sleep(0.1)
            subprocess.run(lab.host_command(2, ["ip", "link", "set", "eth0", "down"]), check=True)
            time.sleep(CUT_SECONDS)
            subprocess.run(lab.host_command(2, ["ip", "link", "set", "eth0", "up"]), check=True)
            said, _ = ranks.communicate(timeout=60)
        finally:
            ranks.kill()
            ranks.wait()
            if ranks.stdout is not None:
                ranks.stdout.close()
    lines = [line for line in said.splitlines() if line.startswith(("right", "raised", "WRONG"))]
    assert [line.split()[0] for line in lines] == [outcome] * 3, said
    if timeout == "3":
        assert all("all_reduce number 2 on axis 'dp'" in line for line in lines), said
