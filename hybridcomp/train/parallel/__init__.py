"""How the model is spread over ranks: tensor, sequence and data parallelism."""
