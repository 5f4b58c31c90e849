"""Replicas that synchronise rarely: their rule, what they send, what a checkpoint has, and what is refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from hybridcomp.errors import ConfigError, MismatchError
from hybridcomp_lab.train.checkpoints.resume import newest, read_checkpoint
from hybridcomp_lab.train.config import TrainConfig
from hybridcomp_lab.train.data import Batches
from hybridcomp_lab.train.generate import load_model
from hybridcomp_lab.train.model.gpt import loss_of
from hybridcomp_lab.train.reading import parse
from hybridcomp_lab.train.shares import decide, divide, read_shares
from hybridcomp_lab.train.start import agreed_text, check_agreement, prepare
from hybridcomp_lab.train.sync import parse_sync
from hybridcomp_lab.train.text import load_corpus
from tests.train.harness import TINY, metrics, run_ranks
from tests.train.same import losses, run_and_resume, stored, unequal

SCRIPT = Path(__file__).parent / "checks" / "synced.py"
CASES = [
    "--dp 4 --layers 1 --micro-batches 2 --sync local_sgd:every=3",
    "--dp 2 --tp 2 --layers 2 --micro-batches 1 --sync diloco:every=3,fragments=2,lr=0.5,momentum=0.8",
    "--dp 2 --pp 2 --layers 4 --micro-batches 2 --sync diloco:every=4,fragments=2,delay=3,alpha=0.25",
    "--dp 2 --tp 2 --layers 1 --micro-batches 1 --sequence-parallel --sync diloco:every=2,momentum=0",
    "--dp 2 --tp 2 --layers 1 --micro-batches 1 --sync gossip:every=2",
    "--dp 4 --layers 1 --micro-batches 2 --sync gossip:method=powergossip,graph=0-1,1-2,2-3,3-1",
    "--dp 2 --pp 2 --layers 2 --micro-batches 2 --sync gossip:method=powergossip,rank=2",
    "--dp 4 --layers 1 --micro-batches 1 --sync gossip:method=choco,codec=topk:ratio=0.1,gamma=0.3",
    "--dp 4 --layers 1 --micro-batches 1 --sync event:warmup=2,horizon=0.9,reach=1.5",
    "--dp 4 --layers 1 --micro-batches 3 --sync elastic:every=3",
    "--dp 2 --tp 2 --layers 2 --micro-batches 3 --sync elastic:every=2,least=2,lr=0.9,momentum=0.5",
    "--dp 4 --layers 1 --micro-batches 2 --sync elastic:every=4,shares=4-2-1-1",
    "--dp 4 --layers 1 --micro-batches 2 --sync elastic:every=2,frozen=FROZEN",
]
FROZEN = [(2, [3, 2, 2, 1]), (4, [1, 1, 1, 5])]


@pytest.mark.timeout(100)
def test_replicas_train_as_the_rule_says(tmp_path):
    frozen = tmp_path / "metrics.jsonl"
    rows = [{"kind": "train", "step": step, "replicas": {"shares": shares}} for step, shares in FROZEN]
    frozen.write_text("".join(json.dumps(row) + "\n" for row in [{"kind": "start"}, *rows]))
    done = run_ranks(4, SCRIPT, json.dumps([case.replace("FROZEN", str(frozen)) for case in CASES]))
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{len(CASES)} cases, 0 problems" in done.stdout


RUN = (
    f"{TINY} --dp 2 --steps 8 --lr 1e-2 --warmup-steps 1 --checkpoint-every 5 "
    "--sync diloco:every=4,fragments=2,delay=2"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Eight steps, which stop after the fifth, where one fragment is under way, and go on."""
    int4 = 'min_bytes = 256\ndp.all_reduce = { codec = "int4", feedback = "ef" }\n'
    return run_and_resume(tmp_path_factory.mktemp("sync"), RUN, int4, 5)


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_resumed_run_has_the_same_bits(run):
    again = run.parent / "again"
    assert losses(run)[5:] == losses(again)
    at = [stored(folder / "checkpoints" / "step-00000008") for folder in (run, again)]
    assert unequal(*at) == []
    pause = stored(run / "checkpoints" / "step-00000005")
    assert pause["pp0.tp0.schedule.under_way"].tolist() == [0, 1]
    assert at[0]["pp0.tp0.schedule.under_way"].tolist() == [0, 0]
    names = {key.removeprefix("pp0.tp0.model.") for key in pause if ".model." in key}
    assert names
    for name in names:
        one, other = (pause[f"pp0.tp0.dp{replica}.part.{name}"] for replica in (0, 1))
        ended = [at[0][f"pp0.tp0.{kind}.{name}"] for kind in ("model", "dp0.part", "dp1.part")]
        assert not torch.equal(one, other)
        assert all(torch.equal(tensor, ended[0]) for tensor in ended)
        assert pause[f"pp0.tp0.schedule.outer.{name}"].shape == one.shape


