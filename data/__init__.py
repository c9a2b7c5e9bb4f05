"""From tar shards to padded micro-batches.

The way of one example: `tar_index` (example id -> shard, offset, length), `storage` (bytes from a folder or a server),
`reader` (bytes -> members), `transforms` and `tokenizer` (members -> arrays, with that example's own key), `examples`
(which arrays a task wants), `loader` (workers, order, padding). `index.build` comes before training. This package knows
nothing of privacy, models or training: ids and keys come in, `Batch` goes out.
"""
