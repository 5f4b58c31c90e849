"""Under the policy ``exact`` training ends with the bits that it has uncompressed."""

from __future__ import annotations

import pytest

from tests.train.harness import TINY, metrics, train
from tests.train.same import losses, stored, unequal


@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_training_in_bf16_has_the_bits_of_none(tmp_path):
    slow = {
        "HYBRIDCOMP_HOSTS": "4x1",
        "HYBRIDCOMP_BANDWIDTH": "1e6",
    }  # or nothing would gain from compression
    axes = "--dp 2 --pp 2 --d-model 128 --dtype bf16"
    more = "--steps 4 --checkpoint-every 4 --warmup-steps 1 --lr 1e-2 --eval-every 4"
    for policy in ("none", "exact"):
        done = train(f"{TINY} {axes} {more} --policy {policy} --out {policy}", tmp_path, **slow)
        assert done.returncode == 0, done.stderr[-3000:]
    assert losses(tmp_path / "none") == losses(tmp_path / "exact")
    a, b = (stored(tmp_path / policy / "checkpoints" / "step-00000004") for policy in ("none", "exact"))
    assert [
        key for key in unequal(a, b) if ".comm." not in key
    ] == []  # the hook counts steps where it compresses
    assert any(".model." in key for key in a)
    (summary,) = metrics(tmp_path / "exact", "summary")
    for axis in ("dp", "pp"):
        assert summary["wire_bytes"][axis] < 0.85 * summary["plain_bytes"][axis]
