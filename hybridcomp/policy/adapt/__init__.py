"""Adapt a rule's codec as a job goes on, by figures of the data on which all ranks agree."""
