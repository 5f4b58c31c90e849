"""Write the tables of docs/variables.md from the table of hybridcomp.variables.

python benchmarks/pages/variables_doc.py            # rewrite them between their VARIABLES markers
python benchmarks/pages/variables_doc.py --check    # exit 1 if the page and the table differ
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from page import ROOT, rewrite

from hybridcomp.variables import INTERNAL, TESTS, VARIABLES

_TOLD = {
    INTERNAL: "A program may read them; whoever sets them by hand confuses the ranks.",
    TESTS: "The package reads none of them; they are here so that nobody is warned of them.",
}


def main() -> None:
    rewrite(ROOT / "docs" / "variables.md", __file__, VARIABLES="\n".join(sections()))


def sections() -> Iterator[str]:
    for section, found in groupby(VARIABLES.values(), lambda one: one.section):
        yield f"\n## {section}\n"
        if section in _TOLD:
            yield f"{_TOLD[section]}\n"
        yield "| variable | what it does | values | where it is not set |"
        yield "|---|---|---|---|"
        for one in found:
            yield f"| `{one.name}` | {one.does} | {one.allowed} | {one.default} |"


if __name__ == "__main__":
    main()
