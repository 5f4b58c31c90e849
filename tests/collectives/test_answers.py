"""Results of choices are kept as long as no decision changes, and not longer."""

from __future__ import annotations

from types import SimpleNamespace

from hybridcomp.collectives.answers import Answers


class Made:
    """A result that may be kept."""

    once = False


def test_results_of_earlier_decisions_are_dropped():
    decider = SimpleNamespace(version=0)
    comm = SimpleNamespace(review=lambda: None, decider=decider)
    answers: Answers[Made] = Answers()

    def get(key: str, adapted: int) -> Made:
        return answers.get(comm, key, Made, adapted=adapted)

    first, other = get("first", 0), get("other", 0)
    assert (get("first", 0), get("other", 0)) == (first, other)
    for adapted in range(1, 9):
        assert get("first", adapted) is not first
        assert get("first", adapted) is get("first", adapted)
    assert len(answers._known) == 1
    last = get("first", 8)
    decider.version += 1
    assert get("first", 8) is not last
    assert len(answers._known) == 1
