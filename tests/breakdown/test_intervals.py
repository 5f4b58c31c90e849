"""Sets of times agree with sets of instants."""

from itertools import pairwise

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridcomp.intervals import difference, intersection, length, union

times = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)


def instants(given_times) -> set[int]:
    return {at for began, ended in given_times for at in range(began, ended)}


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # whatever else the machine does
@given(times, times)
def test_sets_of_times(a, b):
    left, right = union(a), union(b)
    for one in (left, right):
        assert all(x[1] < y[0] for x, y in pairwise(one))
    assert instants(left) == instants(a)
    assert instants(intersection(left, right)) == instants(a) & instants(b)
    assert instants(difference(left, right)) == instants(a) - instants(b)
    assert length(left) == len(instants(a))
