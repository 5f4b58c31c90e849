"""``hybridcomp doctor`` as a user runs it: alone, under mpiexec, and with something wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import hybridcomp
from hybridcomp import native
from hybridcomp.cli import doctor, inspection
from hybridcomp.cli.main import main
from hybridcomp.collectives.engine import groups
from hybridcomp.errors import NativeUnavailableError
from hybridcomp.launcher import find_mpiexec
from hybridcomp.perfmodel import BUILT_IN, Tier, load_profile
from hybridcomp.perfmodel.curves import OPERATIONS
from hybridcomp_lab.planner.compute import Work
from hybridcomp_lab.planner.site import read_site


def run(ranks, *arguments, **environment):
    """Run it on so many ranks."""
    command = [sys.executable, "-m", "hybridcomp", "doctor", "--quick", *map(str, arguments)]
    if ranks > 1:
        command = [find_mpiexec(), "-n", str(ranks), *command]
    env = {**os.environ, "COLUMNS": "200", **environment}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=90, check=False, stdin=subprocess.DEVNULL, env=env
    )


def test_alone_it_tells_what_there_is(tmp_path):
    done = run(1, "--json", tmp_path / "found.json", XDG_CONFIG_HOME=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["usable"] is True
    assert found["problems"] == []
    assert found["versions"]["hybridcomp"] == hybridcomp.__version__
    assert found["versions"]["Python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["MPI"]["ranks"] == "1 on 1 host"
    assert found["kernels"]["instruction set"].startswith(native.kernels().isa())
    assert found["profile"]["file"] == "built-in"
    assert set(found["speeds"]) == {"memcpy", "int8", "int4", "topk:ratio=0.01"}
    for row in found["speeds"].values():
        assert row["encode_gb_s"] / row["encode_ratio"] == pytest.approx(
            found["speeds"]["memcpy"]["encode_gb_s"]
        )
    for section in ("versions", "kernels", "MPI", "GPU", "profile"):
        for name, value in found[section].items():
            assert name in done.stdout
            assert value[:20] in done.stdout


def test_two_ranks_calibrate_what_they_can(tmp_path):
    network = Tier(1.0, 42.0)
    old, new = tmp_path / "old.toml", tmp_path / "new.toml"
    old.write_text("version = 1\n[network]\nlatency = 1.0\nbandwidth = 42.0\n")
    done = run(2, "--calibrate", "--out", new, HYBRIDCOMP_PROFILE=str(old))
    assert (done.returncode, done.stderr) == (0, "")
    assert f"all ranks are on one host: [network] stays as in {old}" in done.stdout.replace("\n", " ")
    assert done.stdout.count("versions") == 1  # one rank speaks
    profile = load_profile(new)
    assert profile.network == network
    assert profile.host != BUILT_IN.host
    measured = {spec for spec, speed in profile.codecs.items() if speed != BUILT_IN.codecs.get(spec)}
    assert {"int8:block=128", "none", "topk:ratio=0.01:values=none", "default"} <= measured
    assert profile.codecs["int8:block=128"].size == pytest.approx(33 / 128, rel=1e-3)
    assert (profile.mpi.hosts, profile.mpi.ranks) == (1, 2)
    assert set(profile.mpi.of) <= set(OPERATIONS)
    assert f"MPI's {min(profile.mpi.of)}" in done.stdout
    assert "of other sizes" in done.stdout
    compute = read_site(str(new), 1, 2).compute
    for layer in (Work("mlp", flops=1e9, bytes=1e7), Work("mlp", "backward", flops=2e9, bytes=2e7)):
        assert 1e-3 < compute.seconds(layer) < 10  # 1 Tflop/s at most: the tests' machines have a few cores


def test_one_rank_calibrates_codecs_alone_and_replaces_a_broken_profile(tmp_path, monkeypatch, capsys):
    path = tmp_path / "profile.toml"
    path.write_text("version = 3")
    monkeypatch.setenv("HYBRIDCOMP_PROFILE", str(path))
    assert main(["doctor", "--quick", "--calibrate"]) == 0
    assert "no two ranks share a host: [host] stays as in built-in" in capsys.readouterr().out
    profile = load_profile(path)
    assert (profile.host, profile.network) == (BUILT_IN.host, BUILT_IN.network)
    assert profile.codecs != BUILT_IN.codecs


def test_a_broken_profile_is_a_problem_and_the_exit_code_says_so(tmp_path):
    path = tmp_path / "profile.toml"
    path.write_text("version = 1\nmemory = -1")
    done = run(2, HYBRIDCOMP_PROFILE=str(path))
    assert done.returncode == 1
    assert done.stdout.count("problem: profile") == 1
    assert "memory must be a number from 1e-12 to 1e+18, not -1" in done.stdout.replace("\n", " ")


def test_a_file_that_cannot_be_written_ends_all_ranks():
    done = run(2, "--json", "/proc/nothing/found.json")
    assert done.returncode == 2
    assert "hybridcomp doctor: error: cannot write" in done.stderr
    assert done.stderr.count("error") == 1


def test_without_kernels_it_says_so(monkeypatch, capsys, tmp_path):
    def missing():
        raise NativeUnavailableError("the compiled kernels are missing")

    monkeypatch.setattr(inspection.native, "kernels", missing)
    monkeypatch.setattr(groups, "_made_arena", groups._made_arena.__wrapped__)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert doctor.main(["--quick", "--calibrate"]) == 1
    out = capsys.readouterr().out
    assert "problem: the compiled kernels are missing" in out
    assert "Nothing was calibrated" in out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("without", [0, 1])
def test_without_kernels_on_one_rank_it_says_so(without):
    program = (
        "import sys\nfrom mpi4py import MPI\n"
        f"if MPI.COMM_WORLD.rank == {without}:\n"
        "    sys.modules['hybridcomp._kernels'] = None\n"
        "from hybridcomp.cli.main import main\n"
        "sys.exit(main(['doctor', '--quick']))"
    )
    command = [find_mpiexec(), "-n", "2", sys.executable, "-c", program]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert done.returncode == 1, f"{done.stdout}{done.stderr}"
    problem = "the compiled kernels are missing" if without == 0 else "on every rank (not on 1): run doctor"
    assert done.stdout.count("problem: ") == done.stdout.count(problem) == 1, done.stdout
