"""Heads in blocks and in chunks of classes: equal to dense references, and bounded in memory."""

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from evaluation.private_head import methods, rows
from evaluation.private_head.methods import METHODS
from evaluation.private_head.rows import Rows
from evaluation.private_head.run import without_noise

L, D, N = 7, 6, 61
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("dp-ls", {"alpha": 0.7}), ("dp-ls", {"class_moments": True, "max_norm": 0.5}), ("dp-newton", {"num_steps": 3}),
    ("dp-fc", {"num_steps": 4, "max_grad_norm": 0.3}), ("dp-fc-bce", {"num_steps": 4, "max_grad_norm": 0.4}),
    ("dp-gd", {"max_grad_norm": 0.7}),
]  # fmt: skip


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "ROWS_PER_BLOCK", 8)
    monkeypatch.setattr(methods, "CHUNK_BYTES", 3 * 8 * D**2)


def data(num_examples: int = N) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    return rng.normal(size=(num_examples, D)).astype(np.float32), rng.integers(0, L, num_examples)


def reference(method: str, options: dict[str, Any], features: np.ndarray, labels: np.ndarray) -> torch.Tensor:
    """Dense, by torch's derivatives of the losses as they are published, each example's gradient by itself."""
    o = {"max_norm": 1.0, "num_steps": 1, "lr": 1.0, "max_grad_norm": 1.0} | options
    o["num_steps"] = options.get("num_steps", 10 if method.startswith("dp-fc") else 1)
    x, y = torch.tensor(features, dtype=torch.float64), torch.tensor(labels)
    target = functional.one_hot(y, L).double()
    if method != "dp-gd":
        x = x * (o["max_norm"] / x.norm(dim=1, keepdim=True)).clamp(max=1)
    w = torch.zeros(L, D, dtype=torch.float64)
    moment, scale = x.T @ x, len(x) * o["max_norm"] ** 2
    eye = torch.eye(D, dtype=torch.float64)
    if method == "dp-ls":
        own = [x[y == label] for label in range(L)]
        both = [
            o.get("alpha", 1.0) * moment + (x_own.T @ x_own if "class_moments" in o else 0) + 0.03 * scale * eye
            for x_own in own
        ]
        return torch.stack([torch.linalg.solve(m, x_own.sum(0)) for m, x_own in zip(both, own, strict=True)])
    bias = -10.0 if method == "dp-fc-bce" else 0.0

    def loss(w: torch.Tensor, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        scores = x @ w.T + bias
        if method in ("dp-newton", "dp-fc-bce"):
            return functional.binary_cross_entropy_with_logits(scores, target, reduction="sum")
        return functional.cross_entropy(scores, target)

    for _ in range(o["num_steps"]):
        g = torch.stack([torch.func.grad(loss)(w, x[i], target[i]) for i in range(len(x))])
        if method == "dp-newton":
            for label in range(L):
                h = torch.func.hessian(
                    lambda own, label=label: functional.binary_cross_entropy_with_logits(
                        x @ own, target[:, label], reduction="sum"
                    )
                )(w[label])
                w[label] = w[label] - torch.linalg.solve(h + 1e-3 * scale * eye, g.sum(0)[label])
            continue
        g = (g * (o["max_grad_norm"] / g.flatten(1).norm(dim=1)).clamp(max=1)[:, None, None]).sum(0)
        w = -g if method == "dp-gd" else w - o["lr"] * torch.linalg.solve(moment + 1e-2 * scale * eye, g.T).T
    return w


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("method", "options"), OPTIONS)
def test_streamed_heads_equal_dense_references(method: str, options: dict[str, Any]) -> None:
    x, y = data()
    found = without_noise(Rows(x, y), L, method, options)
    np.testing.assert_allclose(found, reference(method, options, x, y).numpy(), rtol=1e-8, atol=1e-10)


def test_memory_does_not_grow_with_examples_or_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """All Hessians would take 4.7 MB here, all scores 4.2 MB, and the features in fp64 6.3 MB."""
    monkeypatch.setattr(rows, "ROWS_PER_BLOCK", 256)
    monkeypatch.setattr(methods, "CHUNK_BYTES", 2 * 8 * 96**2)
    rng = np.random.default_rng(0)
    whole = Rows(rng.normal(size=(8192, 96)).astype(np.float32), rng.integers(0, 64, 8192))
    for method, options in (("dp-newton", {}), ("dp-ls", {"class_moments": True}), ("dp-fc", {"num_steps": 1})):
        tracemalloc.start()
        try:
            without_noise(whole, 64, method, options)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 2_500_000, (method, peak)


def test_every_method_is_compared() -> None:
    assert {method for method, _ in OPTIONS} == set(METHODS)
