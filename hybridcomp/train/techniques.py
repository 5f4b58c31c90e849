"""What a policy's techniques need of a configuration: see docs/techniques.md. No torch: ranks do not exist yet."""

from __future__ import annotations

from hybridcomp.errors import ConfigError
from hybridcomp.policy import Policy, Rule
from hybridcomp.train.config import TrainConfig


def check_techniques(policy: Policy, config: TrainConfig) -> None:
    """Check that the schedule has what the policy speaks of.

    Raises:
        ConfigError: ``only = "cool-down"`` with a schedule whose pipeline stays full.
    """
    only = policy.entries.get("pp", {}).get("backward", Rule()).only
    if only is not None and config.schedule == "2bw":
        raise ConfigError(
            f"policy {policy.name}: pp.backward has only = {only!r}, and schedule 2bw has none, as it goes on into "
            "the next step: take 1f1b, gpipe or interleaved, or leave it out"
        )
