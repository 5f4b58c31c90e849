from __future__ import annotations

import pytest

import hybridcomp as hc
from hybridcomp.policy import load_policy
from hybridcomp.policy.toml import parse_policy

WRONG = {
    'codec = "int8"\nmin_bytes = ': r"f\.toml: line 2, column 13, key min_bytes: not TOML: ",
    'codec = "int9"': r"f\.toml: line 1, key codec: unknown codec 'int9'.*known: .*int8",
    '[dp]\ncodec = "int8:blok=3"': r"f\.toml: line 2, key dp\.codec: codec 'int8' has no parameter 'blok'.*block",
    '[dp]\n\ncodec = "int8:block=3"': r"f\.toml: line 3, key dp\.codec: .*block.*3",
    "min_byte = 3": r"f\.toml: line 1, key min_byte: unknown key 'min_byte'; allowed: codec, feedback, ",
    '[dp]\nall_redcue = "int8"': r"line 2, key dp\.all_redcue: unknown key 'all_redcue'; allowed: all_reduce, ",
    '[dp]\nall_reduce = { codec = "int8", feedbak = "ef" }': r"line 2, key dp\.all_reduce: unknown key 'feedbak'",
    '[dp]\nall_reduce = { codec = "int8", feedback = "eg" }': r"line 2, .*feedback 'eg': unknown form of error "
    r"feedback 'eg'; known: ef, ef21, loco, dgc, ef-sgdm$",
    '[dp]\nall_reduce = { codec = "int8", feedback = "loco:beta=1.5" }': r"line 2, key dp\.all_reduce: feedback "
    r"'loco:beta=1\.5': beta must be a number from 0 to below 1, not 1\.5",
    '[dp]\ncodec = "int8"\nfeedback = 3': r"line 3, key dp\.feedback: feedback 3: form must be one of ef, ",
    '[dp]\nreduce_scatter = { codec = "int8", feedback = "ef21" }': r"line 2, .*reduce_scatter must be one of ef, "
    r"loco, dgc, ef-sgdm, not 'ef21'",
    '[dp]\nall_reduce = { codec = ["powersgd", "int8"], feedback = "dgc" }': r"line 2, .*feedback of powersgd must "
    r"be ef or ef-sgdm, not 'dgc'",
    "min_bytes = -1": r"line 1, key min_bytes: min_bytes must be an integer from 0 to 2\*\*63 - 1, not -1",
    "min_bytes = true": r"min_bytes must be an integer",
    'exclude = "*.bias"': r"exclude must be a list of patterns",
    "[tp]\ncodec = 8": r"line 2, key tp\.codec: codec must be a spec string or a list of them, not 8",
    '[tp]\nfeedback = "ef"': r"line 2, key tp\.feedback: feedback stands beside a codec",
    '[pp]\nbackward = { codec = "int4", only = "warm-up" }': r"line 2, key pp\.backward: only must be 'cool-down', "
    r"not 'warm-up'",
    '[pp]\nforward = { codec = "int4", only = "cool-down" }': r"line 2, key pp\.forward: only stands in an entry "
    r"backward of an axis only",
    '[pp]\nbackward = { only = "cool-down" }': r"line 2, key pp\.backward: only stands beside a codec, and "
    r"here is none",
    '[pp]\nsend = { codec = "int4", feedback = "ef21" }': r"line 2, key pp\.send: feedback of send must be one of ef, "
    r"loco, not 'ef21'",
    '[dp]\nall_reduce = { codec = "int8", stages = -1 }': r"line 2, .*stages must be an integer from 0 to "
    r"2\*\*63 - 1, not -1",
    '[dp]\ncodec = "int8"\nstages = 1': r"line 3, key dp\.stages: stages stands in an entry all_reduce of an axis only",
    '[tp]\ncodec = "int8"\nfrom_layer = "2"': r"line 3, key tp\.from_layer: from_layer must be an integer from "
    r"0 to 2\*\*63 - 1, not '2'",
    '[tp]\ncodec = "int8"\nbetween_hosts = 1': r"line 3, key tp\.between_hosts: between_hosts must be true or false, "
    r"not 1",
    "[tp]\nbetween_hosts = true": r"line 2, key tp\.between_hosts: between_hosts stands beside a codec, and here is "
    r"none",
    '[dp]\nall_reduce = { codec = "int8", algorithm = "doubling" }': r"line 2, key dp\.all_reduce: algorithm must be "
    r"one of direct, .*, oktopk, not 'doubling'",
    '[dp]\ncodec = "int8"\nalgorithm = 3': r"line 3, key dp\.algorithm: algorithm must be one of direct, .*, not 3",
    "[embedding]\nfused = 1": r"line 2, key embedding\.fused: fused must be true or false, not 1",
    "[dp]\nfused = true": r"line 2, key dp\.fused: unknown key 'fused'",
    '[dp]\nall_reduce = "bounded"': r"line 2, key dp\.all_reduce: bounded needs a bound on its error: give abs= ",
    '[dp.all_reduce]\ncodec = "int8"\nx = 1': r"line 1, key dp\.all_reduce: unknown key 'x'",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_file_is_named_with_line_and_key(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f.toml").write_text(text)
    with pytest.raises(hc.PolicyError, match=WRONG[text]):
        load_policy("f.toml")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("exclude = " + 5000 * "[" + 5000 * "]", "f.toml: .*nested too deep"),
        ("[dp.all_reduce]\nx" + 5000 * ".x" + " = 1", "f.toml: "),
        ("min_bytes = 1" + 5000 * "0", "f.toml: .*4300 digits"),
        (
            "min_bytes = 0x1" + 5000 * "0",
            r"line 1, key min_bytes: .*from 0 to 2\*\*63 - 1, not one of 20001 bits",
        ),
        ('codec = "int8:block=1' + 5000 * "0" + '"', "line 1, key codec: "),
    ],
    ids=["lists", "dotted", "decimal", "hexadecimal", "spec"],
)
def test_a_file_that_takes_the_parser_to_its_limits_is_named(text, match, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f.toml").write_text(text)
    with pytest.raises(hc.PolicyError, match=match):
        load_policy("f.toml")


def test_a_section_for_an_axis_that_is_not_there():
    policy = parse_policy('codec = "int8"\n\n[ep]\ncodec = "int8"\n', "f.toml")
    with pytest.raises(hc.PolicyError, match=r"f\.toml:3: section \[ep\] .* it has pp, dp, tp"):
        policy.require_axes(["pp", "dp", "tp"])
    policy.require_axes(["ep"])


@pytest.mark.parametrize(
    ("source", "match"),
    [
        (
            "hybird",
            r"unknown policy 'hybird': neither a preset \(none, exact, naive, mzhybrid, zhybrid, "
            r"hybrid, lowrank, sparse, onebit\), "
            r"nor auto, nor a .toml file, nor a codec",
        ),
        ("nowhere.toml", r"cannot read policy file nowhere\.toml"),
        ("int8:block=7", r"policy 'int8:block=7': .*block"),
        (
            "int8:min_bytes=-1",
            r"policy 'int8:min_bytes=-1': min_bytes must be a whole number from 0 to .*, not -1",
        ),
        ("int8:min_bytes=few", r"min_bytes must be a whole number from 0 to .*, not 'few'"),
        ("int8:min_bytes=1:min_bytes=1", r"'min_bytes' is given twice"),
        ("bounded", r"policy 'bounded': bounded needs a bound on its error: give abs= \(.*\) or rel= \("),
        ("bounded:coder=huffman", r"bounded needs a bound on its error"),
        ("bounded:min_bytes=0", r"bounded needs a bound on its error"),
        ("topk:ratio=0.1,values=bounded", r"bounded needs a bound on its error"),
    ],
)
def test_a_source_that_is_none(source, match):
    with pytest.raises(hc.PolicyError, match=match):
        load_policy(source)
