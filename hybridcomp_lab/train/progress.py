"""Show a run to a person: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from rich.live import Live
from rich.text import Text

from hybridcomp import style, variables
from hybridcomp.errors import printable

_REFRESH_SECONDS = 0.2


def format_bytes(count: float) -> str:
    """Format a byte count for people, in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


class Progress:
    """Progress of a run, printed to standard output; a context manager.

    Args:
        steps: number of steps of the whole run.
        every: steps between lines where there is no terminal.
    """

    def __init__(self, steps: int, every: int) -> None:
        columns = variables.TERMINAL.read()
        self._console = style.console() if columns is None else style.console(terminal=True, width=columns)
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._steps = steps
        self._every = every
        self._shown = 0.0
        self._val_loss: float | None = None

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        sys.stdout.flush()

    def evaluated(self, step: int, loss: float) -> None:
        """Show an evaluation."""
        self._val_loss = loss
        self.say(f"step {step}/{self._steps}  validation loss {loss:.4f}")

    def stepped(
        self, step: int, loss: float, tokens_per_s: float, wire: Mapping[str, int], more: str = ""
    ) -> None:
        """Show a step; ``wire`` is bytes per axis so far, ``more`` further text."""
        line = self._line(step, loss, tokens_per_s, wire) + (more and f"  {more}")
        if self._live is None:
            if step % self._every == 0 or step == self._steps:
                self.say(line)
            return
        now = time.monotonic()
        if now - self._shown >= _REFRESH_SECONDS or step == self._steps:
            self._shown = now
            self._live.update(Text(printable(line), no_wrap=True, overflow="ellipsis"), refresh=True)
            sys.stdout.flush()

    def _line(self, step: int, loss: float, tokens_per_s: float, wire: Mapping[str, int]) -> str:
        sent = "  ".join(f"{axis} {format_bytes(count)}" for axis, count in wire.items())
        val = "" if self._val_loss is None or self._live is None else f"  val {self._val_loss:.4f}"
        return f"step {step}/{self._steps}  loss {loss:.4f}{val}  {tokens_per_s:,.0f} tokens/s  wire: {sent}"
