"""Both searches on this machine: `python -m tests.privacy.clipping.search NUM_PAIRS` prints what they find by rule and dtype."""

import sys
import time
from collections import defaultdict
from collections.abc import Iterator

import torch

from privacy.step.sharded_sums import ShardedSums
from tests.privacy.clipping.magnitudes import norms
from tests.privacy.clipping.neighbours import Found, climb, sums
from trainer.ranks import distributed


def main(num_pairs: int) -> None:
    """Prints a table for each search; what took how long, and the worst construction, on stderr."""
    torch.set_num_threads(1)
    device = distributed.start(distributed.Ranks())
    searches: dict[str, Iterator[Found]] = {
        "sums": sums(device, "record", 3 * num_pairs // 10),
        "sums, sharded": sums(device, "record", num_pairs // 10, ShardedSums),
        "climbing": climb(device, "record", 3 * num_pairs // 10),
        "climbing, sharded": climb(device, "record", num_pairs // 10, ShardedSums),
        "norms": norms(device, "record", num_pairs // 5),
    }
    print("| search | rule | precision | pairs | largest \\|S - S'\\| / C |\n|---|---|---|---|---|")
    for title, search in searches.items():
        started, pairs, largest = time.process_time(), defaultdict(int), defaultdict(float)
        worst = Found(0, 0, ("", ""), None)
        for found in search:
            pairs[found.name] += found.pairs
            largest[found.name] = max(largest[found.name], found.size)
            worst = max(worst, found, key=lambda one: one.size)
        for rule, dtype in sorted(pairs):
            print(f"| {title} | {rule} | {dtype} | {pairs[rule, dtype]:,} | {largest[rule, dtype]:.7f} |")
        seconds = time.process_time() - started
        print(
            f"{title}: {sum(pairs.values())} pairs in {seconds:.0f} s; the worst: {worst}", file=sys.stderr, flush=True
        )
    distributed.finish(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
