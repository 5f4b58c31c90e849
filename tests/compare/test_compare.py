"""``hybridcomp compare`` on programs that know nothing of it."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from hybridcomp.cli import compare
from hybridcomp.compare import runner
from hybridcomp.compare.plan import Candidate, Plan, candidates_of, lab_of
from hybridcomp.compare.runner import Done, ProgramError
from hybridcomp.errors import ConfigError
from hybridcomp.files import alone_in
from tests.torch.harness import PATH
from tests.warm import python

PROGRAM = str(Path(__file__).with_name("program.py"))


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("PMI", "HYBRIDCOMP_", "MASTER_", "SLURM_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", PATH)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(compare, "end_on_signals", lambda: None)  # this process's are pytest's


def call(out: Path, how: str, *options: str, steps: int = 10) -> int:
    asked = ["-n", "2", "--steps", str(steps), "--warmup", "2", "--rounds", "1", "--out", str(out), *options]
    return compare.main([*asked, "--", python(), PROGRAM, "gloo", how])


def test_a_program_is_compared_and_an_interrupted_comparison_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []
    begin = compare.Show.begin

    def interrupted(self, candidate, number):
        ran.append(candidate.name)
        if ran == ["as it is", "int8:min_bytes=0"]:
            raise KeyboardInterrupt
        begin(self, candidate, number)

    monkeypatch.setattr(compare.Show, "begin", interrupted)
    with pytest.raises(KeyboardInterrupt):
        call(tmp_path, "well", "--policies", "int8:min_bytes=0,hook:exact", "--json")
    capfd.readouterr()
    assert call(tmp_path, "well", "--policies", "int8:min_bytes=0,hook:exact", "--json") == 0
    assert ran == ["as it is", "int8:min_bytes=0", "int8:min_bytes=0", "hook:exact"]

    told = json.loads(capfd.readouterr().out)
    base, int8, exact = told["rows"]
    assert (told["ranks"], told["hosts"], told["backend"], told["device"]) == (2, 1, "gloo", "cpu")
    assert [row["candidate"] for row in told["rows"]] == ["as it is", "int8:min_bytes=0", "hook:exact"]
    assert int8["variables"] == {"HYBRIDCOMP_REPLACE": "gloo,nccl", "HYBRIDCOMP_POLICY": "int8:min_bytes=0"}
    assert all(row["failure"] is None and len(row["curve"]) == 10 for row in told["rows"])
    assert all(0 < row["step_ms"] < 5000 and row["between_bytes"] == 0 for row in told["rows"])
    assert all(0 < row["waiting"] < 1 for row in told["rows"])  # for the last gradients at least
    assert exact["curve"] == base["curve"]
    assert exact["gap"]["mean"] == 0
    assert int8["curve"] != base["curve"]
    assert int8["curve"] == pytest.approx(base["curve"], rel=0.01)
    for run in ("01-as_it_is", "01-int8_min_bytes=0", "01-hook_exact"):
        output = (tmp_path / "runs" / run / "output.txt").read_text()
        assert sorted(line for line in output.splitlines() if "left in order" in line) == [
            "rank 0 left in order",
            "rank 1 left in order",
        ], output
    assert "data:image/png" in (tmp_path / "compare.html").read_text()
    assert json.loads((tmp_path / "results.json").read_text())["advice"] == told["advice"]


class Terminal(io.StringIO):
    """Standard input of a person."""

    def isatty(self) -> bool:
        return True


def alive(pid: int) -> bool:
    """Tell whether a process runs; one that has ended may wait for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def until(met: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not met():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def interrupt(command: list[str], number: int, output: Path) -> tuple[int, str, str]:
    """Run a command, and send it a signal once two processes have written that they stand still; they must end.

    Returns:
        Exit status, standard output, standard error.
    """

    def standing() -> list[int]:
        text = output.read_text() if output.exists() else ""
        return [int(pid) for pid in re.findall(r"process (\d+) stands still", text)]

    output.unlink(missing_ok=True)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert until(lambda: len(standing()) == 2 or process.poll() is not None)
            pids = standing()
            process.send_signal(number)
            printed, told = process.communicate(timeout=60)
        finally:
            process.kill()
    assert len(pids) == 2, told
    assert until(lambda: not any(map(alive, pids)), 10)
    return process.returncode, printed, told


def test_signals_end_the_ranks_keep_what_is_measured_and_leave_the_shell_its_status(tmp_path: Path) -> None:
    stand, out = tmp_path / "stand", tmp_path / "out"
    stand.touch()
    program = (  # a shell has what it starts in the background ignore SIGINT
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from hybridcomp.cli.main import main; sys.exit(main())"
    )
    asked = ["-n", "2", "--steps", "10", "--warmup", "2", "--rounds", "1", "--policies", "int8:min_bytes=0"]
    command = [sys.executable, "-c", program, "compare", *asked, "--out", str(out)]
    command += ["--", python(), PROGRAM, "gloo", f"while:{stand}"]
    kept, under_way = out / "runs/01-as_it_is/run.json", out / "runs/01-int8_min_bytes=0"
    measured = set()
    for number in (signal.SIGINT, signal.SIGTERM):
        status, printed, told = interrupt(command, number, under_way / "output.txt")
        assert (status, printed) == (128 + number, ""), told
        assert "Traceback" not in told
        assert told.endswith("interrupted: 1 of 2 runs are kept; the same command goes on with the next\n")
        assert not (under_way / "run.json").exists()
        measured.add(kept.stat().st_mtime_ns)
    stand.unlink()
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "(an earlier call's)" in done.stderr
    assert {*measured, kept.stat().st_mtime_ns} == measured
    assert len(measured) == 1


def test_what_nohup_has_ignored_stays_ignored() -> None:
    program = (
        "import os, signal; from hybridcomp.cli.terminate import end_on_signals; "
        "signal.signal(signal.SIGHUP, signal.SIG_IGN); end_on_signals(); os.kill(os.getpid(), signal.SIGHUP); "
        "print('goes on', flush=True); os.kill(os.getpid(), signal.SIGTERM)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "goes on\n")


@pytest.mark.long
@pytest.mark.lab
def test_in_a_lab_the_bytes_are_those_that_interfaces_of_its_hosts_counted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = ["--lab", "2x1@1gbit", "--steps", "10", "--warmup", "2", "--rounds", "1", "--out", str(tmp_path)]
    asked += ["--policies", "int8:min_bytes=0", "--json"]
    assert compare.main([*asked, "--", "python", PROGRAM, "gloo", "well"]) == 0
    told = json.loads(capfd.readouterr().out)
    if told["hosts"] == 1:
        pytest.skip("no network namespaces on this machine")
    base, int8 = told["rows"]
    gradients = 4 * (2 * 64 * 256 + 256 + 64)
    # Each of two hosts sends half of the gradients twice; packets have heads, and TCP acknowledges.
    assert 2 * gradients < base["between_bytes"] < 2.5 * gradients
    assert 0.25 * base["between_bytes"] < int8["between_bytes"] < 0.5 * base["between_bytes"]
    assert not base["counted"]
    assert not int8["counted"]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("alone", "trains without torch.distributed"),
        ("none", "stepped no optimizer of PyTorch"),
        ("few", "made 9 optimizer steps, and 17 are needed"),
        ("nearly", "made 13 optimizer steps, and 17 are needed"),
        ("stops", "no step ended for 12 s"),
    ],
)
def test_programs_that_cannot_be_compared_are_told_why(tmp_path: Path, how: str, said: str) -> None:
    limit = ["--limit", "12"] if how == "stops" else []
    with pytest.raises(ProgramError, match=said) as raised:
        call(tmp_path, how, "--policies", "int8", *limit)
    assert str(tmp_path / "runs" / "01-as_it_is" / "output.txt") in str(raised.value)


