"""Files of results say where they come from, are written in one place, and are stale once their code has changed."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hybridcomp import variables
from hybridcomp.results import provenance as machine

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path.append(str(BENCHMARKS))  # where its own modules are, as for a script
resultfile = importlib.import_module("resultfile")
stale = importlib.import_module("stale")

FACTS = {"commit", "date", "command", "load", "machine"}
MACHINE = {"processor", "kernels", "memory", "system", "python", "packages", "lab"}


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=n", "-c", "user.email=e@x", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """Make a repository of one commit, which stands for this one."""
    folder = (tmp_path / "clone").resolve()
    for name in ("hybridcomp/a.py", "kernels/b.cpp", "benchmarks/results/old.json"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("{}")
    git(tmp_path, "init", "-q", str(folder))
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    monkeypatch.setattr(machine, "ROOT", folder)
    return folder


def test_a_file_says_where_its_results_come_from(tmp_path, monkeypatch):
    for one, value in (
        (variables.LAB_KIND, "namespaces"),
        (variables.LAB_HOSTS, "4"),
        (variables.LAB_PPN, "2"),
        (variables.LAB_RATE, "1gbit"),
    ):
        monkeypatch.setenv(one.name, value)
    monkeypatch.setattr(sys, "argv", [str(machine.ROOT / "benchmarks" / "ddp.py"), "--policy", "int8;int4"])
    path = tmp_path / "new" / "file.json"
    resultfile.write(path, {"rows": [1]})
    found = resultfile.read(path)
    assert found.keys() == FACTS | {"rows"}
    assert found["machine"].keys() == MACHINE
    assert all(found["machine"].values())
    assert found["machine"]["lab"] == "namespaces"
    assert found["machine"]["kernels"] in ("avx512", "avx2", "portable", "neon")
    lab = "hybridcomp lab -n 4 --ppn 2 --rate 1gbit -- "
    assert found["command"] == f"{lab}python benchmarks/ddp.py --policy 'int8;int4'"
    assert found["commit"] == machine.commit()
    for name in ("HYBRIDCOMP_LAB_HOSTS", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PMI_SIZE", "3")
    command = machine.provenance("none")["command"]
    assert command == "mpiexec -n 3 python benchmarks/ddp.py --policy 'int8;int4'"
    resultfile.write(path, {"rows": [], "commit": "of the runs"}, "shared-memory")
    found = resultfile.read(path)
    assert (found["commit"], found["machine"]["lab"]) == ("of the runs", "shared-memory")


def test_a_commit_is_named_with_changes_of_its_code(clone):
    name = git(clone, "rev-parse", "--short", "HEAD")
    assert machine.commit() == name
    (clone / "benchmarks/results/old.json").write_text("{ }")
    (clone / "hybridcomp/new.py").write_text("")
    assert machine.commit() == name
    (clone / "kernels/b.cpp").write_text("changed")
    assert machine.commit() == f"{name}-dirty"


def test_a_package_inside_another_s_repository_has_no_commit(clone, monkeypatch):
    monkeypatch.setattr(machine, "ROOT", clone / "hybridcomp")
    assert machine.commit() == ""
    monkeypatch.setattr(machine, "ROOT", clone.parent)
    assert machine.commit() == ""


def test_runs_of_several_commits_are_all_named(tmp_path):
    runs = [{"commit": "a"}, {}, {"commit": "a"}, {"commit": "b"}, {"commit": ""}]
    assert resultfile.commits(runs) == "a, not recorded, b"
    (tmp_path / "list.json").write_text("[3]")
    assert resultfile.read(tmp_path / "list.json") == {"rows": [3]}


def test_a_table_says_where_it_comes_from_and_what_its_file_does_not_say():
    full = {
        "commit": "abc", "date": "2026-01-02", "load": "1 processes on 2 cores",
        "machine": {"processor": "a processor", "kernels": "avx2"},
    }  # fmt: skip
    assert machine.origin(full) == (
        "*Measured: commit abc, 2026-01-02, a processor, avx2, load 1 processes on 2 cores.*"
    )
    old = {"machine": {"processor": "a processor", "load": 0.5}}
    assert machine.origin(old) == (
        "*Measured: a processor, load 0.5 cores busy before; commit, date, instruction set not recorded.*"
    )
    nothing = "*Measured: commit, date, processor, instruction set, load not recorded.*"
    assert machine.origin({"commit": "", "rows": []}) == machine.origins({"a": {}, "b": {}}) == nothing
    text = machine.origins({"a": full, "b": old, "c": full})
    assert text.startswith("*Measured: a, c: commit abc, ")
    assert " b: a processor, " in text


NOT_OF_RESULTS = {"METHODS", "VARIABLES"}  # parts of pages that are written from the code


def parts(page: Path) -> dict[str, str]:
    """Return what is written of a page by scripts of benchmarks/pages, by its markers."""
    text = page.read_text(encoding="utf-8")
    written = r"<!-- (\w+): written by benchmarks/pages/\w+\.py -->(.*?)<!-- END \1 -->"
    studies = r"<!-- BEGIN (\S+) -->(.*?)<!-- END \1 -->"
    return dict(re.findall(written, text, re.S)) | dict(re.findall(studies, text, re.S))


def test_every_part_of_a_page_says_where_its_figures_come_from():
    found = {
        f"{page.name} {name}": text
        for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
        for name, text in parts(page).items()
        if name not in NOT_OF_RESULTS and "|---" in text
    }
    assert len(found) > 40
    assert [name for name, text in found.items() if "*Measured: " not in text] == []


# Commit and processor of the files that README's figures come from today: one of each, once they are measured anew.
README_OF = {("not recorded", "AMD EPYC"), ("not recorded", "Intel(R) Xeon(R) Processor")}


def test_readme_says_whether_its_figures_are_of_one_machine_and_commit(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS / "pages")
    readme = importlib.import_module("readme")
    assert readme.origins_of_all() == README_OF
    text = (ROOT / "README.md").read_text()
    assert readme.alike() in text
    one = {("abc", "a processor")}
    for found, alike in (
        (one, True),
        (one | {("abc", "another")}, False),
        (one | {("def", "a processor")}, False),
        ({("not recorded", "a processor")}, False),
    ):
        monkeypatch.setattr(readme, "origins_of_all", lambda found=found: found)
        assert (
            readme.alike().startswith("All figures of this page are of commit abc on a processor.") == alike
        )


# Who may write JSON otherwise, and why.
OTHERS = {
    "resultfile.py": "here it is done",
    "fsdp_loss.py": "a rank's, for the process that started it",
    "model.py": "cells for the ranks",
    "modelbench/cells.py": "a rank's, for the process that started it",
    "step_rank.py": "a rank's, for the process that started it",
}


def writes_json(text: str) -> bool:
    """Tell whether a module writes JSON to a file by itself."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            words = [ast.unparse(word) for word in (*node.args, *(one.value for one in node.keywords))]
            if name == "json.dump" or (
                name.rpartition(".")[2] in ("write_text", "write_bytes", "write")
                and any("json.dumps(" in word for word in words)
            ):
                return True
    return False


