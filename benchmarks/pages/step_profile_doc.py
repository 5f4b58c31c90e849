"""Write the tables of a step by part in docs/study.md from the result file.

python benchmarks/pages/step_profile_doc.py            # rewrite the page between its STEP markers
python benchmarks/pages/step_profile_doc.py --check    # exit 1 if the page and the file differ
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from page import ROOT, origin, result, rewrite

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the tables that the benchmark prints
from stepprofile import tables


def written(found: dict[str, Any]) -> str:
    """Return the tables as Markdown.

    Raises:
        ValueError: parts do not add up to the measured time.
    """
    for one in found["variants"]:
        of_thread = sum(times["wall"] for times in one["main_thread"].values())
        of_cores = sum(one["processor"].values()) / found["cores"]
        for what, total in (("main threads'", of_thread), ("cores'", of_cores)):
            if abs(total - one["step_ms"]) > 0.02 * one["step_ms"]:
                raise ValueError(
                    f"{one['name']}: the {what} parts come to {total:.1f} ms, a step takes {one['step_ms']:.1f}"
                )
    variants, steps = found["variants"], found["variants"][0]["steps"]
    return (
        f"{steps} steps of {found['ranks']} ranks, links at {found['rate']}:\n\n"
        f"{tables.steps(variants)}\n\n"
        "A rank's main thread, the mean of all ranks, by the clock and on a core:\n\n"
        f"{tables.main_thread(variants)}\n\n"
        f"All {found['cores']} cores together:\n\n"
        f"{tables.processor(variants)}\n\n{origin(found)}"
    )


def main() -> None:
    """Rewrite or check the page."""
    rewrite(ROOT / "docs" / "study.md", __file__, STEP=written(result("step_profile.json")))


if __name__ == "__main__":
    main()
