"""Names from files and programs are text: no terminal acts on them, and they are no markup of tables or pages."""

from __future__ import annotations

import ast
import html
import io
import json
import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest
from rich.table import Table

from hybridcomp import style
from hybridcomp.cli.doctor import _section
from hybridcomp.cli.main import EXIT_WRONG_INPUT, main
from hybridcomp.collectives import StatRow
from hybridcomp.collectives.report import summary
from hybridcomp.errors import ConfigError, WireError
from hybridcomp.policy import load_policy
from hybridcomp_lab.study.pictures import pictures
from hybridcomp_lab.study.reading import read_study
from hybridcomp_lab.study.results import Losses, Results, Speeds
from tests.breakdown.making import Rank
from tests.packages import modules

ROOT = Path(__file__).parents[1]
TERMINAL = "\x1b]0;title\x07\x1b[2J\r\x9b31m\u202e"
MARKUP = "[bold]b[/bold][link=x]l[/link]:smile:"
HTML = "<!--<script>"
EVIL = TERMINAL + MARKUP + HTML
# What is never printed: characters of control other than the end of a line, and what turns text around.
ACTS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def check_printed(text: str) -> None:
    assert not ACTS.search(text), ACTS.search(text)
    assert r"\x1b]0;title\x07" in text
    assert MARKUP in text


@pytest.mark.parametrize("kind", [ConfigError, WireError])
def test_errors_have_no_characters_that_a_terminal_acts_on(kind):
    check_printed(str(kind(f"wrong: {EVIL}")))
    assert str(kind("two\nlines")) == "two\nlines"


def test_tables_and_lines_show_names_as_they_are():
    out = io.StringIO()
    console = style.console(out, width=400, terminal=True)  # as on a terminal, where markup would be seen
    table = Table(title=f"title {EVIL}")
    table.add_column(f"heading {EVIL}")
    table.add_row(f"cell {EVIL}")
    console.print(table)
    console.print(f"line {EVIL}")
    style.say(f"said {EVIL}", out)
    text = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue())  # rich's own styles
    for where in ("title", "heading", "cell", "line", "said"):
        assert rf"{where} \x1b]0;title\x07\x1b[2J\r\x9b31m\u202e{MARKUP}{HTML}" in text
    check_printed(text)
    assert "\x1b]" not in out.getvalue()


def test_statistics_of_a_program(capsys):
    row = StatRow(EVIL, "all_reduce", "int8", f"policy {EVIL}", 3, 4_000_000, 8_000_000, 2_000_000)
    check_printed(summary([row], f"title {EVIL}").replace("\n", ""))
    plain = StatRow(EVIL, "all_reduce", "none", EVIL, 3, 4_000_000, 8_000_000, 8_000_000)
    check_printed(summary([plain]))  # with a hint


def test_doctor_shows_names_as_they_are(capsys):
    _section(style.console(width=400), f"title {EVIL}", {"file": EVIL})
    check_printed(capsys.readouterr().out)


def write_run(folder: Path) -> None:
    """Write metrics and traces in which every name is hostile."""
    folder.mkdir(parents=True)
    row = {"axis": EVIL, "op": EVIL, "codec": EVIL, "reason": EVIL}
    row |= dict.fromkeys(("calls", "raw_bytes", "plain_bytes", "wire_bytes"), 1000)
    row |= dict.fromkeys(("encode_seconds", "wire_seconds", "decode_seconds"), 0.5)
    decision = {"kind": "decision", "step": 0, **dict.fromkeys(("axis", "op", "name", "codec", "why"), EVIL)}
    summed = {
        "kind": "summary",
        "policy": EVIL,
        "steps": 1,
        "seconds": 1.0,
        "tokens_per_s": 1.0,
        "val_loss": 1.0,
    }
    lines = (json.dumps(one) + "\n" for one in (decision, summed | {"comm": [row]}))
    (folder / "metrics.jsonl").write_text("".join(lines))
    for number in (0, 1):
        rank = Rank(number)
        rank.about["host"] = EVIL
        rank.step(0, 10)
        rank.operation(1, 2, 9, op=EVIL, axis=EVIL)
        rank.wait(1, 2, 9, op=EVIL, axis=EVIL)
        rank.events[1]["args"] |= {"codec": EVIL, "why": EVIL}
        rank.write(folder)


