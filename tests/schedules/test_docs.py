"""docs/algorithms.md agrees with the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hybridcomp.cli.main import main
from hybridcomp.schedules.registry import ALGORITHMS
from hybridcomp.schedules.topology import Topology
from hybridcomp.schedules.verify import verify
from tests.schedules.cases import operation

GUIDE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("mean", [False, True])
def test_the_example_is_right(ranks: int, mean: bool) -> None:
    example = re.search(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    assert example
    scope: dict[str, object] = {}
    exec(example[1], scope)
    of, topology = operation("all_reduce", ranks, 100, mean=mean), Topology.even(ranks, 1)
    verify([scope["all_reduce"](of, topology, rank) for rank in range(ranks)])


def test_the_output_is_what_the_command_says(capsys: pytest.CaptureFixture[str]) -> None:
    shown = re.search(r"\$ hybridcomp (.*?)\n(.*?)```", GUIDE, re.DOTALL)
    assert shown
    assert main(shown[1].split()) == 0
    said = capsys.readouterr().out

    def lines(text: str) -> list[list[str]]:
        return [line.split() for line in text.splitlines() if line.strip(" ─-")]

    assert lines(said) == lines(shown[2])


def test_the_table_names_all_algorithms() -> None:
    told = {}
    for operations, names in re.findall(r"^\| (`[a-z_`, ]+) \| (`[a-z_`, ]+) \|$", GUIDE, re.MULTILINE):
        for kind in re.findall(r"`(\w+)`", operations):
            told[kind] = re.findall(r"`(\w+)`", names)
    assert told == {kind: list(algorithms) for kind, algorithms in ALGORITHMS.items()}
