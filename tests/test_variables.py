"""The table of variables: what it takes and refuses, that all are in it, and what is said of names that are not."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hybridcomp import variables
from hybridcomp.errors import ConfigError
from hybridcomp.perfmodel.profile import BUILT_IN
from tests.packages import modules
from tests.plugin.test_plugin import HEAD, environment, run
from tests.torch.harness import mpiexec
from tests.warm import python

ROOT = Path(__file__).parent.parent
WRONG = {
    "ALGORITHM": ["all_reduce", "=ring", "all_reduce="],
    "CHUNK_BYTES": ["63", "-64", "1e6", "64.0", "٦٤", "2" * 30, "many"],
    "SHARED_MEMORY": ["off", "2", "true", " 0"],
    "HOSTS": [
        "0x4",
        "4x",
        "x4",
        "2x4x1",
        "2X4",
        "3,,2",
        "3,0",
        "-1",
        "3, 1",
        "many",
        f"{1 << 16}1x1",
        "9" * 100,
    ],
    "DEBUG": ["verbose", "DETAIL", "1"],
    "REPLACE": ["mpi", "gloo,mpi", "gloo nccl"],
    "HOOK": ["garbage", "yes"],
    "SUMMARY": ["garbage", "2"],
    "BANDWIDTH": ["0", "-1", "nan", "inf", "1e999", "fast"],
    "LATENCY": ["0", "nan", "20us"],
    "BURST": ["-1", "nan", "much"],
    "CORES": ["0", "2", "nan"],
    "ISA": ["avx1024", "AVX2"],
    "NUM_THREADS": ["0", "65", "four", "1.0"],
    "CUDA_AWARE": ["2", "yes"],
    "NVCOMP": ["perhaps", "1"],
    "TERMINAL": ["0", "wide"],
    "LAB_HOSTS": ["0", "two"],
    "LAB_PPN": ["0", "two"],
    "WARNED": ["yes"],
}
RIGHT = {
    "ALGORITHM": [
        ("all_reduce=ring, broadcast=tree,", {"all_reduce": "ring", "broadcast": "tree"}),
        ("", {}),
    ],
    "CHUNK_BYTES": [("64", 64), ("262144", 262144), ("", None)],
    "SHARED_MEMORY": [("0", False), ("1", True), ("", True)],
    "HOSTS": [("2x4", (4, 4)), ("3,1,2", (3, 1, 2)), ("8", (8,)), ("", None)],
    "REPLACE": [("GLOO, nccl", {"gloo", "nccl"}), ("gloo", {"gloo"}), ("", set())],
    "SUMMARY": [("0", False), ("1", True), ("", None)],
    "TOP": [("0", False), ("1", True), ("", True), ("runs/0", "runs/0")],
    "BURST": [("0", 0.0), ("5e5", 5e5), ("", None)],
    "CORES": [("0.5", 0.5), ("1", 1.0)],
    "NUM_THREADS": [("64", 64)],
}


@pytest.mark.parametrize("name", sorted(WRONG))
def test_a_wrong_value_is_an_error_that_says_what_is_allowed(name, monkeypatch):
    one = variables.VARIABLES[f"HYBRIDCOMP_{name}"]
    for value in WRONG[name]:
        monkeypatch.setenv(one.name, value)
        for read in (one.read, lambda: variables.check(0)):
            with pytest.raises(ConfigError) as raised:
                read()
            words = one.allowed.replace("`", "")
            assert str(raised.value) == f"{one.name} is {value!r}; allowed: {words}"


def test_every_variable_that_does_not_take_any_text_is_tried():
    checked = {name for name, one in variables.VARIABLES.items() if one._parse is not str}
    assert checked - {"HYBRIDCOMP_TOP"} == {f"HYBRIDCOMP_{name}" for name in WRONG}


@pytest.mark.parametrize("name", sorted(RIGHT))
def test_right_values(name):
    one = variables.VARIABLES[f"HYBRIDCOMP_{name}"]
    for value, expected in RIGHT[name]:
        assert one.read({one.name: value}) == expected
    assert one.read({}) == one.parse("")


def test_a_long_value_is_cut():
    with pytest.raises(ConfigError) as raised:
        variables.DEBUG.parse("x\x1b" * 10_000)
    assert len(str(raised.value)) < 1000
    assert "\x1b" not in str(raised.value)


def test_the_defaults_of_links_are_the_built_in_profiles():
    for one, value in (
        (variables.BANDWIDTH, BUILT_IN.network.bandwidth),
        (variables.LATENCY, BUILT_IN.network.latency),
        (variables.BURST, BUILT_IN.network.burst),
        (variables.CORES, BUILT_IN.cores),
    ):
        assert float(one.default.removeprefix("the interface's, or ")) == value


def test_modules_of_the_package_read_variables_by_the_table():
    """Only a program that runs without the package, and the module that importing torch loads, have own names."""
    own = {}
    for path in modules():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found = {
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and re.fullmatch(r"HYBRIDCOMP_\w*", str(node.value))
        }
        if found:
            own[path.relative_to(ROOT).as_posix()] = found
    assert own.pop("hybridcomp/variables.py") == {variables.PREFIX}
    assert own == {
        "hybridcomp/net/keeper.py": {variables.LAB_ID.name},
        "hybridcomp/plugin/__init__.py": {
            variables.PREFIX,
            variables.REPLACE.name,
            variables.HOOK.name,
            variables.COMPARE.name,
        },
    }


def test_every_name_in_the_repository_is_in_the_table():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, timeout=30)
    left_out = ("CHANGELOG.md", "tests/test_variables.py")  # variables that are gone, and wrong ones
    unknown = {}
    for name in listed.stdout.decode().split("\0"):
        path = ROOT / name
        if (
            path.suffix in (".py", ".md", ".sh", ".sbatch", ".cpp", ".hpp", ".cu", ".cuh", ".yml")
            or "." not in path.name
        ):
            if name in left_out or not path.is_file():
                continue
            found = re.findall(r"HYBRIDCOMP_[A-Z][A-Z_]*", path.read_text(encoding="utf-8"))
            if more := set(found) - set(variables.VARIABLES):
                unknown[name] = more
    assert not unknown


def test_an_unknown_name_is_told_with_the_nearest(monkeypatch):
    given = {
        "HYBRIDCOMP_POLCY": "int8",
        "HYBRIDCOMP_REPALCE": "gloo",
        "HYBRIDCOMP_XYZZY": "1",
        "HYBRIDCOMP_HOOK": "1",
    }
    assert variables.unknown(given) == {
        "HYBRIDCOMP_POLCY": "HYBRIDCOMP_POLICY",
        "HYBRIDCOMP_REPALCE": "HYBRIDCOMP_REPLACE",
        "HYBRIDCOMP_XYZZY": None,
    }
    assert not variables.unknown({"HYBRIDCOMPX": "1", "HOME": "/"})


def test_a_command_warns_once_and_not_again_in_its_ranks():
    done = run("say(total.__name__)\n", HYBRIDCOMP_SUMARY="0")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("there is no variable HYBRIDCOMP_SUMARY; did you mean HYBRIDCOMP_SUMMARY?") == 1


def test_a_program_that_imports_torch_is_warned_on_rank_0_alone():
    """Warn a program that does not name hybridcomp: the variable that would change it is spelt wrong."""
    done = mpiexec(3, "-c", HEAD + "say('on')\n", HYBRIDCOMP_HOKO="1", HYBRIDCOMP_POLICY="none")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "on\n" * 3
    said = [line for line in done.stderr.splitlines() if "HYBRIDCOMP" in line]
    assert said == ["hybridcomp: there is no variable HYBRIDCOMP_HOKO; did you mean HYBRIDCOMP_HOOK?"]


@pytest.mark.parametrize("command", ["doctor", "top", "plan"])
def test_a_command_with_a_wrong_variable_says_so_in_one_line(command):
    done = subprocess.run(
        [sys.executable, "-m", "hybridcomp", command],
        env=environment(HYBRIDCOMP_HOOK="garbage"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"hybridcomp {command}: error: HYBRIDCOMP_HOOK is 'garbage'; allowed: 0 or 1\n"


def test_a_hook_is_not_made_with_a_wrong_variable(monkeypatch):
    import hybridcomp.torch as hct

    monkeypatch.setenv("HYBRIDCOMP_SUMMARY", "garbage")
    with pytest.raises(ConfigError, match="HYBRIDCOMP_SUMMARY is 'garbage'; allowed: 0: never, or 1"):
        hct.HookState("int8")


def test_a_policy_is_named_with_its_variable(monkeypatch):
    import hybridcomp.torch as hct

    monkeypatch.setenv("HYBRIDCOMP_POLICY", "int9")
    with pytest.raises(ConfigError, match="HYBRIDCOMP_POLICY is 'int9': unknown policy"):
        hct.HookState()


def test_the_plugin_does_not_load_the_table_where_nothing_is_set():
    loaded = "{'hybridcomp.plugin', 'hybridcomp.variables'} & {*sys.modules}"
    code = f"import torch, sys\nassert {loaded} == {{'hybridcomp.plugin'}}"
    done = subprocess.run(
        [python(), "-c", code], env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
