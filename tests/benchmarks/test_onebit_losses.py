"""The study of optimizers that exchange momenta: what it runs, in which order, and what it does not run again."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # where its own modules are, as for a script
onebit_losses = importlib.import_module("onebit_losses")


def study(monkeypatch, file: Path, *words: str) -> list[tuple[str, float, int]]:
    """Run the study ``large`` without training; return the runs that it made."""
    made = []

    def run(_study: object, method: str, rate: float, seed: int) -> dict[str, object]:
        if (rate, seed) == (1e-3, 2):
            raise RuntimeError("its ranks ended with unlike weights")
        made.append((method, rate, seed))
        return {"method": method, "lr": rate, "seed": seed, "loss": 1.5, "seconds": 1.0}

    monkeypatch.setattr(onebit_losses, "run", run)
    monkeypatch.setattr(sys, "argv", ["onebit_losses.py", "--study", "large", "--json", str(file), *words])
    onebit_losses.main()
    return made


def test_a_study_goes_on_where_it_ended(monkeypatch, tmp_path):
    file = tmp_path / "large.json"
    adamw, ours = onebit_losses.STUDIES["large"].methods
    first = study(monkeypatch, file, "--rates", "5e-4", "--seeds", "1")
    assert first == [(adamw, 5e-4, 1), (ours, 5e-4, 1)]
    assert study(monkeypatch, file, "--rates", "5e-4", "--seeds", "1", "3") == [
        (adamw, 5e-4, 3),
        (ours, 5e-4, 3),
    ]
    with pytest.raises(RuntimeError, match="unlike weights"):
        study(monkeypatch, file, "--seeds", "2")
    found = json.loads(file.read_text())
    assert (found["baseline"], found["steps"]) == (adamw, 1000)
    assert [(row["seed"], row["lr"]) for row in found["runs"][-2:]] == [
        (2, 5e-4)
    ] * 2  # those before the failure


def test_wrong_words_are_refused(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit):
        study(monkeypatch, tmp_path / "large.json", "--methods", "2-bit Adam")
    assert "large has AdamW, 0/1 Adam, few renewals, not 2-bit Adam" in capsys.readouterr().err


SAID = (
    "held-out loss 1.7540; 701.8 s; replicas agree: True\n"
    "gradients: sent 5145.80 MB in the place of 64656.38 MB; after step 200 1792.95 MB, 28.8 times fewer"
)


def test_a_run_counts_only_if_its_ranks_agree(monkeypatch):
    said, commands = [SAID], []

    def launch(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(" ".join(command))
        return subprocess.CompletedProcess(command, 0, said[-1], "")

    monkeypatch.setattr(subprocess, "run", launch)
    large = onebit_losses.STUDIES["large"]
    row = onebit_losses.run(large, "AdamW", 5e-4, 2)
    assert (row["loss"], row["sent_mb"], row["since_mb"], row["seed"]) == (1.754, 5145.8, 1792.95, 2)
    assert commands[0].endswith("--optimizer adamw --steps 1000 --warmup 200 --lr 0.0005 --seed 2")
    for other in (SAID.replace("True", "False"), SAID.splitlines()[0]):
        said.append(other)
        with pytest.raises(RuntimeError, match="ended with 0"):
            onebit_losses.run(large, "AdamW", 5e-4, 2)
