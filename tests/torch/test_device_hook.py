"""DDP with the hook, whose buckets are encoded on their device."""

from types import SimpleNamespace
from typing import Any

import pytest

from hybridcomp.policy.toml import parse_policy
from hybridcomp.torch.hook import plan, state
from tests.torch.harness import case_names, check_case


@pytest.mark.parametrize("case", case_names("device_hook"))
def test_case(case: str) -> None:
    check_case("device_hook", 3, case)


@pytest.mark.parametrize(
    ("is_cuda", "kernels", "drivers", "there"),
    [
        (True, True, True, True),
        (False, True, True, False),
        (True, False, True, False),
        (True, True, False, False),
    ],
)
def test_where_a_bucket_is_encoded(
    monkeypatch: pytest.MonkeyPatch, is_cuda: bool, kernels: bool, drivers: bool, there: bool
) -> None:
    """On its device only where kernels run, and those of all its codecs."""
    policy = parse_policy('[dp]\nall_reduce = "int8"\n', "test")
    batches = plan.make_plan(
        policy, "dp", state.as_dtype("float32"), [("weight", (5000,)), ("bias", (3,))], 0
    )
    monkeypatch.setattr(state, "has_driver", lambda codec: drivers or codec.name != "int8")
    monkeypatch.setattr(state.staging, "usable", lambda tensor: kernels)
    monkeypatch.setattr(state, "flatten", lambda tensor, device: "flat")
    buffer: Any = SimpleNamespace(is_cuda=is_cuda, detach=lambda: None)
    assert (state._on_device(buffer, batches) is not None) is there
