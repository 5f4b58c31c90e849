"""All ranks of a job have one version of hybridcomp."""

import pytest

import hybridcomp as hc
from hybridcomp.version import VERSION_BYTES, check_versions, packed_version


def test_one_version_is_that_of_the_package():
    check_versions([packed_version(), hc.__version__.encode()])
    assert len(packed_version()) == VERSION_BYTES


@pytest.mark.parametrize("other", [b"0.0.9", b"", b"\xff" * VERSION_BYTES])
def test_ranks_with_another_version_are_named(other):
    with pytest.raises(hc.MismatchError, match=rf"{hc.__version__} here, .* on rank 1, 3; install the same"):
        check_versions([packed_version(), other, packed_version(), other])
