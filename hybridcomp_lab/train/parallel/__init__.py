"""Spread the model over ranks: tensor, sequence and data parallelism."""
