"""Linear layers: y_t = W a_t + b, with T of any number of middle dimensions."""

from torch import Tensor, nn

from privacy.clipping.contributions import Contribution, OuterProducts, dense_sum_over_tokens
from privacy.clipping.rules.registry import lazy_rule, require_batch, rule, tokens


@rule(nn.Linear)
def linear(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Contribution]:
    """weight (p, d): sum_t g_t (x) a_t; bias (p,): sum_t g_t. x (B, ..., d), g (B, ..., p)."""
    require_batch(module, x, 2)
    a_BTd, g_BTp = tokens(x), tokens(g)
    out: dict[str, Contribution] = {"weight": OuterProducts(a_BTd, g_BTp)}
    if getattr(module, "bias", None) is not None:
        out["bias"] = dense_sum_over_tokens(g_BTp)
    return out


@lazy_rule("transformers.pytorch_utils", "Conv1D")
def transposed_linear(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Contribution]:
    """GPT-2's layer: weight (d, p), y_t = a_t W + b, so that input and output gradient change places."""
    require_batch(module, x, 2)
    a_BTd, g_BTp = tokens(x), tokens(g)
    return {"weight": OuterProducts(g_BTp, a_BTd), "bias": dense_sum_over_tokens(g_BTp)}