def test_a_program_that_fails_under_a_candidate_gives_status_1_and_its_output(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert call(tmp_path, "fails", "--policies", "int8,hook:int8") == 1
    out, err = capfd.readouterr()
    kept = tmp_path / "runs" / "01-int8" / "output.txt"
    assert "this program does not like compression" in kept.read_text()
    assert str(kept) in err
    assert "nothing was compressed: the program wraps no module in DistributedDataParallel" in err
    assert "failed under every candidate" in out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-n", "1"], "one rank sends nothing"),
        (["-n", "0"], "two or more, not 0"),
        (["-n", "2", "--limit", "nan"], "above 0 seconds, not nan"),
        (["--lab", "1x1@1gbit"], "one rank sends nothing"),
        (["-n", "2", "--lab", "2x1@1gbit"], "do not go together"),
        (["-n", "2", "--steps", "5"], "at least 10 steps"),
        (["-n", "2", "--policies", "int9"], "int9"),
        (["-n", "2", "--policies", "int8,int8"], "names 'int8' twice"),
        (["-n", "2", "--policies", "exact,hook:"], "names 'hook:' without a policy"),
        (["-n", "2", "--policies", ""], "names none"),
        (["--lab", "2@1gbit"], "write hosts x ranks"),
    ],
)
def test_wrong_arguments_are_told_before_anything_runs(tmp_path: Path, options: list[str], said: str) -> None:
    from hybridcomp import HybridcompError

    with pytest.raises(HybridcompError, match=said):
        compare.main([*options, "--out", str(tmp_path / "none"), "--", "false"])
    assert not (tmp_path / "none").exists()


