"""``hybridcomp train`` as a user runs it: wrong input, a run's files, interruption and resumption."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import time
import tomllib
from pathlib import Path

import pytest

from hybridcomp.breakdown.split import aligned, split
from hybridcomp_lab.cli import train as command
from hybridcomp_lab.train import launch
from tests.train.harness import TINY, environment, metrics, train, train_inside, under_mpiexec
from tests.train.same import losses, stored, unequal

ERROR = "hybridcomp train: error: "

FILES = {
    "short.txt": "too short",
    "broken.toml": "dp = 2\nlayers = = 3\n",
    "unknown.toml": "dp = 2\nlayer = 3\n",
    "axis.toml": "min_bytes = 1\n\n[fsdp]\ncodec = 'int8'\n",
    "policy.toml": "min_bytes = 1\n[dp]\nall_reduce = { codec = 'int8:blok=1' }\n",
}
WRONG = [
    ("--policy int99", ["unknown policy 'int99'"]),
    ("--policy int8:block=7", ["block"]),
    ("--policy absent.toml", ["absent.toml"]),
    ("--policy policy.toml", ["policy.toml", "line 3", "dp.all_reduce", "blok"]),
    ("--policy axis.toml", ["axis.toml:3", "[fsdp]", "pp, dp, tp"]),
    ("--config broken.toml", ["broken.toml: line 2, column 10, key layers"]),
    ("--config unknown.toml", ["unknown.toml: line 2, key layer", "did you mean layers"]),
    ("--layers 3 --pp 2", ["layers (3) must be divisible by pp (2)"]),
    ("--heads 4 --tp 3", ["heads (4) must be divisible by tp (3)"]),
    ("--data absent.txt", ["data absent.txt does not exist"]),
    ("--data short.txt", ["shorter than one batch", "8 tokens"]),
    ("--resume absent", ["no checkpoint in absent"]),
    ("--elastic --pp 2", ["elastic is of whole replicas", "pp must be 1, not 2"]),
    ("--elastic --tp 2", ["elastic is of whole replicas", "tp must be 1, not 2"]),
    ("--elastic --replica ../a", ["replica must be a name of letters, digits, dots, - and _, not '../a'"]),
    ("--min-replicas 2", ["min_replicas (2) is of replicas that come and go: give --elastic"]),
]


@pytest.fixture
def folder(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def check_one_error(done, parts):
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.count(ERROR) == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    for part in parts:
        assert part in done.stderr


@pytest.mark.parametrize(("arguments", "parts"), WRONG, ids=[arguments for arguments, _ in WRONG])
def test_wrong_input_is_one_message_before_any_rank_starts(folder, monkeypatch, capsys, arguments, parts):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(command, "inside_mpi", lambda: False)
    monkeypatch.setattr(launch, "exec_under_mpiexec", lambda *_: pytest.fail("ranks were started"))
    monkeypatch.setattr(command, "_run_as_rank", lambda _: pytest.fail("MPI was started"))
    code = command.main(arguments.split())
    printed = capsys.readouterr()
    check_one_error(subprocess.CompletedProcess([], code, printed.out, printed.err), parts)


def test_a_missing_extra_is_named_with_its_remedy(folder, monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else find_spec(name)
    )
    monkeypatch.setattr(command, "inside_mpi", lambda: False)
    assert command.main([]) == 2
    assert (
        "torch is missing: in a clone of hybridcomp, pip install '.[train]' --extra-index-url https"
        in capsys.readouterr().err
    )


def test_the_process_exits_with_2(folder):
    check_one_error(train("--layers 3 --pp 2", folder, timeout=30), ["divisible by pp"])


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([(3, "--dp 2")], "dp * pp * tp is 2, but there are 3 ranks"),
        ([(3, "--dp 3 --policy policy.toml")], "policy.toml: line 3"),
        (
            [(1, "--dp 3 --policy none"), (2, "--dp 3 --policy hybrid")],
            "disagree on policy: rank 0 has 'none', rank 1 has",
        ),
        ([(2, "--dp 3"), (1, "--dp 3 --data absent.txt")], "data absent.txt does not exist"),
    ],
    ids=["rank count", "policy", "ranks disagree", "one rank alone"],
)
def test_wrong_input_inside_mpi_is_one_message_of_one_rank(folder, parts, message):
    check_one_error(train_inside(parts, folder, timeout=30), [message])


def test_a_flag_that_does_not_exist_is_named_once_inside_mpi(folder):
    done = train_inside([(3, "--dp 3 --bogus")], folder, timeout=30)
    assert done.returncode == 2
    assert done.stderr.count("Unrecognized options") == 2  # the box's title and its text
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a place where not even root may write")
def test_a_rank_that_fails_alone_ends_the_others(folder):
    done = train(f"{TINY} --dp 2 --steps 2 --out /proc/nothing", folder, timeout=60)
    assert done.returncode == 2
    assert done.stderr.count(f"{ERROR}rank 0: cannot write to the run directory /proc/nothing") == 1
    assert "Traceback" not in done.stderr


def test_a_run_on_one_rank_writes_its_files_and_learns(folder):
    done = train(f"{TINY} --steps 30 --warmup-steps 5 --lr 1e-2 --eval-every 20 --seed 7 --out run", folder)
    assert done.returncode == 0, done.stderr
    run = folder / "run"
    config = tomllib.loads((run / "config.toml").read_text())
    assert (config["steps"], config["seed"], config["dp"]) == (30, 7, 1)
    (start,) = metrics(run, "start")
    assert start["mesh"] == {"pp": 1, "dp": 1, "tp": 1}
    steps = metrics(run, "train")
    assert [entry["step"] for entry in steps] == list(range(1, 31))
    assert [entry["tokens"] for entry in steps[:2]] == [128, 256]
    assert steps[-1]["loss"] < steps[0]["loss"] - 1
    assert steps[4]["lr"] == pytest.approx(1e-2)
    assert [entry["step"] for entry in metrics(run, "eval")] == [20, 30]
    (summary,) = metrics(run, "summary")
    assert summary["val_loss"] == metrics(run, "eval")[-1]["loss"]
    assert summary["seconds"] == pytest.approx(sum(entry["step_seconds"] for entry in steps), rel=1e-3)
    assert "step 30/30" in done.stdout
    assert "\x1b" not in done.stdout  # no terminal: plain lines


def test_a_live_line_where_the_launcher_has_a_terminal(folder):
    done = train(f"{TINY} --steps 3 --out run", folder, HYBRIDCOMP_TERMINAL="100")
    assert done.returncode == 0, done.stderr
    assert "\x1b[2K" in done.stdout
    assert "tokens/s" in done.stdout


def check_the_steps_of_its_traces(run):
    """Check that the steps the trainer counts are those that the report splits, each as long as the trainer says."""
    found = split(run, *aligned(run), warmup=1)
    assert (found.by, found.steps, len(found.ranks)) == ("hybridcomp train", [1, 2, 3, 4, 5], 4)
    assert {"pp", "dp"} <= set(found.axes)
    seconds = [entry["step_seconds"] for entry in metrics(run, "train")]
    for row in found.rows:
        assert row.compute + row.communication == pytest.approx(row.seconds, abs=1e-6)
        if row.rank == 0:
            assert row.seconds <= seconds[row.step] + 1e-5


RUN = f"{TINY} --pp 2 --dp 2 --policy hybrid.toml --steps 6 --warmup-steps 2 --lr 1e-2 --checkpoint-every 3 --seed 5"
POLICY = """
exclude = ["*norm*", "*embed*"]
min_bytes = 512
[dp]
all_reduce = { codec = "int4:block=32", feedback = "ef" }
[pp]
codec = "int8:block=32"
warmup_steps = 4
"""


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path):
    (tmp_path / "hybrid.toml").write_text(POLICY)
    done = train(f"{RUN} --out whole", tmp_path, HYBRIDCOMP_TRACE=str(tmp_path / "whole"))
    assert done.returncode == 0, done.stderr
    check_the_steps_of_its_traces(tmp_path / "whole")

    # The same run, killed once its first checkpoint is there.
    process = subprocess.Popen(
        under_mpiexec(f"{RUN} --out cut"),
        cwd=tmp_path,
        env=environment(),
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    first = tmp_path / "cut" / "checkpoints" / "step-00000003"
    deadline = time.monotonic() + 90
    try:
        while not first.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=30)
    assert first.exists()
    shutil.rmtree(
        tmp_path / "cut" / "checkpoints" / "step-00000006", ignore_errors=True
    )  # had it been quicker

    # Damaged files beside the checkpoint, which is whole, do not stop it.
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as file:
        file.write("\n[]\n")
    for step, damage in ((4, '"step": 1e999'), (5, '"step": 5, "files": {"%s": 1}' % (300 * "n"))):
        newer = first.with_name(f"step-{step:08d}")
        newer.mkdir()
        text = '{"elapsed": 1.0, "policy": "", "run": {}, "files": {}, ' + damage + "}"
        (newer / "checkpoint.json").write_text(text)
    resumed = train(f"{RUN} --out cut --resume auto", tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed from cut/checkpoints/step-00000003" in resumed.stdout
    assert resumed.stdout.count("passed over: no record of a checkpoint: cut/checkpoints/step-0000000") == 2
    assert resumed.stderr.count("hybridcomp train: warning: cut/metrics.jsonl: line ") == 1
    assert "now cut/metrics.jsonl.damaged" in resumed.stderr
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    a, b = (stored(tmp_path / run / "checkpoints" / "step-00000006") for run in ("whole", "cut"))
    assert unequal(a, b) == []
    memory = [value for key, value in a.items() if "residual" in key]
    assert memory
    assert all(value.abs().sum() > 0 for value in memory)

    refused = train(f"{RUN} --out cut --resume auto --steps 9 --heads 1", tmp_path, timeout=30)
    check_one_error(refused, ["cannot resume from", "heads 2 there, 1 here"])


def test_traffic_is_counted_per_axis(tmp_path):
    (tmp_path / "hybrid.toml").write_text(POLICY)
    done = train(f"{TINY} --tp 2 --dp 2 --policy hybrid.toml --steps 2 --out run", tmp_path)
    assert done.returncode == 0, done.stderr
    (summary,) = metrics(tmp_path / "run", "summary")
    wire, plain = summary["wire_bytes"], summary["plain_bytes"]
    assert wire["pp"] == plain["pp"] == 0
    assert wire["dp"] < 0.75 * plain["dp"]
    # The policy leaves tp alone. Per micro-batch and layer, the activations are summed twice forward and twice
    # backward; a rank sends 2 (n - 1) / n of the bytes.
    activations = 2 * 32 * 32 * 4
    steps, micro_batches, layers, ranks = 2, 2, 2, 4
    assert wire["tp"] == plain["tp"] == steps * micro_batches * layers * 4 * activations * ranks
    assert metrics(tmp_path / "run", "train")[-1]["wire_bytes"] == wire
    assert {row["axis"] for row in summary["comm"]} >= {"dp", "tp"}