def test_every_benchmark_writes_its_results_in_one_place():
    assert writes_json("path.write_text(json.dumps(rows) + '\\n')")
    assert not writes_json("write(path, rows)\nprint(json.dumps(rows))")
    found = {
        path.relative_to(BENCHMARKS).as_posix()
        for path in BENCHMARKS.rglob("*.py")
        if writes_json(path.read_text(encoding="utf-8"))
    }
    assert found == OTHERS.keys()


def test_every_benchmark_that_takes_a_file_writes_it_there():
    for path in BENCHMARKS.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        if re.search(r'add_argument\(\s*"--json"', text):
            assert "import resultfile" in text or "from resultfile import" in text, path.name
    record = json.loads((BENCHMARKS / "results" / "ddp_1gbit_2x4.json").read_text())
    assert record.keys() >= FACTS  # whose form stays


# -- what is stale ---------------------------------------------------------------------------------------


def declared(monkeypatch, *renew: str) -> None:
    """Declare that all files measure what is in a folder, each in one of its name."""
    every = stale.Figure("*.json", ("hybridcomp/a.py", "measured/{stem}"), renew)
    monkeypatch.setattr(stale, "FIGURES", (every,))


def put(clone: Path, name: str, record: object) -> None:
    (clone / "benchmarks/results" / name).write_text(json.dumps(record))


