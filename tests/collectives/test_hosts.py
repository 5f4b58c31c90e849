"""Hosts of several ranks, as ``HYBRIDCOMP_HOSTS`` says: results, and what leaves a host."""

from __future__ import annotations

import pytest

from hybridcomp import variables
from hybridcomp.collectives.transport.topology import MOST_TOLD, check_hosts, hosts_of, told_hosts
from hybridcomp.errors import ConfigError, MismatchError
from tests.torch.harness import mpiexec


@pytest.mark.parametrize(
    ("layouts", "ranks"),
    [(("3x2", "unlike", "alone", "2x4", "in no order"), 8), pytest.param(("4x2", "2x8"), 16, marks=pytest.mark.long)],
)  # fmt: skip
def test_collectives_of_hosts_of_several_ranks(layouts: tuple[str, ...], ranks: int) -> None:
    done = mpiexec(ranks, "-m", "tests.collectives.hosts_ranks", *layouts, timeout=240)
    assert done.stdout.splitlines() == ["well"], done.stdout + done.stderr


def test_hosts_are_those_of_the_list_else_of_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["b", "a", "b", "b"]
    assert hosts_of(4, range(4), names).hosts == (0, 1, 0, 0)
    monkeypatch.setenv(variables.HOSTS.name, "1,2,1")
    assert hosts_of(4, range(4), names).hosts == (0, 1, 1, 2)
    assert hosts_of(4, (3, 1, 2), names[:3]).hosts == (0, 1, 1)  # numbered in the order of the ranks
    assert hosts_of(4, (0, -1), ["a", "a"]).hosts == (0, 0)  # it says nothing of another job's ranks
    with pytest.raises(ConfigError, match=r"HYBRIDCOMP_HOSTS is 1,2,1, which is 4 ranks; the job has 5"):
        hosts_of(5, range(5), "abcde")


def test_lists_that_differ_are_told_apart_however_long(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    for text in "", "2x4", "4,4", "8x1", ",".join("2" * 500 + "1"), ",".join("2" * 499 + "11"):
        monkeypatch.setenv(variables.HOSTS.name, text)
        told.append(told_hosts())
    assert told[1] == told[2]
    assert len(set(told)) == 5
    assert max(map(len, told)) <= MOST_TOLD
    check_hosts(told[1:3])
    check_hosts(["", ""])
    with pytest.raises(MismatchError, match=r"rank 0 has HYBRIDCOMP_HOSTS=none, rank 2 has 2x4; give all"):
        check_hosts(["", "", "2x4"])
