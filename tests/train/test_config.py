"""The configuration: defaults, TOML, command line, and what is wrong with it."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from hybridcomp.errors import ConfigError
from hybridcomp.policy.toml import parse_policy
from hybridcomp_lab.train.checks import check_config
from hybridcomp_lab.train.config import TrainConfig
from hybridcomp_lab.train.reading import parse, read_toml, to_toml

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_the_command_line_overrides_the_file_and_the_file_the_defaults(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('layers = 4\nheads = 8\nlr = 1\npolicy = "none"\n')
    config = parse(["--config", str(file), "--heads", "2"])
    assert (config.layers, config.heads, config.lr, config.policy) == (4, 2, 1.0, "none")
    assert config.seq_len == TrainConfig().seq_len
    assert parse([f"--config={file}"]).heads == 8


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("dp = 2\nlayer = 3\n", ["line 2", "key layer", "did you mean layers"]),
        ("dp = 2\n\n# why\nheads = 'two'\n", ["line 4", "key heads", "an integer", "'two'"]),
        ("lr = 1e-3\nsteps = 2.5\n", ["line 2", "key steps", "an integer"]),
        ("steps = true\n", ["line 1", "key steps", "an integer"]),
        ("backend = 'nccl'\n", ["line 1", "key backend", "hybridcomp, gloo"]),
        ("dp = 2\npp = = 2\n", ["line 2", "key pp"]),
        ("dp = 2\ntp = ", ["line 2", "key tp"]),
        ("dp = 2\n[model]\nlayers = 3\n", ["line 2", "key model", "unknown"]),
        ("config = 'other.toml'\n", ["line 1", "key config", "unknown"]),
    ],
)
def test_a_wrong_file_is_named_with_line_and_key(tmp_path, text, parts):
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_toml(str(file))
    assert str(caught.value).startswith(str(file))
    for part in parts:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("steps = " + 5000 * "[" + 5000 * "]", "nested too deep"),
        ("steps = 1" + 5000 * "0", "4300 digits"),
        ("steps = 0x1" + 5000 * "0", "within 63 bits"),
        ("timeout = 0x1" + 5000 * "0", "within 63 bits"),
    ],
    ids=["lists", "decimal", "hexadecimal", "float"],
)
def test_a_file_that_takes_the_parser_to_its_limits_is_named(tmp_path, text, part):
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=part):
        read_toml(str(file))


def test_lists_are_read_and_written(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("pp = 2\nlayers = 8\nstage_layers = [5, 3]\n")
    config = parse(["--config", str(file)])
    assert config.cut == config.stage_layers == (5, 3)
    assert [list(config.blocks_of(i)) for i in (0, 1)] == [[0, 1, 2, 3, 4], [5, 6, 7]]
    assert to_toml({"stage_layers": config.stage_layers}) == "stage_layers = [5, 3]\n"
    for wrong in ("5", '"5, 3"', "[5, 3.0]", "[true, 7]"):
        file.write_text(f"pp = 2\nstage_layers = {wrong}\n")
        with pytest.raises(ConfigError, match="line 2, key stage_layers: must be a list of integers"):
            read_toml(str(file))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*absent\.toml"):
        parse(["--config", str(tmp_path / "absent.toml")])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--layers 3 --pp 2", r"layers \(3\) must be divisible by pp \(2\)"),
        ("--pp 2 --stage-layers 5 2", r"stage_layers \(5, 2\) must be 2 numbers .* add up to layers \(8\)"),
        ("--pp 2 --stage-layers 8 0", r"stage_layers \(8, 0\) must be 2 numbers from 1 up"),
        ("--pp 2 --stage-layers 8", r"stage_layers \(8\) must be 2 numbers"),
        ("--dp 2 --schedule cdp-v1 --micro-batches 1 --stage-layers 4 4", "schedule cdp-v1 has none"),
        (
            "--recompute-blocks 2",
            r"recompute_blocks \(2\) counts blocks .* recompute must be blocks, not none",
        ),
        (
            "--pp 2 --recompute blocks --recompute-blocks 5",
            r"recompute_blocks \(5\) must be from 1 to .* \(4\)",
        ),
        ("--heads 4 --tp 3", r"heads \(4\) must be divisible by tp \(3\)"),
        ("--heads 3", r"d_model \(256\) must be divisible by heads \(3\)"),
        ("--pp 4 --micro-batches 2", r"micro_batches \(2\) must be at least pp \(4\)"),
        ("--schedule gpipe", "schedule gpipe is of a pipeline: pp must be at least 2, not 1"),
        ("--schedule 2bw", "schedule 2bw is of a pipeline: pp must be at least 2, not 1"),
        ("--pp 2 --schedule interleaved", r"virtual_stages \(1\) must be at least 2"),
        ("--pp 2 --virtual-stages 2", r"virtual_stages \(2\) must be 1 with schedule 1f1b"),
        (
            "--pp 2 --schedule interleaved --virtual-stages 3",
            r"layers \(8\) must be divisible by pp \* virtual_stages \(6\)",
        ),
        (
            "--pp 2 --schedule interleaved --virtual-stages 2 --micro-batches 5",
            r"micro_batches \(5\) must be divisible by micro_batches // pp \(2\)",
        ),
        ("--schedule cdp-v1", "schedule cdp-v1 is of replicas: dp must be at least 2, not 1"),
        ("--schedule cdp-v1 --dp 2", r"micro_batches \(4\) must be 1 with schedule cdp-v1"),
        ("--schedule cdp-v1 --dp 2 --pp 2 --micro-batches 1", r"pp \(2\) must be 1 with schedule cdp-v1"),
        ("--schedule cdp-v1 --dp 2 --tp 2 --micro-batches 1", r"tp \(2\) must be 1 with schedule cdp-v1"),
        ("--schedule cdp-v1 --dp 3 --micro-batches 1", r"layers \(8\) must be divisible by dp \(3\)"),
        ("--schedule cdp-v2 --dp 2 --micro-batches 1", r"clip \(1.0\) must be 0 with schedule cdp-v2"),
        ("--global-batch 10", r"global_batch \(10\) must be a multiple of dp \* micro_batch_size \(4\)"),
        ("--global-batch 4 --dp 2", r"global_batch \(4\) must be a multiple of dp \* micro_batch_size \(8\)"),
        ("--global-batch 0", r"global_batch \(0\) must be a multiple"),
        (
            "--global-batch 32 --micro-batches=4",
            r"global_batch \(32\) must be dp \* micro_batches \* micro_batch_size \(16\); leave micro_batches \(4\)",
        ),
        ("--sequence-parallel", "sequence_parallel splits over tp, which must be at least 2, not 1"),
        (
            "--sequence-parallel --heads 2 --tp 2 --seq-len 31",
            r"seq_len \(31\) must be divisible by tp \(2\) with sequence_parallel",
        ),
        (
            "--optimizer onebit-adam",
            "onebit-adam has replicas exchange momenta: dp must be at least 2, not 1",
        ),
        ("--optimizer zero-one-adam --dp 2 --shard zero1", "in every step: shard must be none, not zero1"),
        (
            "--optimizer onebit-adam --dp 2 --sync local_sgd:every=4",
            "sync must be left out, not local_sgd:every=4",
        ),
        (
            "--optimizer onebit-adam --dp 2 --pp 2 --schedule 2bw",
            "schedule must be 1f1b or gpipe, not 2bw",
        ),
        ("--optimizer onebit-adam --dp 2 --tp 2", "onebit-adam with tp 2: freeze_step must be given"),
        ("--optimizer onebit-lamb --dp 2 --tp 2 --freeze-step 9", "tp must be 1, not 2"),
        (
            "--freeze-step 9",
            r"freeze_step \(9\) ends the warm-up .* must be one of onebit-adam, .* not adamw",
        ),
        ("--var-update-scaler 0 --optimizer zero-one-adam --dp 2", "var_update_scaler must be positive"),
        (
            "--var-update-scaler 4 --optimizer onebit-adam --dp 2",
            r"var_update_scaler \(4\) is of optimizer zero-one-adam, not of onebit-adam",
        ),
        ("--shard zero1", "shard zero1 is of replicas: dp must be at least 2, not 1"),
        (
            "--shard zero1 --dp 2 --pp 2 --schedule 2bw",
            "schedule must be one of 1f1b, gpipe, interleaved, not 2bw",
        ),
        ("--synthetic-labels --pp 2", "schedule must be local, not 1f1b"),
        ("--predict-weights --dp 2", "schedule must be one of 2bw, cdp-v1, cdp-v2, not 1f1b"),
        (
            "--predict-weights --dp 2 --micro-batches 1 --schedule cdp-v1 --shard stages",
            "predict_weights must be false with shard stages",
        ),
        ("--shard stages --dp 2", "shard stages hands .*: schedule must be one of cdp-v1, cdp-v2, not 1f1b"),
        ("--shard zero1 --dp 2 --pp 2 --tie-embeddings", "tie_embeddings must be false, or pp 1"),
        ("--experts 4 --tp 2 --sequence-parallel", "sequence_parallel must be false beside them"),
        ("--experts 4 --dp 3", r"experts \(4\) must be divisible by dp \(3\)"),
        ("--experts -2", "experts must not be negative, as -2 is"),
        ("--experts 4 --expert-every 9", r"expert_every \(9\) must be at most layers \(8\)"),
        ("--experts 4 --expert-every 0", "expert_every must be positive and finite, not 0"),
        ("--experts 4 --capacity-factor 0", "capacity_factor must be positive and finite, not 0"),
        ("--experts 4 --balance-loss -1", "balance_loss must not be negative"),
        (
            "--experts 4 --dp 2 --micro-batches 1 --schedule cdp-v1",
            r"experts \(4\) are met by .*: schedule must be one of 1f1b, gpipe, interleaved, not cdp-v1",
        ),
        ("--dp 0", "dp must be positive and finite, not 0"),
        ("--lr nan", "lr must be positive and finite, not nan"),
        ("--timeout inf", "timeout must be positive and finite, not inf"),
        ("--timeout 1e300", r"timeout must be at most 1e\+08 s, not 1e\+300"),
        ("--weight-decay inf", "weight_decay must be finite, not inf"),
        ("--min-lr inf", "min_lr must be finite, not inf"),
        ("--seed 9223372036854775808", r"seed must be below 2\*\*63, not 9223372036854775808"),
        ("--clip -1", "clip must not be negative"),
        ("--val-fraction 1", "val_fraction must be above 0 and below 1"),
        ("--beta2 1", "beta2 must be at least 0 and below 1"),
        ("--vocab-size 1", "vocab_size must be from 2"),
    ],
)
def test_values_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        parse(arguments.split())


def test_micro_batches_follow_from_the_global_batch(tmp_path):
    config = parse(["--global-batch", "48", "--dp", "2", "--micro-batch-size", "3"])
    assert (config.micro_batches, config.global_batch, config.tokens_per_step) == (8, 48, 48 * config.seq_len)
    assert parse(["--global-batch", "32", "--micro-batches", "8"]).micro_batches == 8
    file = tmp_path / "run.toml"
    file.write_text("global_batch = 32\n")
    assert parse(["--config", str(file)]).micro_batches == 8
    file.write_text(to_toml(dataclasses.asdict(config)))
    assert parse(["--config", str(file)]) == dataclasses.replace(config, config=str(file))
    file.write_text("micro_batches = 4\n")
    with pytest.raises(ConfigError, match="global_batch"):
        parse(["--config", str(file), "--global-batch", "32"])


def test_help_explains_every_field(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "240")
    with pytest.raises(SystemExit) as stop:
        parse(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for field in dataclasses.fields(TrainConfig):
        flag = field.name.replace("_", "-")
        entry = re.search(rf"(?m)^\W*--{flag}(?: \S+|, --no-{flag})\s(.*?)\(default", text, re.S)
        assert entry, field.name
        assert len(re.findall(r"\w+", entry[1])) >= 2, field.name


def test_a_written_configuration_reads_back_equal(tmp_path):
    config = TrainConfig(policy='a "quoted" \\ name\n.toml', lr=3e-5, vocab_size=70000, data=None, dp=2)
    file = tmp_path / "config.toml"
    file.write_text(to_toml(dataclasses.asdict(config)))
    assert TrainConfig(**read_toml(str(file))) == config
    assert "data" not in tomllib.loads(file.read_text())


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("train_*.toml")), ids=lambda path: path.name)
def test_the_examples_are_valid(path):
    config = parse(["--config", str(path)])
    assert config.ranks >= 1


DOCS = EXAMPLES.parent / "docs"
GUIDE, AXES, SHARING = ((DOCS / page).read_text() for page in ("schedules.md", "axes.md", "sharding.md"))


@pytest.mark.parametrize(
    "arguments", re.findall(r"^hybridcomp train ([^#\n]*)", GUIDE + AXES + SHARING, re.M)
)
def test_the_guides_have_valid_commands(arguments):
    parse(arguments.split())


def test_the_guide_names_every_schedule():
    offered = get_args(get_type_hints(TrainConfig)["schedule"])
    assert set(re.findall(r"--schedule (\S+)", GUIDE)) | {"1f1b"} == set(offered)


@pytest.mark.parametrize("field", ["global_batch", "sequence_parallel", "recompute", "dtype"])
def test_the_guide_to_axes_has_a_command_for_each(field):
    assert re.search(rf"(?m)^hybridcomp train .*--{field.replace('_', '-')}\b", AXES)


@pytest.mark.parametrize("text", re.findall(r"```toml\n(.*?)```", SHARING, re.S))
def test_the_guide_to_sharding_has_valid_policies(text):
    parse_policy(text, "sharding.md").require_axes(TrainConfig(experts=2).axes)


def test_there_are_examples():
    assert len(list(EXAMPLES.glob("train_*.toml"))) >= 2


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tp_autoencoder": 300}, r"tp_autoencoder must be from 0 to d_model \(256\), not 300"),
        ({"tp_autoencoder": -1}, r"tp_autoencoder must be from 0 to d_model \(256\), not -1"),
        ({"tp_autoencoder": 8, "tp_autoencoder_from": 8}, r"from 0 to below layers \(8\), not 8"),
        ({"tp_autoencoder": 8, "experts": 2, "dp": 2}, "tp_autoencoder must be 0 beside them"),
    ],
)
def test_autoencoders_fit_the_model(changes, told):
    with pytest.raises(ConfigError, match=told):
        check_config(TrainConfig(**changes))


def test_the_example_policy_is_valid():
    from hybridcomp_lab.train.start import read_policy

    assert read_policy(TrainConfig(policy=str(EXAMPLES / "policy.toml"))).compresses
