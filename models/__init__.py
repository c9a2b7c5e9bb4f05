"""Models: a vision transformer encoder, a text decoder and the captioner made of both.

The code is free of training, privacy and data. Two conventions make every model clippable per
example:

* Parameters belong either to `Linear`, `Conv2d`, `LayerNorm` or `Embedding` leaves, or are *raw*
  parameters with a leading dimension of 1 (class token, learned positions, type embeddings) that
  are only broadcast along the batch.
* No layer mixes examples: row i of every output depends on row i of the inputs alone.
"""