def test_a_policy_that_has_changed_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ran: list[str] = []

    def run(plan: Plan, place: object, candidate: Candidate, number: int, folder: Path, _: object) -> Done:
        ran.append(candidate.name)
        failure = None if candidate.name == "as it is" else "it failed"
        return Done(candidate, number, [], failure, folder / "output.txt")

    monkeypatch.setattr(runner, "_run", run)
    for codec, expected in (("int8", 2), ("int8", 0), ("int4", 1)):
        Path("p.toml").write_text(f'[dp]\ncodec = "{codec}"\n')
        ran.clear()
        plan = Plan(["true"], candidates_of("p.toml,exact"), ranks=2, rounds=1)
        runner.run_comparison(plan, tmp_path / "out", Mock())
        assert sum(name != "as it is" for name in ran) == expected, (codec, ran)


def test_two_comparisons_at_once_take_two_folders(tmp_path: Path) -> None:
    with alone_in(tmp_path / "out"), pytest.raises(ConfigError, match=r"another process is at work in .*out"):
        call(tmp_path / "out", "well")
    with pytest.raises(ProgramError, match="stepped no optimizer"):
        call(tmp_path / "out", "none")


def test_an_output_folder_that_is_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"cannot write .*file"):
            call(out, "well")


def test_a_program_that_is_not_there_is_told_by_its_output(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match=r"No such file or directory: '.*train") as raised:
        compare.main(["-n", "2", "--out", str(tmp_path), "--", python(), str(tmp_path / "train.py")])
    assert "taken notice" not in str(raised.value)


def test_a_program_that_no_launcher_started_is_told_how(tmp_path: Path) -> None:
    train = ["import torch.distributed as dist", "dist.init_process_group('gloo')"]
    with pytest.raises(ProgramError, match="No launcher has told it which rank it is: start it by -n RANKS"):
        compare.main(["--out", str(tmp_path), "--", python(), "-c", "; ".join(train)])


def test_variables_that_do_not_reach_the_ranks_are_told(tmp_path: Path) -> None:
    command = ["env", "-u", "HYBRIDCOMP_COMPARE", python(), PROGRAM, "gloo", "none"]
    with pytest.raises(ProgramError, match=r"taken notice of the comparison: .*srun --export=ALL"):
        compare.main(["-n", "2", "--out", str(tmp_path), "--policies", "int8", "--", *command])


@pytest.mark.parametrize(
    "said",
    [
        {"PMI_RANK": "0", "PMI_SIZE": "4"},
        {"SLURM_PROCID": "0", "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "4"},
        {"RANK": "1", "WORLD_SIZE": "4"},
    ],
)
def test_a_launcher_before_the_command_is_told_where_it_goes(
    said: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"has started 4 of this command.* -- mpiexec -n 4 python train"):
        compare.main(["--", "python", "train.py"])


def test_a_shell_that_a_launcher_started_may_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_PROCID": "0", "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdin", Terminal())
    with pytest.raises(ConfigError, match="there is no program 'nothing-of-that-name'"):
        compare.main(["--out", str(tmp_path), "--", "nothing-of-that-name"])


def test_a_job_without_srun_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="there is no program 'srun'"):
        compare.main(["-n", "2", "--out", str(tmp_path), "--", python(), PROGRAM, "gloo", "none"])


def test_a_python_program_without_python_is_told_how(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a Python program is run by: python train"):
        compare.main(["--out", str(tmp_path), "--", "train.py"])


def test_no_command_is_told() -> None:
    with pytest.raises(ConfigError, match="write it after --"):
        compare.main(["-n", "2"])


def test_candidates_are_split_where_no_parameter_follows() -> None:
    names = [one.name for one in candidates_of("int8:block=64,min_bytes=0, exact,hook:hybrid,auto")]
    assert names == ["as it is", "int8:block=64,min_bytes=0", "exact", "hook:hybrid", "auto"]


def test_policies_have_files_of_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = "d" * 200
    Path(folder).mkdir()
    files = [f"{folder}/a.toml", f"{folder}/b.toml", "my $x (<1>) 'é.toml", "a b.toml", "a_b.toml"]
    for file in files:
        Path(file).write_text('[dp]\ncodec = "int8"\n')
    found = candidates_of(",".join(files[:4]))
    assert len({one.folder for one in found}) == 5
    for one in found[1:]:
        (tmp_path / "runs" / f"01-{one.folder}").mkdir(parents=True)
        said = subprocess.run(
            ["sh", "-c", f'{one.line}; printf %s "$HYBRIDCOMP_POLICY"'], capture_output=True, check=True
        )
        assert Path(os.fsdecode(said.stdout)).samefile(one.name)
    for name in ("exact", "auto", "auto:safe"):  # a preset, whatever files there are
        Path(name).touch()
        assert candidates_of(name)[1].variables["HYBRIDCOMP_POLICY"] == name
    with pytest.raises(ConfigError, match=r"names 'a b.toml' and 'a_b.toml', whose files would be the same"):
        candidates_of(",".join(files[3:]))


def test_a_lab_is_read() -> None:
    assert str(lab_of("4x2@200mbit")) == "4x2@200mbit"
