import functools

import pytest

from hybridcomp.net import Lab, LabError


@functools.cache
def _refusal(kind: str) -> str | None:
    try:
        with Lab(1, "100mbit", kind=kind):
            return None
    except LabError as error:
        return str(error)


@pytest.fixture
def namespaces() -> None:
    """Skip the test, saying why, where network namespaces may not be made."""
    if (reason := _refusal("namespaces")) is not None:
        pytest.skip(reason)