def change(clone: Path, name: str) -> str:
    """Commit a change of a file; return the commit."""
    path = clone / name
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(f"{path.read_text() if path.exists() else ''}line\n")
    git(clone, "add", ".")
    git(clone, "commit", "-q", "-m", name)
    return git(clone, "rev-parse", "--short", "HEAD")


def aged(clone: Path) -> dict[str, stale.Age]:
    return {age.file: age for age in stale.ages(clone)}


def test_a_file_is_stale_once_code_that_it_measures_has_changed(clone, monkeypatch):
    declared(monkeypatch)
    at = change(clone, "measured/mine/x.py")
    put(clone, "mine.json", {"commit": at, "date": "2026-01-02"})
    put(clone, "theirs.json", {"commit": at})
    assert {name: age.stale for name, age in aged(clone).items()} == {
        "mine.json": False,
        "old.json": False,
        "theirs.json": False,
    }
    change(clone, "kernels/b.cpp")  # of which nothing is declared
    change(clone, "measured/minestuff.py")
    assert not any(age.stale for age in aged(clone).values())
    change(clone, "measured/mine/x.py")
    change(clone, "measured/mine/y.py")
    found = aged(clone)
    assert (found["mine.json"].stale, found["mine.json"].since) == (True, 2)
    assert (found["mine.json"].said, found["mine.json"].changed) == (True, ("measured/mine",))
    assert not found["theirs.json"].stale
    change(clone, "hybridcomp/a.py")
    found = aged(clone)
    assert all(age.stale for age in found.values())
    assert found["mine.json"].changed == ("hybridcomp/a.py", "measured/mine")
    table = stale.table(list(found.values()))
    assert table.splitlines()[0].split("  ")[0] == "code"
    line = next(line for line in table.splitlines() if "mine.json" in line)
    assert re.split(r"  +", line) == [
        "STALE",
        "mine.json",
        at,
        "2026-01-02",
        "3",
        "hybridcomp/a.py, measured/mine",
    ]
    assert "3 of 3 files of results are stale" in table


def test_changes_that_are_not_committed_count(clone, monkeypatch):
    declared(monkeypatch)
    at = git(clone, "rev-parse", "--short", "HEAD")
    put(clone, "mine.json", {"commit": at})
    put(clone, "dirty.json", {"commit": f"{at}-dirty"})
    found = aged(clone)
    assert (found["mine.json"].stale, found["dirty.json"].stale) == (False, True)
    assert "not committed" in found["dirty.json"].why
    (clone / "hybridcomp/a.py").write_text("changed")
    assert aged(clone)["mine.json"].stale


def test_a_file_without_a_commit_is_of_the_last_that_changed_it(clone, monkeypatch):
    declared(monkeypatch)
    put(clone, "new.json", [1])
    first = git(clone, "rev-parse", "--short", "HEAD")
    change(clone, "hybridcomp/a.py")  # and adds new.json
    found = aged(clone)
    assert (found["old.json"].commits, found["old.json"].said, found["old.json"].stale) == (
        (first,),
        False,
        True,
    )
    assert (found["new.json"].said, found["new.json"].stale) == (False, False)
    assert f"({first})" in stale.table([found["old.json"]])
    put(clone, "newer.json", {})
    assert aged(clone)["newer.json"].stale is None


@pytest.mark.parametrize(
    "commit", ["--output=x", "HEAD", "ffffffff", "not recorded", "\x1b[2J", "$(touch x)"]
)
def test_what_is_no_commit_of_this_clone_is_told(clone, monkeypatch, commit):
    declared(monkeypatch)
    put(clone, "odd.json", {"commit": commit, "date": "\x1b[2J"})
    (age,) = stale.ages(clone, ["odd.json"])
    assert age.stale is None
    table = stale.table([age])
    assert "\x1b" not in table
    assert "not in this clone" in table or "no commit" in table
    assert not list(clone.rglob("x"))


def test_a_file_of_many_runs_has_the_commits_of_all(clone, monkeypatch):
    declared(monkeypatch)
    first = git(clone, "rev-parse", "--short", "HEAD")
    second = change(clone, "hybridcomp/a.py")
    put(clone, "cells.json", {"a": {"rows": [], "commit": second}, "b": {"rows": [], "commit": first}})
    put(clone, "study.json", {"commit": f"{second}, {first}"})
    put(clone, "beside.json", {"commit": second, "before": {"commit": first}})
    found = aged(clone)
    assert found["cells.json"].commits == found["study.json"].commits == (second, first)
    assert [found[f"{name}.json"].stale for name in ("cells", "study", "beside")] == [True, True, False]