@pytest.mark.timeout(120)
def test_what_is_evaluated_is_what_is_generated_from(run):
    found = newest(run)
    assert found is not None
    model = load_model(read_checkpoint(found))
    config = TrainConfig(dp=2, layers=2, d_model=32, heads=2, seq_len=32, micro_batch_size=2, eval_batches=1)
    batches = Batches(load_corpus(str(run.parent / "text.txt"), None, 0.1, None), config)
    with torch.no_grad():
        (a,), (b,) = (map(torch.from_numpy, batches.evaluate(replica)) for replica in (0, 1))
        wanted = [loss_of(model(micro[:, :-1]), micro[:, 1:]).item() for micro in (a, b)]
    (summary,) = metrics(run, "summary")
    assert summary["val_loss"] == pytest.approx(sum(wanted) / 2, rel=1e-5)
    assert metrics(run, "start")[0]["parameters"] == sum(p.numel() for p in model.parameters())


def test_bytes_are_counted_where_they_are_sent(run):
    parameters = metrics(run, "start")[0]["parameters"]
    sent = [row["wire_bytes"]["dp"] for row in metrics(run, "train")]
    assert sent[0] < 1000  # reports of steps, not parameters
    assert sent == sorted(sent)
    (summary,) = metrics(run, "summary")
    # Two outer steps of each half, which two ranks send once each; the second half is averaged again at the end.
    whole = 2 * 4 * parameters
    assert 2.4 * whole < summary["plain_bytes"]["dp"] < 2.6 * whole
    assert (
        0.12 * summary["plain_bytes"]["dp"]
        < summary["wire_bytes"]["dp"]
        < 0.18 * summary["plain_bytes"]["dp"]
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("often:every=2", "the method must be one of local_sgd, diloco, elastic, gossip, event, not 'often'"),
        ("diloco", "lacks every, as in diloco:every=32"),
        (
            "diloco:every=2,each=3",
            "'each=3' must be KEY=VALUE; keys: every, fragments, delay, alpha, lr, momentum",
        ),
        ("local_sgd:every=2,fragments=2", "'fragments=2' must be KEY=VALUE; keys: every"),
        ("diloco:every=2,every=3", "every stands there twice"),
        ("diloco:every=2.5", "every must be an integer, not '2.5'"),
        ("diloco:every=4,alpha=half", "alpha must be a number, not 'half'"),
        ("diloco:every=0", "every must be at least 1, not 0"),
        ("diloco:every=4,fragments=5", r"fragments must be from 1 to every \(4\), not 5"),
        ("diloco:every=4,delay=4", r"delay must be from 0, and below every \(4\), not 4"),
        ("diloco:every=4,alpha=1.5", "alpha must be from 0 to 1, not 1.5"),
        ("diloco:every=4,lr=0", "lr must be positive and finite, not 0.0"),
        ("diloco:every=4,momentum=1", "momentum must be at least 0, and below 1, not 1.0"),
        ("elastic:every=4,least=0", "least must be at least 1, not 0"),
        ("elastic:every=4,gain=1", "gain must be at least 0, and below 1, not 1.0"),
        (
            "elastic:every=4,delay=1",
            "'delay=1' must be KEY=VALUE; keys: every, lr, momentum, least, gain, shares",
        ),
    ],
)
def test_a_wrong_sync_is_named(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_sync(text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--dp 1", "dp must be at least 2, not 1"),
        (
            "--dp 2 --schedule cdp-v1 --micro-batches 1",
            "schedule must be one of 1f1b, gpipe, interleaved, not cdp-v1",
        ),
        ("--dp 2 --pp 2 --schedule 2bw", "not 2bw"),
        ("--dp 2 --shard zero1", "shard must be none, not zero1"),
        ("--dp 2 --experts 2", r"experts \(2\)"),
        ("--dp 2 --pp 2 --tie-embeddings", "tie_embeddings must be false, or pp 1"),
        ("--dp 2 --layers 2", r"fragments \(4\) must be at most the layers of a stage \(2\)"),
    ],
)
def test_what_does_not_go_with_it_is_named(arguments, words):
    with pytest.raises(ConfigError, match=words):
        parse(["--sync", "diloco:every=8,fragments=4", *arguments.split()])


