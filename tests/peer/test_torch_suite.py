"""A third of PyTorch's own distributed tests on CPU tensors; ``make test-torch-suite`` runs all, and gloo beside it."""

import functools

import pytest

from tests.asked import is_asked
from tests.peer import launches

pytestmark = pytest.mark.timeout(400)

# The plain and the hardest form of every operation: groups, profiles, timeouts, complex numbers, objects, DDP.
TESTS = [
    "test_get_rank_size_group",
    "test_destroy_full_group",
    "test_barrier_timeout_global",
    "test_barrier_timeout_full_group",
    "test_batch_isend_irecv_gloo",
    "test_batch_isend_irecv_gloo_tags",
    "test_send_recv",
    "test_send_recv_any_source",
    "test_send_recv_any_source_torch_profiler",
    "test_send_recv_with_tag_autograd_profiler",
    "test_isend_torch_profiler",
    "test_irecv",
    "test_broadcast_full_group",
    "test_reduce_max",
    "test_reduce_group_product",
    "test_all_reduce_sum_async",
    "test_all_reduce_sum_complex",
    "test_all_reduce_complex_unsupported_ops",
    "test_all_reduce_full_group_min",
    "test_sparse_all_reduce_sum",
    "test_all_reduce_coalesced_sum",
    "test_all_reduce_coalesced_group_max",
    "test_scatter_group",
    "test_scatter_complex",
    "test_scatter_object_list",
    "test_gather_full_group",
    "test_gather_object",
    "test_all_gather_complex",
    "test_all_gather_object_default_pg",
    "test_all_gather_coalesced_complex",
    "test_all_gather_coalesced_with_empty",
    "test_get_future",
    "test_all_to_all",
    "test_all_to_all_single_equal_split_complex",
    "test_all_to_all_single_unequal_split_full_group",
    "test_all_to_all_group",
    "test_monitored_barrier_gloo_subgroup",
    "test_monitored_barrier_gloo_rank_0_timeout",
    "test_monitored_barrier_failure_order",
    "test_monitored_barrier_wait_all_ranks",
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_ddp_logging_data_cpu",
    "test_static_graph_api_cpu",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
]


@functools.cache
def _verdicts() -> dict[str, launches.Verdict]:
    return launches.run("hybridcomp", [test for test in TESTS if is_asked("test", test)])


@pytest.mark.parametrize("test", TESTS)
def test_pytorch(test: str) -> None:
    verdict = _verdicts()[test]
    assert verdict.outcome == "pass", verdict.why
