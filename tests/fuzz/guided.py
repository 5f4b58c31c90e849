"""Coverage-guided fuzzing by atheris (libFuzzer): ``make fuzz RUNS=1000000``.

The kernels are to be built with clang's AddressSanitizer, UndefinedBehaviorSanitizer and coverage; the Makefile
does that. Arguments are libFuzzer's: a corpus directory, ``-runs=``, ``-max_total_time=``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["hybridcomp"]):
    import hybridcomp  # noqa: F401  (instrumented before the target loads it)

from tests.fuzz import kernels
from tests.fuzz.target import one_input, seeds, without_crc


def main() -> None:
    """Write the seeds into the corpus directory, if one is given, and fuzz."""
    for argument in sys.argv[1:]:
        if not argument.startswith("-"):
            corpus = Path(argument)
            corpus.mkdir(parents=True, exist_ok=True)
            for i, seed in enumerate(seeds()):
                (corpus / f"golden-{i}").write_bytes(seed)
            break
    kernels.load()
    with without_crc():
        atheris.Setup(sys.argv, lambda data: one_input(data) and None)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
