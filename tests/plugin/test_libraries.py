"""Changes in other libraries; a version that is made otherwise is left alone.

tests/examples shows that accelerate, transformers and Lightning then work.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hybridcomp.plugin import libraries


class MPIEnvironment:
    @staticmethod
    def detect() -> bool:
        raise AssertionError("it starts MPI")


def test_lightning_starts_no_mpi_outside_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Environment(MPIEnvironment):
        pass

    libraries.ask_the_launcher(SimpleNamespace(MPIEnvironment=Environment))
    monkeypatch.setattr("os.environ", {})
    assert Environment.detect() is False
    monkeypatch.setattr("os.environ", {"PMI_RANK": "0"})
    with pytest.raises(AssertionError, match="it starts MPI"):
        Environment.detect()


@pytest.mark.parametrize(
    ("found", "asked", "cpu", "expected"),
    [
        ("gloo", "hybridcomp", True, "hybridcomp"),
        ("gloo", None, True, "gloo"),
        ("gloo", "nccl", True, "gloo"),
        ("nccl", "nccl", False, "nccl"),
        ("hybridcomp", "hybridcomp", False, "hybridcomp"),
        (None, "hybridcomp", True, None),  # one process
    ],
)
def test_accelerate_takes_the_backend_on_cpus(found, asked, cpu, expected):
    class PartialState:
        def _prepare_backend(self, cpu=False, sagemaker_dp=False, backend=None):
            return found, "kind"

    libraries.take_the_backend(SimpleNamespace(PartialState=PartialState))
    assert PartialState()._prepare_backend(cpu, backend=asked) == (expected, "kind")


def test_other_versions_are_left_alone():
    for patch in (libraries.ask_the_launcher, libraries.take_the_backend, libraries.list_the_backend):
        patch(SimpleNamespace())
        patch(SimpleNamespace(MPIEnvironment=object, PartialState=object, TrainingArguments=object))
