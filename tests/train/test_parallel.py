"""Every mesh gives the gradients, loss and gradient norm of a single process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.harness import run_ranks

SCRIPT = Path(__file__).with_name("check_gradients.py")


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("dp", "pp", "tp", "backend"),
    [
        (3, 1, 1, "hybridcomp"),
        (1, 3, 1, "hybridcomp"),
        (1, 1, 3, "hybridcomp"),
        (2, 2, 2, "hybridcomp"),
        (2, 1, 2, "gloo"),
    ],
)
def test_gradients_are_those_of_one_process(dp, pp, tp, backend):
    done = run_ranks(dp * pp * tp, SCRIPT, str(dp), str(pp), str(tp), backend)
    assert done.returncode == 0, done.stderr[-3000:]
    assert ", 0 problems" in done.stdout
    assert "compared" in done.stdout
