"""From a layer call to contributions: one short function per kind of layer.

A rule receives the module, its first input and the gradient of the summed loss with respect to its output, and returns what
that call adds to each of the module's own parameters. Rules are found by exact type, because a subclass may compute
something else; add one with `@rule(MyLayer)` (docs/add_a_rule.md).
"""

from privacy.clipping.rules import convolution, embedding, linear, norm, vocabulary  # noqa: F401  # registers the rules
from privacy.clipping.rules.registry import KEEPS, RULES, Rule, register_lazily, rule
from privacy.clipping.rules.unsupported import unsupported_reason

__all__ = ["KEEPS", "RULES", "Rule", "register_lazily", "rule", "unsupported_reason"]