def test_what_every_file_measures_is_declared_and_there():
    makefile = (ROOT / "Makefile").read_text()
    names = stale.files(ROOT)
    assert len(names) > 100
    for name in names:
        for path in stale.measured(name):
            assert (ROOT / path).exists(), (name, path)
        if stale.figure_of(name).renew:
            for program, *words in stale.commands(name):
                assert program in ("make", "python", "mpiexec", "hybridcomp", "cp"), name
                assert all((ROOT / word).exists() for word in words if word.endswith((".py", ".toml"))), name
                assert program != "make" or re.search(rf"^{words[0]}:", makefile, re.M), name
                assert "{" not in "".join(words)
    # Nothing is declared of files that are not there, but of those that a command has yet to write.
    found = {stale.figure_of(name).files for name in names}
    assert {one.files for one in stale.FIGURES} - found <= {"members/*.json"}


def test_the_commands_of_a_file_are_of_it():
    (ddp,) = stale.commands("ddp_200mbit_2x4.json")
    assert ddp == [
        *(
            "hybridcomp",
            "lab",
            "-n",
            "2",
            "--ppn",
            "4",
            "--rate",
            "200mbit",
            "--",
            "python",
            "benchmarks/ddp.py",
        ),
        *("--policy", "int8;int4", "--over-gloo", "--iters", "2"),
        *("--json", "benchmarks/results/ddp_200mbit_2x4.json"),
    ]
    (lab,) = stale.commands("lab/reduce_scatter.json")
    assert lab == ["make", "bench-lab", "LAB=--only reduce_scatter_ --again", "RESULTS=benchmarks/results"]
    assert "studies/sidco.toml" in stale.commands("sidco-speed/results.json")[0]
    assert "speed" in stale.commands("sidco-speed/results.json")[0]
    with pytest.raises(stale.FigureError, match="no one command"):
        stale.commands("openmpi_allreduce_sharedmemory_4ranks.json")


def test_renewing_runs_each_command_once(clone, monkeypatch, capfd):
    declared(
        monkeypatch, "python -c 'import sys; print(sys.argv[1:])' '{file} and $HOME'", "python -c 'print(7)'"
    )
    put(clone, "mine.json", {})
    assert stale.renew(["mine.json", "old.json", "mine.json"], clone) == 0
    said = capfd.readouterr().out
    assert "['mine.json and $HOME']" in said
    assert said.count("\n7\n") == 1
    declared(monkeypatch, "python -c 'import sys; sys.exit(3)'", "touch x")
    assert stale.renew(["mine.json"], clone) == 3
    assert not (clone / "x").exists()


@pytest.mark.parametrize(
    "name", ["none.json", "../results/old.json", "/etc/passwd", "$(id>x).json", "a;id>x.json"]
)
def test_names_that_are_no_files_of_results_are_refused(clone, monkeypatch, name, capsys):
    declared(monkeypatch, "touch x")
    monkeypatch.setattr(stale, "ROOT", clone)
    if "/" not in name and "none" not in name:
        put(clone, name, {})  # a file that may be there, but may not go into a command
    assert stale.main(["--renew", name]) == 2
    assert capsys.readouterr().err.startswith("stale.py: error: ")
    assert not list(clone.rglob("x"))


@pytest.mark.parametrize("name", ["ddp_none_2x4.json", "$(shell touch x)", "'; touch x; '", "`touch x`"])
def test_make_hands_a_name_on_as_it_was_typed(tmp_path, name):
    (tmp_path / "python").write_text('#!/bin/sh\nshift\nfor word; do printf "%s\\n" "$word"; done\n')
    (tmp_path / "python").chmod(0o755)
    command = [
        "make",
        "-s",
        "-f",
        str(ROOT / "Makefile"),
        "-o",
        ".venv/.installed",
        "figures",
        f"BIN={tmp_path}",
    ]
    said = subprocess.run(
        [*command, f"RENEW={name}"], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=30
    )
    assert said.stdout.splitlines() == ["--renew", name]
    plain = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=30)
    assert plain.stdout == ""
    assert not (tmp_path / "x").exists()
