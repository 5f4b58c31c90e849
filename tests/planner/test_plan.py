"""``hybridcomp plan``: what it offers, what it writes, and what it says of wrong input."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hybridcomp.cli.main import main
from hybridcomp.errors import ConfigError
from hybridcomp.policy import load_policy
from hybridcomp_lab.planner.budget import BUDGETS, NONE, codecs_of, policy_of
from hybridcomp_lab.planner.critical import critical_path, shares, write_trace
from hybridcomp_lab.planner.estimate import Estimator
from hybridcomp_lab.planner.layouts import Wish, layouts
from hybridcomp_lab.planner.models import MODELS, model_config
from hybridcomp_lab.planner.plan import Plan
from hybridcomp_lab.planner.search import find_plans
from hybridcomp_lab.planner.site import read_site
from hybridcomp_lab.planner.step.prediction import predict_step
from hybridcomp_lab.planner.step.replay import Span
from hybridcomp_lab.planner.step.writing import Writer
from hybridcomp_lab.train.checks import check_config
from hybridcomp_lab.train.config import TrainConfig
from hybridcomp_lab.train.reading import parse
from hybridcomp_lab.train.start import read_policy
from tests.train.harness import TINY, train

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "cluster_16x8.toml"
SMALL = "layers = 4\nd_model = 64\nheads = 4\nseq_len = 32\nvocab_size = 256\n"
SITE = """
version = 1
[cluster]
hosts = 2
ranks_per_host = 2
memory = 1e9
[compute]
flops = 1e11
bandwidth = 1e10
[network]
latency = 1e-4
bandwidth = 2.5e7
"""


@pytest.fixture
def files(tmp_path):
    (tmp_path / "site.toml").write_text(SITE)
    (tmp_path / "small.toml").write_text(SMALL)
    return tmp_path


def plan(folder, arguments: str, capsys) -> str:
    assert main(["plan", "--profile", str(folder / "site.toml"), *arguments.split()]) == 0
    return capsys.readouterr().out


def fails(arguments: list[str], capsys) -> str:
    assert main(["plan", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("hybridcomp plan: error: ")
    return said


def test_parts_of_tensors_are_on_one_host_and_replicas_on_several(files):
    """As the trainer numbers its ranks: those of tp beside one another."""
    cluster = dataclasses.replace(read_site(str(files / "site.toml")), hosts=6, ranks_per_host=2)
    config = TrainConfig(policy="none", layers=4, d_model=64, heads=4, seq_len=32, vocab_size=256)
    written = Writer(dataclasses.replace(config, pp=2, dp=3, tp=2), cluster, load_policy("none"))
    for program, hosts in zip(written.programs(1), (range(3), range(3, 6)), strict=True):
        assert program.loads.get("tp", {}) == {}  # nothing leaves a host
        assert program.loads["dp"] == dict.fromkeys(hosts, 2)  # a group for each part


# -- the example of a cluster -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def example():
    model = dataclasses.replace(model_config("gpt2-xl"), dtype="bf16")
    cluster = read_site(str(EXAMPLE))
    return cluster, find_plans(Wish(model, 512), cluster, 5)


def test_plans_for_128_gpus_are_ranked_and_differ(example):
    cluster, plans = example
    assert cluster.ranks == 128
    speeds = [plan.prediction.samples_per_second for plan in plans]
    assert len(plans) == 5
    assert speeds == sorted(speeds, reverse=True)
    kinds = {
        (p.config.pp, p.config.dp, p.config.tp, p.config.schedule, p.config.virtual_stages) for p in plans
    }
    assert len(kinds) == 5
    for one in plans:
        check_config(one.config)
        assert one.config.ranks == 128
        assert one.config.dp * one.config.replica_batch == 512
        assert one.prediction.memory.total <= cluster.memory


def test_no_layout_that_was_left_out_is_much_better(example):
    cluster, plans = example
    wish = Wish(dataclasses.replace(model_config("gpt2-xl"), dtype="bf16"), 512)
    every = layouts(wish, 16, 8)
    left_out = [c for c in every if c.pp <= 4][::7]
    estimator = Estimator(cluster, wish.budget)
    best = plans[0].prediction.samples_per_second
    for config in left_out:
        found = predict_step(config, cluster, policy_of(estimator.estimate(config).codecs))
        assert found.samples_per_second <= best * 1.01, config


def test_compression_is_worth_it_on_slow_links_alone(example):
    cluster, plans = example
    wish = Wish(dataclasses.replace(model_config("gpt2-xl"), dtype="bf16"), 512)
    network = dataclasses.replace(cluster.profile.network, bandwidth=1e13, latency=1e-7)
    fast = dataclasses.replace(cluster, profile=dataclasses.replace(cluster.profile, network=network))
    assert plans[0].compresses
    assert not find_plans(wish, fast, 1)[0].compresses


def test_the_example_says_of_every_value_where_it_is_from():
    text = EXAMPLE.read_text()
    assert "NOTHING HERE WAS MEASURED BY US" in text
    for line in text.partition("# Codecs")[0].splitlines():
        if "=" in line and not line.startswith(("#", "version", "hosts", "ranks_per_host")):
            assert "#" in line, line


# -- the command ------------------------------------------------------------------------------------------


def test_the_command_prints_a_table_and_json(files, capsys):
    job = f"--model {files}/small.toml --batch 16 --top 3"
    text = plan(files, job, capsys)
    words = " ".join(text.split())  # lines are wrapped
    assert "Predicted from" in words
    assert "not measured" in words
    record = json.loads(plan(files, f"{job} --json", capsys))
    assert record["predicted"] is True
    assert len(record["plans"]) == 3
    assert record["plans"][0]["share_of_best"] == 1.0
    for one in record["plans"]:
        assert one["pp"] * one["dp"] * one["tp"] == 4
        assert one["memory_bytes"]["total"] <= 1e9
        assert str(f"{one['samples_per_second']:,.1f}") in text


def test_budgets_limit_codecs(files, capsys):
    allowed = {"exact": {"none", "exponent"}, "safe": {"none", "exponent", "bf16", "int8"}}
    for budget in BUDGETS:
        job = f"--model {files}/small.toml --batch 16 --top 9 --json --loss-budget {budget}"
        plans = json.loads(plan(files, job, capsys))["plans"]
        used = {codec for one in plans for codec in one["codecs"].values()}
        assert used <= allowed.get(budget, used)
        assert any(one["schedule"] == "2bw" for one in plans) == (budget == "aggressive")


@pytest.mark.parametrize("budget", BUDGETS)
def test_policies_of_a_budget_suit_the_trainer(budget, tmp_path):
    for axis in ("dp", "pp", "tp", "embedding"):
        options = codecs_of(axis, budget)
        assert options[0].name == "none"
        for codec in options:
            policy_of({axis: codec}).require_axes(TrainConfig(tie_embeddings=True, pp=2).axes)


@pytest.mark.long
def test_what_it_writes_is_what_the_trainer_runs(files, capsys, monkeypatch):
    monkeypatch.chdir(files)
    record = json.loads(plan(files, "--model small.toml --batch 16 --json --write run.toml", capsys))
    best = record["plans"][0]
    config = parse(["--config", "run.toml"])
    assert {name: getattr(config, name) for name in ("pp", "dp", "tp", "schedule", "micro_batches")} == {
        name: best[name] for name in ("pp", "dp", "tp", "schedule", "micro_batches")
    }
    policy = read_policy(config)
    assert policy.compresses == any(codec != "none" for codec in best["codecs"].values())
    program = [sys.executable, "-m", "hybridcomp", "train", "--config", "run.toml", "--steps", "2"]
    done = subprocess.run(
        [*program, "--out", "run", "--data", __file__, "--eval-batches", "1"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=files,
    )
    assert done.returncode == 0, done.stderr
    assert (files / "run" / "metrics.jsonl").read_text().count("\n") >= 2


def test_explain_draws_the_critical_path_and_a_trace(files, capsys):
    plan(files, f"--model {files}/small.toml --batch 16 --explain 2 --out {files}", capsys)
    page = (files / "plan.html").read_text()
    assert "plan 2" in page
    assert "Predicted, not measured" in page
    assert "critical path" in page
    assert "https://" not in page.partition("<script")[0]  # needs no other file
    trace = json.loads((files / "trace.json").read_text())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert any(event["args"]["critical"] for event in spans)
    step = trace["otherData"]["plan"]["step_seconds"]
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(1e6 * step, rel=0.01)


def test_the_critical_path_follows_what_was_waited_for():
    spans = [
        Span(0, "compute", "forward", 0.0, 1.0),
        Span(0, "compute", "other", 1.0, 1.5),
        Span(0, "pp", "activations", 1.0, 3.0),
        Span(1, "compute", "early", 0.0, 0.5),
        Span(1, "compute", "forward", 3.0, 4.0),
        Span(1, "dp", "bucket", 4.2, 5.0),
    ]
    path = critical_path(spans)
    assert [(s.rank, s.name) for s in path] == [
        (0, "forward"),
        (0, "activations"),
        (1, "forward"),
        (1, "bucket"),
    ]
    assert shares(path) == pytest.approx({"compute": 2.0, "pp": 2.0, "dp": 0.8, "waiting": 0.2})
    assert critical_path([]) == []
    with pytest.raises(ConfigError, match="cannot write the trace"):
        write_trace(spans, Path("/proc/absent/trace.json"), {})


def test_scale_draws_curves_for_each_rate_and_policy(files, capsys):
    job = f"--model {files}/small.toml --batch 16 --scale 2:8 --out {files}"
    record = json.loads(plan(files, f"{job} --json", capsys))
    points = record["points"]
    assert record["simulated"] is True
    assert {point["ranks"] for point in points} == {2, 4, 8}
    assert {"none", "exact", "hybrid"} <= {point["policy"] for point in points}
    slowest = min(point["rate"] for point in points)
    step = {(p["ranks"], p["policy"]): p["step"] for p in points if p["rate"] == slowest}
    assert step[8, "hybrid"] < step[8, "none"]
    assert step[8, "exact"] < 0.95 * step[8, "none"]  # by message, where that is faster
    assert all(step[ranks, "exact"] < 1.01 * step[ranks, "none"] for ranks in (2, 4, 8))
    for point in points:
        assert 0 < point["efficiency"] <= 1
    page = (files / "scale.html").read_text()
    assert "Simulated, not measured" in page
    assert "efficiency" in page
    assert "Simulated, not measured" in " ".join(plan(files, job, capsys).split())  # wrapped


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"schedule": "cdp-v1", "micro_batches": 1}, "cdp-v1 is not predicted; allowed: gpipe"),
        ({"sync": "local_sgd:every=4"}, "not predicted: leave sync local_sgd:every=4 out"),
        ({"pp": 2, "dp": 2, "schedule": "local", "synthetic_labels": True}, "leave synthetic_labels out"),
        ({"tp_autoencoder": 16}, "not predicted: leave tp_autoencoder 16 out"),
        ({"pp": 2, "dp": 2, "pp_neurons": 0.5}, "not predicted: leave pp_neurons 0.5 out"),
    ],
)
def test_what_is_not_predicted_is_named(files, more, words):
    config = TrainConfig(**{"dp": 4, "layers": 4, "d_model": 64, "heads": 4, "seq_len": 32, **more})
    with pytest.raises(ConfigError, match=words):
        predict_step(config, read_site(str(files / "site.toml"), 2, 2))


# -- wrong input ------------------------------------------------------------------------------------------


def test_wrong_input_is_one_line_that_says_what_works(files, capsys):
    site, small = str(files / "site.toml"), str(files / "small.toml")
    usual = ["--profile", site, "--model", small, "--batch", "16"]

    def said(*arguments: str) -> str:
        return fails([*usual, *arguments], capsys)

    assert "unknown model 'gpt2-xxl'; did you mean gpt2-xl?" in said("--model", "gpt2-xxl")
    assert "cannot read" in said("--model", "absent.toml")
    assert "nothing fits" in said("--memory", "1M")
    needed = said("--memory", "1M").partition("--memory ")[2].split()[0]
    assert main(["plan", *usual, "--memory", needed]) == 0
    assert "its hosts is 2, and --hosts asks for 3; --hosts 2 is the most" in said("--hosts", "3")
    assert "of other machines" in said("--ppn", "4")
    assert "--top must be at least 1" in said("--top", "0")
    assert "--scale 8:4: it must be" in said("--scale", "8:4")
    assert "--scale 3:5: none of 3, 6" in said("--scale", "3:5")
    assert "there are plans 1 to" in said("--explain", "0")
    assert "there are plans 1 to" in said("--explain", "99")
    assert "its suffix must be .toml" in said("--write", str(files / "run.json"))
    assert "--batch must be at least 1" in said("--batch", "0")


def test_ranks_that_do_not_divide_are_told_what_does(files, capsys):
    (files / "odd.toml").write_text("layers = 3\nd_model = 60\nheads = 5\nseq_len = 32\nvocab_size = 256\n")
    text = fails(
        ["--profile", str(files / "site.toml"), "--model", str(files / "odd.toml"), "--batch", "7"], capsys
    )
    assert "4 ranks cannot be split" in text
    offered = text.split("nearest that works: ")[1].split()
    works = ["--profile", str(files / "site.toml"), "--model", str(files / "odd.toml")]
    assert main(["plan", *works, "--batch", offered[1]]) == 0


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (
            SITE.replace("[compute]\nflops = 1e11\nbandwidth = 1e10\n", ""),
            "says nothing of how fast a rank computes",
        ),
        (SITE.replace("[cluster]\nhosts = 2\nranks_per_host = 2\nmemory = 1e9\n", ""), "say --hosts N"),
        (SITE.replace("hosts = 2\n", "hosts = 2.5\n"), r"cluster.hosts must be an integer"),
        (SITE.replace("memory", "memroy"), "cluster.memroy is unknown; allowed: hosts"),
        (SITE.replace("memory = 1e9", "speeds = [1.0]"), "cluster.speeds has 1 numbers for 2 hosts"),
        (
            SITE.replace("memory = 1e9", "rates = [1.0, -1]"),
            "cluster.rates must be a list of numbers above 0",
        ),
        (SITE.replace("memory = 1e9", "cores = true"), "cluster.cores must be a number above 0"),
        (SITE.replace("flops = 1e11", "flops = 0"), "flops must be positive"),
        (SITE.replace("[network]", "[networks]"), "networks is unknown"),
        ("hosts = ", "not TOML"),
    ],
)
def test_a_wrong_description_of_a_cluster_is_named(tmp_path, text, what):
    path = tmp_path / "site.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=what) as raised:
        read_site(str(path))
    assert str(path) in str(raised.value)


def test_without_a_profile_it_says_where_one_comes_from(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HYBRIDCOMP_PROFILE", str(tmp_path / "absent.toml"))
    said = fails(["--model", "gpt2", "--batch", "8"], capsys)
    assert (
        f"there is no profile at {tmp_path}/absent.toml: `hybridcomp doctor --calibrate` writes one" in said
    )


def test_uneven_stages_are_predicted_and_suit_uneven_hosts(tmp_path):
    path = tmp_path / "site.toml"
    path.write_text(
        SITE.replace("memory = 1e9", "speeds = [1.0, 0.5]").replace("per_host = 2", "per_host = 1")
    )
    cluster = read_site(str(path))
    model = TrainConfig(layers=6, d_model=128, heads=4, seq_len=64, vocab_size=256, pp=2, micro_batches=8)
    seconds = {
        cut: predict_step(dataclasses.replace(model, stage_layers=cut), cluster, policy_of({})).seconds
        for cut in ((3, 3), (4, 2), (2, 4))
    }
    even = predict_step(model, cluster, policy_of({})).seconds
    assert seconds[4, 2] < seconds[3, 3] == even < seconds[2, 4]


def test_models_have_the_sizes_that_they_are_known_for():
    # Millions of parameters; of the GPT-2 family without its biases.
    known = {"gpt2": 124, "gpt2-medium": 354, "gpt2-large": 773, "gpt2-xl": 1557, "llama-7b": 6700}
    for name, millions in known.items():
        values = dict(MODELS[name])
        d, layers, vocab = values["d_model"], values["layers"], values["vocab_size"]
        heads = 1 if values.get("tie_embeddings") else 2
        assert (12 * layers * d * d + heads * vocab * d + values["seq_len"] * d) / 1e6 == pytest.approx(
            millions, rel=0.03
        )
        check_config(model_config(name))


def test_fields_that_a_plan_decides_are_not_taken_from_a_model(tmp_path):
    path = tmp_path / "model.toml"
    path.write_text(SMALL + 'dp = 4\nrecompute_blocks = 2\nschedule = "gpipe"\nlr = 0.5\n')
    config = model_config(str(path))
    assert (config.dp, config.schedule, config.lr) == (1, "1f1b", 0.5)


def test_the_guide_shows_what_was_committed():
    guide = (ROOT / "docs" / "plan.md").read_text()
    for one in json.loads((ROOT / "benchmarks/results/planner/plan_16x8.json").read_text())["plans"]:
        row = f"| {one['pp']} x {one['dp']} x {one['tp']} |"
        lines = [line for line in guide.splitlines() if line.startswith(row)]
        assert any(f"| {one['samples_per_second']:,.0f} |" in line for line in lines), one
    for one in json.loads((ROOT / "benchmarks/results/planner/recompute.json").read_text())["rows"]:
        assert f"| {one['predicted'] / 1e6:.1f} | {one['measured'] / 1e6:.1f} |" in guide
    for model in MODELS:
        assert f"`{model}`" in guide


@pytest.mark.parametrize(
    ("flags", "axis", "steps"),
    [
        ("onebit-adam --freeze-step 3 --policy onebit", "momentum", 3),
        ("onebit-lamb --freeze-step 3 --policy int8", "dp", 3),
        # The variance is renewed at steps 1, 2, 3 and 5; 16 renewals before the first doubling would be all steps.
        ("zero-one-adam --freeze-step 1 --var-update-scaler 1 --policy none", "dp", 2),
    ],
)
def test_momenta_are_predicted_at_the_bytes_that_a_run_counts(flags, axis, steps, files):
    arguments = f"{TINY} --d-model 64 --dp 2 --steps 6 --optimizer {flags} --out run"
    done = train(arguments, files)
    assert done.returncode == 0, done.stderr
    summary = json.loads((files / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    sent = [row for row in summary["comm"] if row["codec"].startswith("sign")]
    assert [row["axis"] for row in sent] == [axis]
    config = parse(arguments.split())
    cluster = read_site(str(files / "site.toml"), 1, 2)
    prediction = predict_step(config, cluster, read_policy(config))
    assert prediction.wire_bytes["dp"] == sent[0]["wire_bytes"] / steps
    assert prediction.memory.residuals > 0


def test_a_plan_tells_how_momenta_go(files, capsys):
    (files / "small.toml").write_text(f'{SMALL}optimizer = "zero-one-adam"\nvar_update_scaler = 4\n')
    arguments = f"--model {files / 'small.toml'} --batch 16 --write {files / 'run.toml'}"
    assert re.search(r"dp none, momentum sign \+ ef", plan(files, arguments, capsys))
    written = parse(["--config", str(files / "run.toml")])
    assert (written.optimizer, written.var_update_scaler) == ("zero-one-adam", 4)
    (best, *_) = json.loads(plan(files, f"{arguments} --json", capsys))["plans"]
    assert best["codecs"]["momentum"] == "sign + ef"
    signs = best["wire_bytes"]["dp"]
    (files / "small.toml").write_text(SMALL)
    fixed = dataclasses.replace(written, optimizer="adamw", var_update_scaler=16)
    assert signs < predict_step(fixed, read_site(str(files / "site.toml"), 2, 2)).wire_bytes["dp"] / 25


def test_a_plan_names_the_codec_that_the_optimizer_gives_momenta(monkeypatch):
    monkeypatch.setattr("hybridcomp.torch.momentum.optimizer.SIGN", "int8:block=64")
    codecs, config = {"dp": NONE, "pp": NONE}, TrainConfig(optimizer="onebit-adam", dp=2)
    assert Plan(config, codecs, prediction=None).codec_names == {"dp": "none", "momentum": "int8 + ef"}
    alone = dataclasses.replace(config, dp=1, pp=2)
    assert Plan(alone, codecs, prediction=None).codec_names == {"pp": "none"}
