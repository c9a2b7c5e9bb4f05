"""The peak that model FLOPs utilisation is a share of."""

import pytest
import torch

from trainer.planner.hardware import known_peak


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H200", torch.bfloat16, 989e12),
        ("NVIDIA H200", torch.float32, 67e12),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312e12),
        ("NVIDIA H100 PCIe", torch.bfloat16, None),  # slower than the sheet that is known
        ("a device of tomorrow", torch.float32, None),
    ],
)
def test_utilisation_is_of_known_devices_alone(
    name: str, dtype: torch.dtype, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert known_peak(torch.device("cuda"), dtype) == peak
    assert known_peak(torch.device("cpu"), dtype) is None
