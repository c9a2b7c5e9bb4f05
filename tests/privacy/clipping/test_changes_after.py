"""What is changed after the self-check is noticed, wherever it lies."""

import pytest
import torch
from torch import Tensor, nn

from privacy.clipping import ClippedSum
from privacy.clipping.selfcheck import check_against_autograd
from privacy.errors import PrivacyConfigError
from tests.privacy.clipping.test_selfcheck import Net, add, made_up


@pytest.mark.parametrize("change", ["class", "global hook", "hook at a reused address", "task"])
def test_changes_outside_of_the_model_are_noticed_too(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Loss(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model, self.contrast = model, False

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.model(x)
            return y

    model = Net()
    task, first = Loss(model), model.a.register_forward_hook(lambda m, args, y: None)
    check_against_autograd(model, made_up(), task)
    if change == "class":
        monkeypatch.setattr(Net, "forward", lambda self, x: self.b(self.a(x)).sum(1))
    elif change == "global hook":
        first = nn.modules.module.register_module_forward_hook(lambda m, args, y: None)
    elif change == "task":
        task.contrast = True
    else:
        first.remove()
        model.a.register_forward_hook(lambda m, args, y: 2 * y)
    try:
        with pytest.raises(PrivacyConfigError, match="since the self-check"):
            add(ClippedSum(model, 1.0), task, x=torch.randn(3, 4))
    finally:
        first.remove()
