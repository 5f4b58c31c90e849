"""Programs that tests start on several ranks, which check what they trained."""

from pathlib import Path

TEXT = Path(__file__).parents[3] / "LICENSE"  # that stays: what they check is of its batches
