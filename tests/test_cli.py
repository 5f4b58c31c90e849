"""The ``hybridcomp`` command and ``hybridcomp lab``."""

import os
import subprocess
import sys

import pytest

import hybridcomp
from hybridcomp.cli.main import COMMANDS, main


def run(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hybridcomp", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    for name, text in COMMANDS.items():
        assert f"{name:<9}{text}" in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"hybridcomp {hybridcomp.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["nonsense"]])
def test_no_such_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--help"], ["lab", "--help"], ["demo", "--help"], ["doctor", "--help"], ["top", "--help"]]
)
def test_help_is_quick_and_loads_no_torch_and_no_mpi(arguments: list[str]) -> None:
    program = (
        "import sys\nfrom hybridcomp.cli.main import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'mpi4py.MPI', 'matplotlib', 'cupy'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "usage: hybridcomp" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lab", "--rate", "3mb", "--", "true"], "rate '3mb' is not understood"),
        (["lab", "-n", "0", "--", "true"], "1 to 128 hosts, not 0"),
        (["lab", "--ppn", "0", "--kind", "shared-memory", "--", "true"], "at least one rank"),
        (["lab", "-n", "2"], "no command to run"),
        (["lab", "--kind", "shared-memory", "--", "no-such-program"], "no program 'no-such-program'"),
        (["demo", "--steps", "3"], "at least 10 steps"),
        (["demo", "--policies", "naive,hybrid"], "must hold 'none'"),
        (["doctor", "--out", "p.toml"], "--out goes with --calibrate"),
        (["demo", "--rate", "fast"], "rate 'fast' is not understood"),
        (["run"], "no command to run"),
        (["run", "-n", "0", "--", "true"], "-n must be 1 or more, not 0"),
        (
            ["run", "--replace", "ucc", "--", "true"],
            "--replace: HYBRIDCOMP_REPLACE is 'ucc'; allowed: gloo or nccl",
        ),
        (["run", "--policy", "nonsense", "--", "true"], "unknown policy 'nonsense'"),
        (["run", "--", "train.py"], "a Python program is run by: python train.py"),
    ],
)
def test_wrong_input_is_one_line(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.environ", dict(os.environ))
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"hybridcomp {arguments[0]}: error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


class TestLab:
    def test_output_and_exit_code_are_the_commands(self) -> None:
        done = run("lab", "-n", "2", "--kind", "shared-memory", "--", "sh", "-c", "echo it; exit 7")
        assert done.returncode == 7
        assert done.stdout.count("it\n") == 2
        assert "2 hosts with 1 rank each (shared-memory)" in done.stderr
        assert "speed is not the point" in done.stderr

    def test_quiet(self) -> None:
        done = run("lab", "-n", "1", "--quiet", "--kind", "shared-memory", "echo", "--", "--rate")
        assert (done.returncode, done.stdout, done.stderr) == (0, "-- --rate\n", "")

    def test_python_and_hybridcomp_are_this_environments(self) -> None:
        shared = ("lab", "-n", "1", "--quiet", "--kind", "shared-memory", "--")
        assert (
            run(*shared, "python", "-c", "import sys; print(sys.executable)").stdout.strip() == sys.executable
        )
        assert run(*shared, "hybridcomp", "--version").stdout == f"hybridcomp {hybridcomp.__version__}\n"

    @pytest.mark.lab
    def test_across_hosts(self) -> None:
        done = run("lab", "-n", "2", "--ppn", "2", "--rate", "200mbit", "--", "hostname", "-I")
        assert done.returncode == 0, done.stderr
        if "namespaces:" in done.stderr:
            pytest.skip(done.stderr)
        assert sorted(done.stdout.split()) == ["10.9.0.1", "10.9.0.1", "10.9.0.2", "10.9.0.2"]
        assert "2 hosts with 2 ranks each, links at 200mbit" in done.stderr


def test_run_says_how_srun_starts_ranks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.environ", {**os.environ, "SLURM_JOB_ID": "7"})
    assert main(["run", "-n", "8", "--hook", "python", "train.py"]) == 2
    assert "srun --mpi=pmi2 -n 8 hybridcomp run --hook -- python train.py" in capsys.readouterr().err


def test_run_wants_the_ranks_that_there_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.environ", {**os.environ, "PMI_RANK": "1", "PMI_SIZE": "4"})
    assert main(["run", "-n", "8", "--", "true"]) == 2
    assert "-n 8 does not go with the 4 ranks that were started" in capsys.readouterr().err
