import re
from pathlib import Path

import pytest

from hybridcomp.errors import ConfigError, HybridcompError
from hybridcomp_lab.study.reading import read_study
from tests.study.fake import STUDY, write

STUDIES = Path(__file__).parents[2] / "studies"


def test_a_grid_is_a_variant_for_each_combination(tmp_path: Path) -> None:
    text = STUDY.replace("[policies]", "lr = [1e-3, 1e-4]\nseq_len = [64]\n[policies]")
    study = read_study(write(tmp_path, text.replace("hosts = 2", 'hosts = 2\nbaseline = "none 0.001"')))
    assert [variant.name for variant in study.variants] == [
        "none 0.001", "none 0.0001", "naive 0.001", "naive 0.0001", "mine 0.001", "mine 0.0001",
    ]  # fmt: skip
    assert study.variants[1].fields == {"policy": "none", "lr": 1e-4, "seq_len": 64}


def test_losses_go_seed_by_seed_and_speeds_there_and_back(tmp_path: Path) -> None:
    runs = read_study(write(tmp_path)).runs()
    assert [(run.variant.name, run.number) for run in runs if run.part == "loss"] == [
        ("none", 1), ("naive", 1), ("mine", 1), ("none", 2), ("naive", 2), ("mine", 2),
    ]  # fmt: skip
    assert all(run.rate == "none" and run.fields["seed"] == run.number for run in runs if run.part == "loss")
    first = [(run.variant.name, run.rate, run.number) for run in runs if run.part == "speed"][:6]
    assert first == [
        ("none", "20mbit", 1), ("naive", "20mbit", 1), ("mine", "20mbit", 1),
        ("mine", "20mbit", 2), ("naive", "20mbit", 2), ("none", "20mbit", 2),
    ]  # fmt: skip
    assert len({run.folder for run in runs}) == len(runs) == 3 * 2 + 3 * 2 * 3


def test_a_sweep_is_a_variant_for_each_place_and_codec(tmp_path: Path) -> None:
    sweep = """[sweep]
codecs = ["int8", "int4"]
places = { dp = 'dp.all_reduce = "CODEC"', "pp forward" = 'pp.forward = "CODEC"' }
"""
    study = read_study(write(tmp_path, STUDY + sweep))
    swept = [variant for variant in study.variants if variant.series is not None]
    assert [variant.name for variant in swept] == ["dp int8", "dp int4", "pp forward int8", "pp forward int4"]
    assert study.policies["pp forward int4"] == 'pp.forward = "int4"'
    assert (swept[0].series, swept[0].codec) == ("dp", "int8")


def test_reduced_changes_tables_and_replaces_lists(tmp_path: Path) -> None:
    path = write(tmp_path, STUDY + "[reduced]\nloss = { seeds = [7] }\ngrid = { policy = ['none'] }\n")
    study = read_study(path, reduced=True)
    assert study.loss is not None
    assert study.loss.seeds == (7,)
    assert study.loss.fields["steps"] == 20
    assert [variant.name for variant in study.variants] == ["none"]
    assert len(read_study(path).variants) == 3


def test_a_command_names_the_policys_file(tmp_path: Path) -> None:
    study = read_study(write(tmp_path, STUDY.replace("layers = 1", "layers = 1\ncheckpoint_every = 5")))
    run = next(run for run in study.runs() if run.variant.name == "mine")
    command = run.command(Path("out"), {"mine": Path("policies/00-mine.toml")})
    assert command[:2] == ["hybridcomp", "train"]
    assert command[command.index("--policy") + 1] == "policies/00-mine.toml"
    assert command[command.index("--resume") + 1] == "auto"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[train]", "colour = 1\n[train]", r"small.toml: line 5, key colour: unknown key 'colour'; allowed: title"),
        ("layers = 1", "layer = 1", r"line 7, key layer: unknown key 'layer'; did you mean layers\?"),
        ("layers = 1", "out = 'x'", r"key out: a study says itself where its runs are"),
        ("dp = 2", "dp = 4", r"variant 'none': pp \* dp \* tp is 4, but hosts \* ppn is 2"),
        ("dp = 2", "pp = 2\nmicro_batches = 1", r"variant 'none': layers \(1\) must be divisible by pp \(2\)"),
        ('"naive"', '"nave"', r"variant 'nave': unknown policy 'nave'"),
        ('"naive"', '"none"', r"key variants: two variants are named 'none'"),
        ("hosts = 2", "hosts = 2\nbaseline = 'no'", r"key baseline: there is no variant 'no'; there are none, naive"),
        ("seeds = [1, 2]", "seeds = 3", r"key seeds: must be a list of integers, not 3"),
        ('"1gbit"]', '"fast"]', r"key rates: rate 'fast' is not understood"),
        ("rounds = 3", "rounds = 0", r"key rounds: must be a positive integer, not 0"),
        ("mine = 'dp", "hybrid = 'dp", r"key hybrid: is a preset's name"),
        ("'dp.all_reduce = \"int4\"'", "'dp.all_reduce = \"int5\"'", r"policy mine: line 1, key dp.all_reduce"),
        ("[loss]", "[loss", r"small.toml: line"),
        ("steps = 10", "steps = 10\n[[expect]]\nfaster = ['mine', 'none']", r"key faster: rate must be one of 20mbit"),
        ("steps = 10", "steps = 10\n[[expect]]\nbetter = ['mine', 'none']", r"key expect: each \[\[expect\]\] has one"),
        ("steps = 10", "steps = 10\n[[expect]]\nlower_loss = ['mine', 'no']", r"no loss is measured of a variant 'no'"),
        ("steps = 10", "steps = 10\n[[expect]]\nsame_loss = ['mine', 'none']\nwithin = 0", r"key within: must be a"),
        ("steps = 10", "steps = 10\n[[variants]]\nname = 'x'\nparts = ['both']", r"key parts: must be a list of loss"),
        ("steps = 10", "steps = 10\n[sweep]\ncodecs = ['int8']\nplaces = { dp = 'x' }", r"key dp: .* with CODEC where"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in STUDY
    with pytest.raises(HybridcompError, match=said):
        read_study(write(tmp_path, STUDY.replace(old, new)))


def test_reduced_needs_its_table(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no table \[reduced\]"):
        read_study(write(tmp_path), reduced=True)


@pytest.mark.parametrize("path", sorted(STUDIES.glob("*.toml")), ids=lambda path: path.stem)
def test_the_studies_of_the_documentation_can_be_read(path: Path) -> None:
    assert read_study(path).runs()
    if "[reduced" in path.read_text():
        assert len(read_study(path, reduced=True).runs()) <= len(read_study(path).runs())


def test_the_guides_example_can_be_read(tmp_path: Path) -> None:
    guide = (STUDIES.parent / "docs/study.md").read_text()
    (example,) = re.findall(r"```toml\n(.*?)```", guide, re.S)
    path = write(tmp_path, example)
    assert {variant.name for variant in read_study(path).variants} >= {"none", "mine", "gloo", "dp int8"}
    assert read_study(path, reduced=True).runs()
