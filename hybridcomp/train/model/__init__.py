"""The GPT that is trained: blocks, experts, embedding, and what is computed again or in bf16."""
