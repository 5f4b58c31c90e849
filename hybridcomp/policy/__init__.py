"""Decide which codec carries which message: policies.

A policy maps a frozen :class:`Message` to a :class:`Choice`. It is written as TOML (:mod:`.toml`); presets
live beside this file in ``presets/``.
"""

from hybridcomp.policy.load import PRESETS, default_policy, frozen_to, load_policy
from hybridcomp.policy.message import OPS, PHASES, Choice, Message
from hybridcomp.policy.places import PARTS, Place, in_place, place, set_place
from hybridcomp.policy.rules import Policy, Rule, check_feedback
from hybridcomp.policy.tables import TablePlan, homogenization_index, plan_table, table_policy

__all__ = [
    "OPS",
    "PARTS",
    "PHASES",
    "PRESETS",
    "Choice",
    "Message",
    "Place",
    "Policy",
    "Rule",
    "TablePlan",
    "check_feedback",
    "default_policy",
    "frozen_to",
    "homogenization_index",
    "in_place",
    "load_policy",
    "place",
    "plan_table",
    "set_place",
    "table_policy",
]
