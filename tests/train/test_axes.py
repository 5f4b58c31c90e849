"""The trainer beside its schedules: global batches, recomputation, sequence parallelism, bf16."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybridcomp.errors import ConfigError
from hybridcomp_lab.train.config import TrainConfig
from hybridcomp_lab.train.model.gpt import ModelShape, build_gpt
from hybridcomp_lab.train.model.recompute import recompute_blocks
from hybridcomp_lab.train.start import read_policy
from tests.train.harness import run_ranks

SCRIPT = Path(__file__).parent / "checks" / "axes.py"


POLICY = """
min_bytes = 64
[tp]
forward = "int8:block=32"
backward = "fp8"
[pp]
codec = "int8:block=32"
"""


def check(ranks: int, cases: list[list[str]]) -> None:
    done = run_ranks(ranks, SCRIPT, json.dumps(cases), timeout=90)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{len(cases)} cases, 0 problems" in done.stdout


EXPERTS = "--dp 2 --experts 4 --expert-every 1"
TENTH = "--pp-neurons 0.1 --lr 1e-4"  # so slow that the share is the same in all steps
CODES = "--tp-autoencoder 8 --tp-autoencoder-from 1"
OTHERS = [
    "--dp 2 --dtype bf16 --schedule cdp-v2 --clip 0 --micro-batches 1",
    "--pp 2 --dtype bf16 --schedule local",
    "--pp 2 --dtype bf16 --schedule interleaved --virtual-stages 2",
    EXPERTS,
    f"{EXPERTS} --dtype bf16",
]


@pytest.mark.long
@pytest.mark.timeout(100)
def test_replicas_reduce_once_a_step_compute_in_bf16_and_again():
    check(
        2,
        [
            ["replicas_reduce_once", "--dp 2 --micro-batches 1", "--dp 2 --global-batch 16"],
            ["bf16_is_near_and_half_as_long", "--dp 2", "--dp 2 --dtype bf16"],
            ["bf16_is_near_and_half_as_long", EXPERTS, f"{EXPERTS} --dtype bf16"],
            *(["bits_are_equal", way, f"{way} --recompute blocks"] for way in OTHERS),
            ["bits_are_equal", "--pp 2", "--pp 2 --recompute blocks --recompute-blocks 1"],
            ["uneven_stages_train_alike", "--pp 2", "--pp 2 --stage-layers 3 1"],
            ["uneven_stages_train_alike", "--pp 2", "--pp 2 --stage-layers 1 3 --schedule gpipe"],
            ["codes_are_summed", f"--pp 2 {CODES}", f"--tp 2 {CODES}", f"--tp 2 --sequence-parallel {CODES}"],
            ["bits_are_equal", f"--tp 2 {CODES}", f"--tp 2 {CODES} --recompute blocks"],
        ],
    )


TWO = "--pp 2 --tp 2 --micro-batches 3"


@pytest.mark.long
@pytest.mark.timeout(100)
def test_recomputed_blocks_give_the_same_bits_and_parts_of_sequences_halve_what_stages_send(tmp_path):
    (tmp_path / "policy.toml").write_text(POLICY)
    other = f"--policy {tmp_path}/policy.toml"
    parts = f"{TWO} --sequence-parallel"
    ways = [
        "",
        "--policy int8:block=128:min_bytes=0",
        f"{other} --schedule 2bw",
        f"{other} --sequence-parallel",
    ]
    recomputed = [
        ["recomputed_bits_are_equal", f"{TWO} {way}", f"{TWO} {way} --recompute blocks"] for way in ways
    ]
    check(4, [["pipeline_sends_half", TWO, parts], *recomputed])


@pytest.mark.long
@pytest.mark.timeout(100)
def test_bf16_is_near_fp32_and_sends_half_as_much_uncompressed(tmp_path):
    (tmp_path / "policy.toml").write_text(POLICY)
    all_of_it = f"{TWO} --sequence-parallel --dtype bf16 --policy {tmp_path}/policy.toml"
    check(
        4,
        [
            ["bf16_is_near_and_half_as_long", TWO, f"{TWO} --dtype bf16"],
            ["bf16_is_near_and_half_as_long", f"{TWO} --schedule 2bw", f"{TWO} --schedule 2bw --dtype bf16"],
            ["recomputed_bits_are_equal", all_of_it, f"{all_of_it} --recompute blocks"],
            ["sends_shrink", TWO, f"{TWO} {TENTH}"],
            ["sends_shrink", f"{TWO} --dtype bf16", f"{TWO} --dtype bf16 --schedule 2bw {TENTH}"],
        ],
    )


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ('{ codec = "int8:block=32", warmup_steps = 2 }', "warmup_steps"),
        ('"randomblock:ratio=0.1"', "randomblock"),
    ],
)
def test_2bw_recomputes_no_messages_that_differ_from_step_to_step(tmp_path, said, named):
    policy = tmp_path / "policy.toml"
    policy.write_text(f"[tp]\nall_reduce = {said}\n")
    given = {"pp": 2, "tp": 2, "recompute": "blocks", "policy": str(policy)}
    read_policy(TrainConfig(**given))
    with pytest.raises(ConfigError, match=f"same in every step: policy .* has {named}.* for all_reduce"):
        read_policy(TrainConfig(**given, schedule="2bw"))


def test_recomputed_blocks_keep_their_inputs_alone():
    shape, batch = ModelShape(vocab_size=50, layers=3, d_model=16, heads=2, seq_len=8), 2
    x = torch.zeros(batch, shape.seq_len, dtype=torch.int64)
    held = []
    for recomputed in (0, 2, None):
        model = build_gpt(shape, 1)
        recompute_blocks(model, recomputed)
        saved: dict[int, Tensor] = {}  # keeps the storages, so that their addresses are not given to others
        with torch.autograd.graph.saved_tensors_hooks(partial(note, saved), lambda tensor: tensor):
            model.hidden(x)
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()} | {
            x.untyped_storage().data_ptr()
        }
        held.append(sum(t.untyped_storage().nbytes() for at, t in saved.items() if at not in weights))
    stream, numbers = batch * shape.seq_len * shape.d_model * 4, batch * shape.seq_len * 4
    # A block's input; a norm's output, queries, keys, values, attention's output; the sum in the middle; a norm's
    # output, the MLP's inside before and after GELU. Each token has two numbers for each norm, one for each head.
    block = (1 + 5 + 1 + 9) * stream + (2 * 2 + shape.heads) * numbers
    assert held == [shape.layers * block, (shape.layers - 2) * block + 2 * stream, shape.layers * stream]


def note(saved: dict[int, Tensor], tensor: Tensor) -> Tensor:
    saved[tensor.untyped_storage().data_ptr()] = tensor
    return tensor
