"""PyTorch's own parallelism over the process group, policy none: one process's gradients."""

import torch
import torch.distributed as dist

from tests.torch.models import parallel
from tests.torch.models.ddp import assert_near, reference_gradients, relative_error

TOLERANCE = 2e-6


def case_ddp() -> None:
    wrapped = parallel.ddp(bucket_cap_mb=0.05)
    for _ in range(2):  # buckets are rebuilt after the first step
        gradients = parallel.ddp_gradients(wrapped)
        assert_near(gradients, TOLERANCE)
        parallel.assert_same_on_all_ranks(gradients)


def case_ddp_without_synchronisation_and_with_unused_parameters() -> None:
    wrapped = parallel.ddp(find_unused_parameters=True)
    with wrapped.no_sync():
        parallel.ddp_gradients(wrapped)
    assert_near(parallel.ddp_gradients(wrapped), TOLERANCE)


def case_fsdp() -> None:
    assert_near(parallel.fsdp_gradients("fsdp"), TOLERANCE)


def case_tensor_parallel() -> None:
    assert_near(parallel.tp_gradients(), TOLERANCE)


def case_pipeline() -> None:
    expected = reference_gradients()
    got = parallel.pipeline_gradients()
    assert len(got) == 6
    for name, grad in got.items():
        assert relative_error(grad, expected[name]) < TOLERANCE, name


def case_fsdp_of_tensor_parallel() -> None:
    assert_near(parallel.three_dimensional_gradients(), TOLERANCE)


def case_checkpoint() -> None:
    import tempfile

    import torch.distributed.checkpoint as dcp

    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, 0)
    state = {"shared": torch.arange(5.0), f"of {dist.get_rank()}": torch.tensor([dist.get_rank()])}
    dcp.save(state, checkpoint_id=box[0])
    loaded = {key: torch.zeros_like(value) for key, value in state.items()}
    dcp.load(loaded, checkpoint_id=box[0])
    assert all(torch.equal(loaded[key], value) for key, value in state.items())
