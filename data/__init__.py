"""From tar shards to padded micro-batches.

The way of one example: `tar_index` (example id -> shard, offset, length), `reader` (one `pread`), `transforms` and
`tokenizer` (bytes -> arrays, with that example's own key), `examples` (which arrays a task wants), `loader` (workers,
order, padding). This package knows nothing of privacy, models or training: ids and keys come in, `Batch` goes out.
"""
