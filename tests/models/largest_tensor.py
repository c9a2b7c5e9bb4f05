"""How many elements the largest tensor has that any operation makes, forward and backward."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """`num_elements` after the `with` block. Views count as what they show; expanded ones as what they store."""

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                stored = x.untyped_storage().nbytes() // x.element_size()
                self.num_elements = max(self.num_elements, min(x.numel(), stored))
        return out
