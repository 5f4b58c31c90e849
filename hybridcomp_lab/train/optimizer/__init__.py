"""Compute the next weights from gradients: AdamW, LANS or SGD, clipping over all axes, ZeRO-1."""
