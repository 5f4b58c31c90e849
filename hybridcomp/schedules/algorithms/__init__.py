"""Algorithms of collectives, one file each: functions that build a rank's schedule."""
