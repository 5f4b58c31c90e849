"""Changes in other libraries; a version that is made otherwise is left alone.

tests/examples shows that accelerate, transformers and Lightning then work.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hybridcomp.plugin import _PATCHES, libraries
from tests.plugin.test_plugin import run


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


def test_ignite_knows_the_backend():
    class Model:
        available_backends = ("nccl", "gloo")

    for _ in range(2):
        libraries.offer_the_backend(SimpleNamespace(_NativeDistModel=Model))
    assert Model.available_backends == ("nccl", "gloo", "hybridcomp")
    for name, taken_for in ("hybridcomp", "gloo"), ("nccl", "nccl"), (None, None):
        module = SimpleNamespace(idist=SimpleNamespace(backend=lambda name=name: name, get_rank=lambda: 3))
        theirs = module.idist
        libraries.wrap_as_on_gloo(module)
        assert (module.idist.backend(), module.idist.get_rank()) == (taken_for, 3)
        assert theirs.backend() == name


# Each wraps a model as it does for gloo, trains it a step, and sets ``weights``.
IGNITE = """
import ignite.distributed as idist
def train(rank):
    global weights
    torch.manual_seed(0)
    model = idist.auto_model(torch.nn.Linear(4, 1))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.full((8, 4), 1.0 + rank)).square().mean().backward()
    optimizer.step()
    weights = next(model.parameters()).detach()
    say((type(model).__name__, idist.backend()))
    everyone = idist.all_gather(weights)
    assert torch.equal(everyone[:1], everyone[1:])
with idist.Parallel(backend=BACKEND) as parallel:
    parallel.run(train)
"""
ACCELERATE = """
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend=BACKEND)])
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.full((8, 4), 1.0 + accelerator.process_index)).square().mean())
optimizer.step()
weights = next(model.parameters()).detach()
say((type(model).__name__, dist.get_backend()))
everyone = accelerator.gather(weights)
assert torch.equal(everyone[:1], everyone[1:])
"""


@pytest.mark.parametrize(
    ("program", "backend"), [(IGNITE, "hybridcomp"), (IGNITE, "gloo"), (ACCELERATE, "gloo")]
)
def test_trainers_that_branch_on_the_name(program: str, backend: str) -> None:
    """By its own name, and in the place of gloo, replicas train together."""
    options = ["--policy=none"] + (["--replace=gloo"] if backend == "gloo" else [])
    done = run(f"BACKEND = {backend!r}\n{program}", *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(("DistributedDataParallel", backend))] * 2
    assert "hybridcomp: makes the groups of gloo" in done.stderr or backend != "gloo"


def test_other_versions_are_left_alone():
    for patch in (getattr(libraries, name) for name in _PATCHES.values()):
        patch(SimpleNamespace())
        patch(
            SimpleNamespace(
                MPIEnvironment=object,
                PartialState=object,
                TrainingArguments=object,
                _NativeDistModel=object,
                idist=object,
            )
        )
