"""The site's own code: links that leave docs, pages of other files, docstrings, and the data of the figures."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "docs" / "site"))  # where MkDocs looks for its hooks' modules, too

import docstrings  # noqa: E402
import figures  # noqa: E402
import links  # noqa: E402
import outside  # noqa: E402

from hybridcomp import style  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
PAGES = [
    *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))),
    *("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"),
    "benchmarks/results/lab.md",
    *(path.relative_to(ROOT).as_posix() for path in sorted(RESULTS.glob("gpu/*/gpu.md"))),
]


def test_the_install_block_fits_a_narrow_screen_and_commands_of_guides_break():
    (block,) = re.findall(r"```sh\n(.*?)```", (ROOT / "docs/index.md").read_text(), re.DOTALL)
    assert "pip install" in block
    assert [line for line in block.splitlines() if len(line) > 60] == []  # of 500 pixels
    (rule,) = re.findall(
        r"@media \(max-width: 44rem\) \{ (.md-typeset .language-sh pre code .*?) \}",
        (ROOT / "docs/site/site.css").read_text(),
    )
    assert "white-space: pre-wrap" in rule
    assert "pygments_lang_class: true" in (ROOT / "mkdocs.yml").read_text()  # which the rule goes by


# -- links -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_lead_to_files(page):
    found = list(links.links((ROOT / page).read_text(encoding="utf-8")))
    assert [link for link in found if links.site_path(links.linked(link, page), ROOT) is None] == []


@pytest.mark.parametrize(
    ("page", "link", "there"),
    [
        ("docs/torch.md", "cuda.md#collectives", "cuda.md#collectives"),
        ("docs/torch.md", "../README.md#codecs-and-policies", "repository/readme.md#codecs-and-policies"),
        ("docs/torch.md", "../examples/ddp.py", "repository/examples/ddp.py.md"),
        ("docs/torch.md", "../examples", "repository/examples/index.md"),
        ("docs/codecs.md", "../benchmarks/results/chaos.json", "repository/benchmarks/results/chaos.json"),
        ("docs/api/codecs.md", "../codecs.md", "../codecs.md"),
        ("README.md", "docs/failures.md#x", "../failures.md#x"),
        ("README.md", "CONTRIBUTING.md", "contributing.md"),
        ("benchmarks/results/lab.md", "lab/sendrecv.png", "lab/sendrecv.png"),
        ("benchmarks/results/lab.md", "../../docs/performance.md", "../../../performance.md"),
        ("docs/torch.md", "../gone.py", "../gone.py"),
        ("docs/torch.md", "../../etc/passwd", "../../etc/passwd"),
        ("docs/torch.md", "https://a.b/../x.md", "https://a.b/../x.md"),
        ("docs/torch.md", "#here", "#here"),
    ],
)
def test_links_are_right_on_the_site(page, link, there):
    assert (
        links.rewrite(f"see [`it`]({link}), ![x]({link})", page, ROOT)
        == f"see [`it`]({there}), ![x]({there})"
    )


@pytest.mark.parametrize(
    "code", ["```python\na[0](../README.md)\n```", "  ~~~\n[a](../README.md)\n  ~~~", "`[a](../README.md)`"]
)
def test_code_has_no_links(code):
    assert list(links.links(code)) == []
    assert links.rewrite(code, "docs/torch.md", ROOT) == code


def test_what_is_linked_is_reached_with_what_it_links():
    found = outside.reached(["docs/torch.md"], ROOT)
    assert {
        "README.md",
        "CONTRIBUTING.md",
        "examples",
        "examples/ddp.py",
        "benchmarks/results/lab/sendrecv.png",
    } <= set(found)
    assert not [path for path in found if path.startswith("docs/") or "__pycache__" in path]


def test_a_page_of_a_file_is_its_text_and_one_of_a_folder_its_list():
    text = outside.page("examples/ddp.py", ROOT, [])
    assert "~~~~~~ python\n" + (ROOT / "examples" / "ddp.py").read_text(encoding="utf-8").rstrip() in text
    folder = outside.page("tests/faults", ROOT, ["tests/faults/chaos.py"])
    assert "- [chaos.py](chaos.py.md)\n" in folder
    assert "- links\n" in folder


# -- docstrings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "made"),
    [
        (
            "See :class:`~a.Codec`.",
            'See <autoref identifier="full.a.Codec" optional><code>Codec</code></autoref>.',
        ),
        ("See :mod:`.toml`.", 'See <autoref identifier="full.toml" optional><code>toml</code></autoref>.'),
        (
            "One.\n\n.. code-block:: python\n\n    a = 1\n\n    b\n\nTwo.",
            "One.\n\n```python\na = 1\n\nb\n```\n\nTwo.",
        ),
        (
            "Args:\n    a, b: two,\n        of it\n    c: x",
            "Args:\n    a: two,\n        of it\n    b: two,\n        of it\n    c: x",
        ),
    ],
)
def test_docstrings_become_markdown(text, made):
    assert docstrings.markdown(text, lambda name: f"full.{name}") == made


# -- figures ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drawn():
    return {name: make(RESULTS) for name, make in figures.FIGURES.items()}


@pytest.mark.parametrize("name", figures.FIGURES)
def test_every_figure_has_plots_of_its_choices(name, drawn):
    data = json.loads(drawn[name].json())
    assert data["plots"]
    for key, plot in data["plots"].items():
        chosen = key.split("|")
        assert len(chosen) == len(data["choices"])
        assert all(one in options for one, options in zip(chosen, data["choices"].values(), strict=True))
        assert plot["note"]
        for trace in plot["traces"]:
            assert len(trace["x"]) == len(trace["y"]) > 0
            assert all(isinstance(y, float) for y in trace["y"])
            assert all(y > 0 for y in trace["y"] if "y" in plot.get("log", ""))


@pytest.mark.parametrize(("value", "key", "scale"), [("time", "seconds", 1e3), ("busbw", "busbw", 1)])
def test_the_lab_s_lines_are_what_its_file_says(value, key, scale, drawn):
    cell = json.loads((RESULTS / "lab" / "bcast.json").read_text())["bcast_1gbit_4x1_16M"]
    plot = drawn["lab"].plots["broadcast", "1 Gb/s", "4", value]
    said = {line.name: dict(zip(line.x, line.y, strict=True))[16 << 20] for line in plot.traces}
    ours = {row["codec"]: row[key] * scale for row in cell["rows"]}
    peers = {{"mpi": "MPICH", "gloo": "gloo"}[row["peer"]]: row[key] * scale for row in cell["peers"]}
    assert said == ours | peers
    assert [line.name for line in plot.traces if line.peer] == list(peers)
    assert all(line.x == sorted(line.x) for line in plot.traces)


def test_gains_have_no_peers(drawn):
    plot = drawn["gains"].plots["1 Gb/s",]
    assert plot.one
    assert not any(line.peer for line in plot.traces)


def test_codecs_say_where_they_were_measured_and_whether_alone(drawn):
    busy = json.loads((RESULTS / "codecs" / "avx2.json").read_text())["machine"]["load"] > 0.5
    assert ("busy" in drawn["codecs"].plots["encode, GB/s", "Gaussian", "avx2"].note) is busy
    exact = drawn["codecs"].plots["relative L2 error", "Gaussian", "avx512"].traces[0]
    assert (exact.name, set(exact.y)) == ("exact", {1e-5})


def test_every_place_has_a_figure_and_every_figure_a_place():
    named = {
        name
        for page in PAGES
        if page.startswith("docs/")
        for name in re.findall(r'data-figure="([\w-]+)"', (ROOT / page).read_text(encoding="utf-8"))
    }
    assert named == set(figures.FIGURES)


def test_every_colour_that_is_named_is_one_of_the_style():
    defined = set(re.findall(r"--hc-([\w-]+):", style.variables()))
    sheet = (ROOT / "docs" / "site" / "site.css").read_text() + style.page("", "")
    script = (ROOT / "docs" / "site" / "figures.js").read_text()
    named = set(re.findall(r"var\(--hc-([\w-]+)\)", sheet)) | set(re.findall(r'colour\("(\w+)"\)', script))
    assert {"text", "line", "font"} <= named <= defined
    assert f"const SERIES = {len(style.SERIES)};" in script
    assert all(f"series-{i}" in defined for i in range(len(style.SERIES)))