@pytest.mark.parametrize(
    ("options", "arguments", "words"),
    [
        ("", "--micro-batches 1", "micro_batches must be at least 2"),
        ("least=5", "", r"at least least \(5\), not 4"),
        ("", "--pp 2", "pp must be 1, not 2"),
        ("shares=4-4-8", "", r"shares must be of 2 replicas, each at least 1, and 8 together .*, not 4-4-8"),
        ("shares=8-0", "", "each at least 1"),
        ("shares=4-5", "", "not 4-5"),
        ("shares=4+4", "", r"shares must be numbers such as 6-4-3-3, not '4\+4'"),
        ("frozen=nowhere", "", "cannot read frozen: nowhere: No such file"),
        ("shares=4-4,frozen=x", "", "leave one out"),
    ],
)
def test_wrong_shares_are_named(options, arguments, words):
    with pytest.raises(ConfigError, match=words):
        parse(["--sync", f"elastic:every=8,{options}", "--dp", "2", *arguments.split()])


@pytest.mark.parametrize("text", ["", '{"kind": "train", "step": 3}\n', '{"kind": "train"', "[1]\n"])
def test_metrics_without_shares_are_named(tmp_path, text):
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(ValueError, match=r"frozen: .*metrics\.jsonl"):
        read_shares(str(tmp_path / "metrics.jsonl"), 2, 4)


def test_ranks_repeat_the_same_shares(tmp_path, monkeypatch):
    """A path may lead to different files on the ranks' hosts."""
    texts = []
    for host, shares in (("a", [3, 1]), ("b", [3, 1]), ("c", [1, 3])):
        (tmp_path / host).mkdir()
        monkeypatch.chdir(tmp_path / host)
        row = {"kind": "train", "step": 2, "replicas": {"shares": shares}, "host": host}
        Path("metrics.jsonl").write_text(json.dumps(row))
        how = "--dp 2 --micro-batches 2 --sync elastic:every=2,frozen=metrics.jsonl --policy none"
        texts.append(agreed_text(prepare(f"{how} --data {__file__} --out run".split())))
    check_agreement(texts[:2])
    with pytest.raises(MismatchError, match=r"ranks disagree on frozen shares: .* rank 1 has"):
        check_agreement(texts[1:])


@pytest.mark.parametrize("speeds", [(1, 1, 1), (4, 1, 1), (1, 2.5, 7), (0.1, 30, 0.1)])
@pytest.mark.parametrize(("total", "least"), [(3, 1), (12, 1), (13, 2)])
def test_no_other_shares_end_earlier(speeds, total, least):
    shares = divide(total, speeds, least)

    def seconds(each):
        return max(n / speed for n, speed in zip(each, speeds, strict=True))

    ways = [w for w in itertools.product(range(least, total + 1), repeat=3) if sum(w) == total]
    assert shares in ways
    assert seconds(shares) == min(map(seconds, ways))


def test_shares_stay_where_others_save_little():
    assert decide((4, 4), (1.0, 1.2), 1, 0.05) == (4, 4)  # 3 and 5 would take longer
    assert decide((4, 4), (1.0, 2.0), 1, 0.05) == (3, 5)
    assert decide((4, 4), (1.0, 2.0), 1, 0.3) == (4, 4)
    assert decide((1, 7), (1.0, 1.0), 1, 0.05) == (4, 4)
