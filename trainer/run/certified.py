"""What certified arithmetic asks of a start: deterministic kernels, and integers that depend on the example alone.

The first part of the hypothesis of docs/certified.md is a matter of settings, the second is looked for on made-up inputs, here
also between ranks: an example is dealt to any of them.
"""

import hashlib
import os
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from privacy.clipping.certified_sum import CertifiedSum
from privacy.clipping.checked import nothing_is_small
from privacy.errors import PrivacyConfigError
from privacy.step.engine import Engine, holds_whole_weights, to_device
from trainer.ranks import distributed


def allow_deterministic_kernels() -> None:
    """Makes `use_deterministic_kernels` possible later: cuBLAS reads this once, at the first product."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def use_deterministic_kernels() -> None:
    """Forbids atomics and kernels chosen by trial, in the whole process; call it, or the above, before the first kernel runs.

    Attention on CUDA has a deterministic backward, and takes it for no less: `warn_only` would leave it as it is.
    """
    allow_deterministic_kernels()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # new tensors are written once
    torch.backends.cudnn.benchmark = False


def require_same_integers(
    clipped: CertifiedSum, engine: Engine, synthetic_inputs: Callable[[int], dict[str, Tensor]], micro_batch_size: int
) -> None:
    """Made-up examples give the same integers in every row, among any neighbours and on every rank. Collective.

    Args:
        synthetic_inputs: makes up the number of examples that it is called with, the same on every rank.

    Raises:
        PrivacyConfigError: on all ranks, if they do not somewhere; the parameter is named.
    """
    inputs = to_device(synthetic_inputs(micro_batch_size), engine)
    problem, digests = None, dict[str, str]()
    try:
        # Weights near zero would hide the gradients before them. Shards are left as they are.
        with nothing_is_small(engine.module) if holds_whole_weights(engine) else nullcontext():
            found = clipped.check_rows(engine.module, inputs)
        digests = {name: hashlib.sha256(z.cpu().numpy().tobytes()).hexdigest() for name, z in found.items()}
    except PrivacyConfigError as error:
        problem = str(error)
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        problem = f"privacy.arithmetic = 'certified' is refused: {str(error).splitlines()[0]}"
    answers = distributed.gather_objects((distributed.host_name(), problem, digests))
    for rank, (host, said, theirs) in enumerate(answers):
        if said is not None:
            raise PrivacyConfigError(said)
        differing = [name for name in engine.shapes if theirs.get(name) != answers[0][2].get(name)]
        if differing:
            raise PrivacyConfigError(
                f"privacy.arithmetic = 'certified' is refused: the gradient of {differing[0]} of one and the same example is "
                f"another on rank {rank} ({host}) than on rank 0 ({answers[0][0]}); use machines of one kind with the same "
                "libraries and numbers of threads, or privacy.arithmetic = 'floating'"
            )
