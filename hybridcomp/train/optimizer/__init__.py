"""Compute the next weights from gradients: AdamW, clipping over all axes, ZeRO-1."""
