"""Run all of PyTorch's distributed tests for this backend and for gloo, and compare: ``make test-torch-suite``.

    python -m tests.peer.torch_suite [TEST ...]

A table of what differs, then a line of totals. Exit status 1 if a test fails that gloo passes.
"""

import os
import sys
import time

from tests.peer import launches, suite
from tests.peer.launches import Verdict

OURS = "hybridcomp"
THEIRS = "gloo"
# Tests that gloo passes and hybridcomp does not, and why. None is known.
EXCEPTIONS: dict[str, str] = {}


def worse(ours: dict[str, Verdict], theirs: dict[str, Verdict]) -> list[str]:
    """Return tests that gloo passes and we do not, without a reason."""
    return [
        test
        for test, verdict in ours.items()
        if verdict.outcome != "pass" and theirs[test].outcome == "pass" and test not in EXCEPTIONS
    ]


def _count(verdicts: dict[str, Verdict]) -> str:
    by = [verdict.outcome for verdict in verdicts.values()]
    seconds = sum(verdict.seconds for verdict in verdicts.values())
    return f"{by.count('pass')} pass, {by.count('fail')} fail, {by.count('skip')} skipped, {seconds:.0f} s"


def main(tests: list[str]) -> int:
    os.environ.setdefault("PYTORCH_PRINT_REPRO_ON_FAILURE", "0")
    tests = tests or suite.names(suite.load(THEIRS, ranks=4))
    verdicts = {}
    for backend in (OURS, THEIRS):
        began = time.monotonic()

        def tell(test: str, verdict: Verdict, backend: str = backend) -> None:
            print(f"{backend:10} {verdict.outcome} {test} {verdict.seconds:.1f} s", flush=True)
            if verdict.outcome == "fail":
                print(verdict.why, flush=True)

        verdicts[backend] = launches.run(backend, tests, tell=tell)
        print(f"{backend}: {time.monotonic() - began:.0f} s with starts of ranks\n", flush=True)
    ours, theirs = verdicts[OURS], verdicts[THEIRS]
    reasons: dict[str, int] = {}
    for test in tests:
        if ours[test].outcome != theirs[test].outcome:
            print(f"{test}: {OURS} {ours[test].outcome}, {THEIRS} {theirs[test].outcome}")
        if ours[test].outcome == "skip":
            reasons[ours[test].why] = reasons.get(ours[test].why, 0) + 1
    for why, count in sorted(reasons.items(), key=lambda item: -item[1]):
        print(f"skipped {count:3}: {why}")
    print(f"{OURS}: {_count(ours)}; {THEIRS}: {_count(theirs)}")
    failed = worse(ours, theirs)
    if failed:
        print(f"{THEIRS} passes, {OURS} does not: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
