"""Programs that tests start on several ranks, which check what they trained."""
