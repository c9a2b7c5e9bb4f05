"""What it takes to copy the shards to each node (`data.staging`), and what to read examples one by one instead."""

import math
from typing import Any

from privacy.sampling.rows import most_of_share
from privacy.step.batches import num_micro_batches
from trainer.config.recipe import RunConfig
from trainer.planner.batches import Examples

EXAMPLES_PER_SHARD = 10_000
"""Assumed where no index says better: what the makers of web-scale sets put into one."""
STORE_GBITS = 10.0
REQUEST_PRICE = 0.0004
"""Dollars for 1,000 requests that read an object, as the large clouds ask for at the time of writing."""


def staging_costs(
    config: RunConfig,
    examples: Examples,
    world_size: int,
    ranks_per_node: int,
    store_gbits: float,
    request_price: float,
) -> dict[str, Any]:
    """Bytes of each node and the time that they take; requests of a whole run and their price, both ways; JSON-ready.

    Args:
        store_gbits: Gb/s that each node has to the place of the shards.
        request_price: of 1,000 requests.
    """
    nodes, expected = math.ceil(world_size / ranks_per_node), config.privacy.expected_batch_size
    one_by_one = expected * config.train.num_steps
    costs: dict[str, Any] = {
        "nodes": nodes,
        "store_gbits": store_gbits,
        "request_price": request_price,
        "one_by_one": {"requests": one_by_one, "price": one_by_one / 1000 * request_price},
    }
    if examples.count is not None:
        shards = examples.num_shards or math.ceil(examples.count / EXAMPLES_PER_SHARD)
        share = min(ranks_per_node, world_size) / world_size
        # A shard on the border between two nodes is copied to both.
        per_node = math.ceil(shards * share) + 2 * (nodes > 1)
        size = examples.mean_bytes * examples.count / shards
        requests = shards + nodes - 1
        costs["staged"] = {
            "shards": shards,
            "bytes_per_node": min(per_node, shards) * size,
            "seconds": min(per_node, shards) * size * 8 / (store_gbits * 1e9),
            "requests": requests,
            "price": requests / 1000 * request_price,
        }
    return costs


def micro_batches_of_shares(
    config: RunConfig, num_micro_batches_without: float, cap: int, world_size: int, ranks_per_node: int
) -> float:
    """Micro-batches of each rank where every node reads its own share: there are rows for the largest share."""
    if config.data.staging is None or not config.privacy.enabled or ranks_per_node >= world_size:
        return num_micro_batches_without
    most = min(cap, most_of_share(config.privacy.expected_batch_size * ranks_per_node / world_size))
    return max(num_micro_batches_without, num_micro_batches(most, ranks_per_node, config.train.micro_batch_size))
