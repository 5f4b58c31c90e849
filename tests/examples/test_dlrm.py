"""examples/dlrm.py: its losses are those of one process, its rows arrive within their bounds, its AUC is the AUC."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.examples.test_examples import FOLDER, check, run
from tests.torch.harness import mpiexec

pytestmark = pytest.mark.timeout(200)
STEPS, BATCH, ROWS, WIDTH, SEED, RANKS, LR = 5, 32, 300, 8, 4, 3, 0.05


@pytest.fixture(scope="module")
def program() -> dict[str, Any]:
    return runpy.run_path(str(FOLDER / "dlrm.py"))


def losses_of_one_process(program: dict[str, Any]) -> list[float]:
    """Return losses of plain PyTorch: whole tables, dense gradients, all ranks' samples in one batch."""
    clicks, dtype = program["Clicks"](SEED, ROWS), torch.float64
    tables = [
        nn.Parameter(program["table"](t, n, WIDTH, SEED, dtype).weight.detach().clone())
        for t, n in enumerate(clicks.rows)
    ]
    torch.manual_seed(SEED)
    model = program["Interaction"](WIDTH).to(dtype)
    optimizer = torch.optim.Adagrad([*model.parameters(), *tables], lr=LR)
    losses = []
    for step in range(1, STEPS + 1):
        parts = [clicks.draw(step, rank, BATCH) for rank in range(RANKS)]
        dense, ids, labels = (torch.cat(part) for part in zip(*parts, strict=True))
        rows = torch.stack([table[ids[:, t]] for t, table in enumerate(tables)], dim=1)
        optimizer.zero_grad()
        logits = model(dense.to(dtype), rows)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels.to(dtype))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_losses_are_those_of_one_process(program: dict[str, Any], tmp_path: Path):
    sizes = f"--batch {BATCH} --rows {ROWS} --width {WIDTH} --seed {SEED} --lr {LR} --test 64"
    how = f"--compress none --dtype float64 --steps {STEPS} --json {tmp_path / 'found'}"
    done = mpiexec(RANKS, str(FOLDER / "dlrm.py"), *sizes.split(), *how.split())
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found").read_text())
    assert found["agree"]
    assert found["losses"] == pytest.approx(losses_of_one_process(program), rel=0, abs=1e-9)
    assert found["wire_bytes"] == found["plain_bytes"] > 0


@pytest.mark.parametrize("ranks", [1, 4])
def test_rows_arrive_within_their_bounds(ranks: int):
    done = mpiexec(ranks, str(Path(__file__).with_name("dlrm_exchange.py")))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rows arrived" in done.stdout


@pytest.mark.long
def test_dual_levels(tmp_path: Path):
    how = f"--rows 2000 --bounds 0.05 0.03 0.01 --test 512 --until 10 --json {tmp_path / 'found'}"
    said = run(3, "dlrm", *f"--steps 25 --from-step 3 {how}".split())
    check(said, falls_to=0.9, saved=3)
    codecs = json.loads((tmp_path / "found").read_text())["codecs"]
    assert len(codecs) == 8
    assert len(set(codecs)) > 1  # tables differ
    assert codecs[0].startswith("bounded:abs=0.05:coder=lz")


@pytest.mark.long
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(tmp_path: Path):
    def losses(steps: int, folder: str) -> list[float]:
        how = f"--steps {steps} --from-step 3 --until 8 --rows 500 --batch 64 --test 32"
        where = f"--folder {tmp_path / folder} --json {tmp_path / 'found'}"
        done = mpiexec(2, str(FOLDER / "dlrm.py"), *how.split(), *where.split())
        assert done.returncode == 0, done.stderr
        return json.loads((tmp_path / "found").read_text())["losses"]

    whole = losses(9, "whole")
    assert losses(5, "parts") + losses(9, "parts") == whole


def test_auc_is_the_share_of_pairs_in_order(program: dict[str, Any]):
    rng = np.random.default_rng(0)
    scores, labels = rng.integers(0, 30, 300) / 7, rng.random(300) < 0.3
    above = scores[labels][:, None] - scores[~labels][None, :]
    assert program["auc"](scores, labels) == pytest.approx(
        np.mean((above > 0) + 0.5 * (above == 0)), abs=1e-12
    )


def test_wrong_steps_are_told(
    program: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sys.argv", ["dlrm.py", "--from-step", "300"])
    with pytest.raises(SystemExit, match="2"):
        program["arguments"]()
    assert "--from-step must be from 1 to --steps (200), not 300" in capsys.readouterr().err
