"""Define the GPT that is trained: blocks, experts, embedding, recomputation and bf16."""