class Scripts(HTMLParser):
    """Scripts of a page, and the names of its other elements."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.elements: set[str] = set()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.elements.add(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts[-1] += data


def test_a_report_of_a_run_with_hostile_names(tmp_path, capsys):
    run = tmp_path / f"run {EVIL}".replace("/", "|")
    write_run(run)
    assert main(["report", str(run)]) == 0
    said = capsys.readouterr().out
    assert not ACTS.search(said)
    assert r"\x1b]0;title\x07" in said
    assert "[bold]b[/bold]" in said
    page = (run / "report.html").read_text()
    library = (files("plotly") / "package_data" / "plotly.min.js").read_text()
    assert page.count(library) == 1
    own = page.replace(library, "")
    assert HTML not in own  # neither in the text of the page nor in its data
    parsed = Scripts()
    parsed.feed(own)
    usual = "html head meta title style body h1 h2 p ul li div table tr th td label select option script"
    assert parsed.elements <= set(usual.split())
    data = parsed.scripts[-1].split("const FIGURES = ")[1].split(";\n")[0]
    assert "<" not in data
    figures = json.loads(data)
    assert figures["run0-axes"]["data"][0]["y"] == [html.escape(EVIL, quote=False)]  # Plotly takes tags, too
    assert HTML not in "".join(str(figure) for figure in figures.values())


@pytest.mark.parametrize("text", ["</script>", "<!--<script>", "\u2028", "&", "\ud800"])
def test_data_in_a_page_is_what_was_put_there(text):
    data = style.script_data({text: [text]})
    assert "<" not in data
    assert data.isascii()
    assert json.loads(data) == {text: [text]}


def toml(text: str) -> str:
    return json.dumps(text)  # of a TOML string, too, but for halves of characters


@pytest.mark.parametrize(
    "content",
    [f"[{toml(EVIL)}]\nx = 1", f"{toml(EVIL)} = 1", f"[dp]\n{toml(EVIL)} = 1", f"codec = {toml(EVIL)}"],
)
def test_errors_that_quote_a_policy(tmp_path, content):
    path = tmp_path / f"{TERMINAL}.toml"
    path.write_text(content)
    with pytest.raises(ValueError, match="key") as caught:
        load_policy(path)
    assert not ACTS.search(str(caught.value))


def refused(capsys, *argv: str) -> str:
    assert main(list(argv)) == EXIT_WRONG_INPUT
    (line,) = capsys.readouterr().err.split("\n")[:-1]
    assert not ACTS.search(line)
    return line


OF_FILES = [
    ["report", "FILE"],
    ["study", "FILE"],
    ["plan", "--model", "FILE", "--batch", "8"],
    ["train", "--config", "FILE"],
    ["train", "--policy", "FILE"],
    ["train", "--data", "FILE"],
    ["train", "--resume", "FILE"],
    ["run", "--policy", "FILE", "--", "true"],
    ["generate", "FILE"],
]


@pytest.mark.parametrize("argv", OF_FILES)
def test_commands_name_a_file_that_is_not_there(tmp_path, capsys, argv):
    """A name may hold the end of a line: an error stays one line."""
    path = tmp_path / f"two\nlines{TERMINAL}.toml"
    assert r"two\nlines\x1b]0;title" in refused(capsys, *(str(path) if a == "FILE" else a for a in argv))


@pytest.mark.parametrize("name", ["n" * 300, "n" * 300 + ".toml", "p/" * 3000 + "p", "a\0b", "\udcff"])
@pytest.mark.parametrize("argv", OF_FILES)
def test_names_that_no_file_can_have(capsys, argv, name):
    refused(capsys, *(name if a == "FILE" else a for a in argv))


def test_a_plan_names_its_profile(tmp_path, capsys):
    path = tmp_path / f"{TERMINAL}{MARKUP.replace('/', '')}.toml"
    path.write_bytes((ROOT / "examples/cluster_16x8.toml").read_bytes())
    argv = ["plan", "--model", "gpt2", "--batch", "8", "--hosts", "1", "--ppn", "2", "--profile", str(path)]
    assert main(argv) == 0
    said = capsys.readouterr().out
    assert not ACTS.search(said)
    assert "[bold]b[bold]" in said.replace("\n", "")


def test_a_study_names_its_variants(tmp_path, capsys):
    path = tmp_path / "study.toml"
    path.write_text(
        'hosts = 1\nppn = 1\n[train]\nsteps = 1\n[loss]\nseeds = [1]\n[[variants]]\nname = "none"\npolicy = "none"\n'
        f"[[variants]]\nname = {toml(EVIL)}\npolicy = {toml('int8')}\n"
    )
    assert main(["study", "--list", str(path)]) == 0
    check_printed(capsys.readouterr().out)


def test_pictures_of_a_study_take_no_name_for_a_formula(tmp_path):
    name = "$\\frac{$\x1b[31m"
    path = tmp_path / "study.toml"
    path.write_text(
        'hosts = 1\nppn = 1\n[train]\nsteps = 1\n[loss]\nseeds = [1]\n[speed]\nrates = ["none"]\nsteps = 9\n'
        f'[[variants]]\nname = {toml(name)}\npolicy = "none"\n'
    )
    losses, speeds = (
        Losses({1: 2.0}, 0.1, {1: 0.1}, {1: 2.0, 2: 1.5}),
        Speeds(1.0, 1.0, [1.0, 1.1], 1.0, {}, {}),
    )
    drawn = pictures(Results(read_study(path), "x", {name: losses}, {"none": {name: speeds}}))
    assert set(drawn) >= {"loss", "speed", "tradeoff"}


# -- nobody else prints ----------------------------------------------------------------------------------

# Files of the package that may print by themselves, and why.
ALLOWED = {
    "files.py": "an error's text, which has been escaped",
    "pmi/server.py": "a number, to the process that has started it",
    "style.py": "say and console",
    "variables.py": "a name, escaped; the floor of style is above it",
}


def prints(text: str) -> bool:
    calls = [ast.unparse(one.func) for one in ast.walk(ast.parse(text)) if isinstance(one, ast.Call)]
    return any(re.fullmatch(r"print|(rich\.)?(console\.)?Console", name) for name in calls)


def test_people_are_told_in_one_place():
    found = [path for path in modules() if prints(path.read_text())]
    assert [path.relative_to(ROOT).as_posix() for path in found] == sorted(f"hybridcomp/{p}" for p in ALLOWED)
