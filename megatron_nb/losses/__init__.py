"""Losses: each returns (sum, count, metrics); the division by the global count happens once, in the trainer.

A gradient then depends neither on data, context or tensor ranks, nor on micro-batches, nor on packing. `count` is an
integer held by context rank 0; fractions live in loss_weight.

A loss has `output`, what it wants of the model: "logprob" ([t] of each target; then also `temperature`, `entropy` and
`coefficient(batch)`) or "score" ([S] of each document).
"""
