"""From gradients to the next weights: AdamW, clipping over all axes, ZeRO-1."""
