"""The page "Write your own", followed line by line; the package of examples/own_package, by every way to name it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from hybridcomp.launcher import find_mpiexec
from tests.outside import EXAMPLE, ROOT
from tests.train.harness import TINY, environment

PAGE = (ROOT / "docs" / "write-your-own.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)
TOML, ALGORITHM_TOML = (text for kind, text in BLOCKS if kind == "toml")
CODEC, PLAIN, TEST, _ = (text for kind, text in BLOCKS if kind == "python")
(LINES,) = (text.splitlines() for kind, text in BLOCKS if kind == "sh")
POLICY = """codec = "example.ternary:block=64"
algorithm = "example.star"

[dp]
all_reduce = { codec = "example.ternary:block=64", feedback = "ef", algorithm = "example.star" }
"""


PROGRAM = """
import numpy as np, torch, torch.distributed as dist
from mpi4py import MPI
from torch.nn.parallel import DistributedDataParallel
import hybridcomp as hc, hybridcomp.torch as hct

def say(way, rows):
    (codec,) = {row.codec for row in rows if row.op == "all_reduce" and row.raw_bytes > 200000}
    print(f"{way} {codec}\\n", end="", flush=True)  # ranks write at the same time

dist.init_process_group("hybridcomp")
model = DistributedDataParallel(torch.nn.Linear(256, 256))
model(torch.ones(4, 256)).sum().backward()
say("hook", hct.stats())
hct.reset_stats()
dist.all_reduce(torch.ones(70000))
say("backend", hct.stats())
comm = hc.Communicator(MPI.COMM_WORLD, "policy.toml", "dp")
comm.Allreduce(np.ones(70000, "f4"), np.empty(70000, "f4"))
say("communicator", comm.stats())
comm = hc.Communicator(MPI.COMM_WORLD, "auto:dp=aggressive,also=example.ternary", "dp")
for _ in range(30):
    x = np.random.default_rng(comm.rank).standard_normal(70000).astype("f4")
    comm.Allreduce(MPI.IN_PLACE, x, name="weight")
assert len(set(comm.allgather(x.tobytes()))) == 1
print("auto: alike\\n", end="", flush=True)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Install the page's package and the example's with pip into a folder of their own; return that folder."""
    folder = tmp_path_factory.mktemp("site")
    page = tmp_path_factory.mktemp("page")
    (page / "pyproject.toml").write_text(TOML)
    (page / "acme_codecs.py").write_text(CODEC)
    shutil.copytree(EXAMPLE, page / "example")  # pip leaves its builds beside the sources
    how = ("install", "-q", "--no-deps", "--no-build-isolation", "--target", str(folder))
    assert LINES[0] == "pip install ."
    for source in (page, page / "example"):
        subprocess.run([sys.executable, "-m", "pip", *how, str(source)], check=True, timeout=120, cwd=page)
    return folder


def with_site(site: Path) -> Mapping[str, str]:
    """Return an environment with those packages."""
    bare = environment()
    programs = os.pathsep.join([str(Path(sys.executable).parent), bare["PATH"]])
    return {**bare, "PYTHONPATH": os.pathsep.join([str(site), bare["PYTHONPATH"]]), "PATH": programs}


def started(site: Path, *command: str, cwd: Path) -> str:
    """Run a command; return what it wrote."""
    done = subprocess.run(
        command, env=with_site(site), cwd=cwd, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_page_s_lines_run(site, tmp_path):
    said = [
        started(site, "sh", "-c", line, cwd=tmp_path) for line in LINES if not line.startswith("pip install")
    ]
    assert said[0] == "", "the checks warn"
    assert said[1] == "2032\n"
    assert said[2].count("('acme-codecs 1.0',)") == 2


def test_the_page_s_other_codec_passes_the_checks(site, tmp_path):
    (tmp_path / "plain.py").write_text(
        PLAIN + "from hybridcomp.testing import check_codec\ncheck_codec('acme.plain')\n"
    )
    assert started(site, sys.executable, "plain.py", cwd=tmp_path) == ""


def test_the_page_s_test_runs(site, tmp_path):
    (tmp_path / "test_own.py").write_text(TEST)
    how = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_own.py")
    assert "22 passed" in started(site, sys.executable, *how, cwd=tmp_path)


def test_the_page_names_groups_that_are_read():
    assert re.findall(r'entry-points\."([\w.]+)"', TOML + ALGORITHM_TOML) == [
        "hybridcomp.codecs",
        "hybridcomp.algorithms",
    ]


def test_benchmarks_take_both(site, tmp_path):
    program = str(ROOT / "benchmarks" / "allreduce.py")
    how = ("--codec", "example.ternary", "--algorithm", "example.star", "--size", "256K", "--iters", "1")
    said = started(site, find_mpiexec(), "-n", "2", sys.executable, program, *how, cwd=tmp_path)
    assert re.search(r"262144 .*example\.ternary", said), said


def test_codecs_are_measured(site, tmp_path):
    program = str(ROOT / "benchmarks" / "codecs.py")
    said = started(
        site,
        sys.executable,
        program,
        "--quick",
        "--codec",
        "example.ternary",
        "--elements",
        "10000",
        cwd=tmp_path,
    )
    assert "example.ternary" in said


def test_a_program_takes_it_from_the_command(site, tmp_path):
    """Backend, hook and communicators, by a policy's TOML."""
    (tmp_path / "policy.toml").write_text(POLICY)
    (tmp_path / "program.py").write_text(PROGRAM)
    how = ("-m", "hybridcomp", "run", "-n", "2", "--policy", "policy.toml", "--hook", "--")
    said = started(site, sys.executable, *how, sys.executable, "program.py", cwd=tmp_path)
    for way in ("hook", "backend", "communicator"):
        assert said.count(f"{way} example.ternary:block=64\n") == 2, said
    assert said.count("auto: alike") == 2, said


@pytest.mark.long
def test_the_hook_on_gloo_takes_it(site, tmp_path):
    (tmp_path / "policy.toml").write_text(POLICY)
    program = str(ROOT / "examples" / "torchrun_hook.py")
    how = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", program)
    said = started(site, sys.executable, *how, "--policy", "policy.toml", "--steps", "3", cwd=tmp_path)
    assert re.search(r"dp +all_reduce +example\.ternary", said), said


@pytest.mark.long
def test_the_trainer_takes_it(site, tmp_path):
    (tmp_path / "policy.toml").write_text(POLICY)
    how = f"{TINY} --dp 2 --steps 2 --out run --policy policy.toml"
    said = started(site, sys.executable, "-m", "hybridcomp", "train", *how.split(), cwd=tmp_path)
    assert re.search(r"dp +all_reduce +example\.ternary:block=64", said), said
