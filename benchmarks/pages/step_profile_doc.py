"""Write the tables of a step by part in docs/study.md from the result file.

python benchmarks/pages/step_profile_doc.py            # rewrite the page between its STEP markers
python benchmarks/pages/step_profile_doc.py --check    # exit 1 if the page and the file differ
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from page import RESULTS, ROOT, rewrite

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the tables that the benchmark prints
from stepprofile import tables


def written(result: dict[str, Any]) -> str:
    """Return the tables as Markdown.

    Raises:
        ValueError: parts do not add up to the measured time.
    """
    for one in result["variants"]:
        of_thread = sum(times["wall"] for times in one["main_thread"].values())
        of_cores = sum(one["processor"].values()) / result["cores"]
        for what, found in (("main threads'", of_thread), ("cores'", of_cores)):
            if abs(found - one["step_ms"]) > 0.02 * one["step_ms"]:
                raise ValueError(
                    f"{one['name']}: the {what} parts come to {found:.1f} ms, a step takes {one['step_ms']:.1f}"
                )
    variants, steps = result["variants"], result["variants"][0]["steps"]
    return (
        f"{steps} steps of {result['ranks']} ranks, links at {result['rate']} "
        f"({result['machine']['processor']}):\n\n"
        f"{tables.steps(variants)}\n\n"
        "A rank's main thread, the mean of all ranks, by the clock and on a core:\n\n"
        f"{tables.main_thread(variants)}\n\n"
        f"All {result['cores']} cores together:\n\n"
        f"{tables.processor(variants)}"
    )


def main() -> None:
    """Rewrite or check the page."""
    result = json.loads((RESULTS / "step_profile.json").read_text(encoding="utf-8"))
    rewrite(ROOT / "docs" / "study.md", __file__, STEP=written(result))


if __name__ == "__main__":
    main()
