"""Run studies: a grid of training runs on the lab, with their losses over seeds and their speeds over links."""

from __future__ import annotations
