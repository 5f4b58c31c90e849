"""Write the gains of the programs of examples/ in the lab into docs/torch.md, from the result file.

python benchmarks/pages/examples_doc.py            # rewrite the page between its EXAMPLES markers
python benchmarks/pages/examples_doc.py --check    # exit 1 if the page and the file differ
"""

from __future__ import annotations

from typing import Any

from page import ROOT, origin, result, rewrite


def lines(record: dict[str, Any]) -> list[str]:
    """Write a line for each program."""
    made = [
        "| program | on hybridcomp | gloo, per second | hybridcomp, per second | times as fast | loss on gloo | loss |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in record["rows"]:
        name = f"[{row['program']}.py](../examples/{row['program']}.py)"
        speeds = [f"{row[side]:,.4g}" for side in ("gloo_per_second", "hybridcomp_per_second")]
        losses = [f"{row[side]:.3f}" for side in ("gloo_loss", "hybridcomp_loss")]
        cells = [name, row["how"], *speeds, f"**{row['ratio']:.2f}**", *losses]
        made.append(f"| {' | '.join(cells)} |")
    return made


def main() -> None:
    """Rewrite or check the page."""
    record = result("examples.json")
    made = "\n".join(
        [
            f"The programs on {record['hosts']} hosts at {record['rate']} (`make bench-examples`), tokens or samples "
            "per second, the loss after their few steps, policy `hybrid`:",
            "",
            *lines(record),
            "",
            origin(record),
        ]
    )
    rewrite(ROOT / "docs" / "torch.md", __file__, EXAMPLES=made)


if __name__ == "__main__":
    main()
