"""Reads tar shards and makes padded micro-batches.

An example passes these files: `tar_index` (example id -> shard, offset, length), `storage` (bytes
from a folder or a server), `reader` (bytes -> members), `transforms` and `tokenizer` (members ->
arrays, with that example's own key), `examples` (the arrays of a task), `loader` (workers, order,
padding). Neither privacy, models nor training are known here: ids and keys enter, `Batch` leaves.
"""
