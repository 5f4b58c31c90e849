"""List the modules of the packages of this repository."""

from pathlib import Path

ROOT = Path(__file__).parents[1]


def modules() -> list[Path]:
    """Return the paths of all modules, of the toolkit and of the lab."""
    return sorted(path for name in ("hybridcomp", "hybridcomp_lab") for path in (ROOT / name).rglob("*.py"))
