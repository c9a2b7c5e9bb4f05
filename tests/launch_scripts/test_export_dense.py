"""The exported encoder under transformers' own dense heads (DPT, YOLOS), trained on a few photographs with their masks and boxes.

Pictures are embedded photographs of clothes, one or two on
a white ground: masks are their dark pixels, boxes the masks' edges.
"""

import io
import json
import lzma
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from data.embedded import FASHION_FILE, NUM_SHADES
from evaluation.dense.heads import Detections, average_precision, confusion, mean_iou
from evaluation.dense.sources import Objects
from models.converters.huggingface import to_vit_model
from models.vit import VisionTransformer
from tests.models.tiny import tiny_captioner

SIDE, KINDS = 64, (1, 8, 9)
"""Pixels of a picture; trousers, bags and boots."""


class Photographs(NamedTuple):
    images_BCHW: Tensor
    masks_BHW: Tensor
    objects: list[Objects]


def photographs(count: int) -> Photographs:
    with np.load(io.BytesIO(lzma.decompress(FASHION_FILE.read_bytes()))) as held:
        ink = 1 - held["shades_NHW"] / (NUM_SHADES - 1)
        kinds = held["caption_N"] // 2
    rng = np.random.default_rng(0)
    images, masks, objects = np.zeros((count, SIDE, SIDE)), np.zeros((count, SIDE, SIDE), np.int64), []
    for n in range(count):
        boxes, classes = [], []
        for place in range(1 + n % 2):  # in the left half, in the right one
            kind = rng.integers(len(KINDS))
            ink_HW = ink[rng.choice(np.flatnonzero(kinds == KINDS[kind]))]
            top, left = rng.integers(0, SIDE - 28), 32 * place + rng.integers(0, 4)
            images[n, top : top + 28, left : left + 28] = ink_HW
            inside = np.zeros((SIDE, SIDE), bool)
            inside[top : top + 28, left : left + 28] = ink_HW > 0.15
            masks[n][inside] = kind + 1
            rows, columns = np.flatnonzero(inside.any(1)), np.flatnonzero(inside.any(0))
            boxes.append([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1])
            classes.append(kind)
        objects.append(Objects(np.array(boxes, np.float32), np.array(classes), np.zeros(len(classes), bool)))
    shown = torch.tensor(images, dtype=torch.float32)[:, None].expand(-1, 3, -1, -1)
    return Photographs(2 * shown - 0.5, torch.from_numpy(masks), objects)


@pytest.fixture(scope="module")
def encoder() -> VisionTransformer:
    shape = {"encoder_width": 48, "encoder_num_heads": 2, "encoder_depth": 4, "patch_size": 8}
    return tiny_captioner(image_size=SIDE, **shape).eval().encoder


@pytest.fixture(scope="module")
def folder(encoder: VisionTransformer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported")
    config, tensors = to_vit_model(encoder)
    (path / "config.json").write_text(json.dumps(config))
    save_file({n: t.contiguous() for n, t in tensors.items()}, path / "model.safetensors", metadata={"format": "pt"})
    return path


def shared(folder: Path) -> dict[str, Any]:
    """What a ViT's configuration has in common with those of DPT and YOLOS."""
    stated = json.loads((folder / "config.json").read_text())
    names = (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act", "layer_norm_eps",
        "image_size", "patch_size", "qkv_bias",
    )  # fmt: skip
    return {name: stated[name] for name in names}


def dpt(folder: Path) -> Any:
    from transformers import DPTConfig, DPTForSemanticSegmentation

    config = DPTConfig(
        **shared(folder), is_hybrid=False, backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[24] * 4,
        fusion_hidden_size=24, readout_type="ignore", num_labels=1 + len(KINDS), use_auxiliary_head=False,
        semantic_classifier_dropout=0.0,
    )  # fmt: skip
    return DPTForSemanticSegmentation.from_pretrained(folder, config=config, output_loading_info=True)


def yolos(folder: Path) -> Any:
    from safetensors.torch import load_file
    from transformers import YolosConfig, YolosForObjectDetection

    common = shared(folder)
    common["image_size"] = [common["image_size"]] * 2
    config = YolosConfig(
        **common,
        num_detection_tokens=8,
        num_labels=len(KINDS),
        use_mid_position_embeddings=False,
        hidden_dropout_prob=0.0,
    )
    model, info = YolosForObjectDetection.from_pretrained(
        folder, config=config, ignore_mismatched_sizes=True, output_loading_info=True
    )
    # Its position table has rows for the detection tokens too, behind those of the class token and of the patches.
    trained = load_file(folder / "model.safetensors")["embeddings.position_embeddings"]
    with torch.no_grad():
        model.vit.embeddings.position_embeddings.zero_()
        model.vit.embeddings.position_embeddings[:, : trained.shape[1]] = trained
        model.vit.embeddings.detection_tokens.normal_(std=0.02)
    return model, info


def test_segmentation_by_dpt_starts_from_the_encoder(folder: Path, encoder: VisionTransformer) -> None:
    model, info = dpt(folder)
    assert not info["unexpected_keys"] and not info["mismatched_keys"]
    assert all(name.startswith(("neck.", "head.", "dpt.pooler.")) for name in info["missing_keys"])
    x = photographs(2).images_BCHW
    with torch.no_grad():
        found = model.eval().dpt(x).last_hidden_state
        torch.testing.assert_close(found, encoder(x), atol=1e-5, rtol=1e-5)


def test_detection_by_yolos_starts_from_the_encoder(folder: Path, encoder: VisionTransformer) -> None:
    """Without its detection tokens it is the encoder; with them every weight of the encoder is in its place."""
    model, info = yolos(folder)
    assert not info["unexpected_keys"]
    assert {name for name, *_ in info["mismatched_keys"]} == {"vit.embeddings.position_embeddings"}
    heads = ("class_labels_classifier.", "bbox_predictor.", "vit.pooler.", "vit.embeddings.detection_tokens")
    assert all(name.startswith(heads) for name in info["missing_keys"])
    x = photographs(2).images_BCHW
    with torch.no_grad():
        without = model.eval().vit.embeddings(x)[:, :-8]
        hidden = model.vit.encoder(without, height=SIDE, width=SIDE).last_hidden_state
        torch.testing.assert_close(model.vit.layernorm(hidden), encoder(x), atol=1e-5, rtol=1e-5)


@pytest.mark.full
def test_both_learn_a_few_photographs(folder: Path) -> None:
    """Judged by this project's scores, which other tests compare with pycocotools and by hand."""
    torch.manual_seed(0)
    x, masks, objects = photographs(12)
    model, _ = dpt(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(100):
        optimizer.zero_grad()
        scores = F.interpolate(model.train()(x).logits, size=(SIDE, SIDE), mode="bilinear")
        F.cross_entropy(scores, masks, weight=torch.tensor([0.1, 1.0, 1.0, 1.0])).backward()
        optimizer.step()
    with torch.no_grad():
        scores = F.interpolate(model.eval()(x).logits, size=(SIDE, SIDE), mode="bilinear")
    counts = sum(confusion(m.numpy(), p.numpy(), 4) for m, p in zip(masks, scores.argmax(1), strict=True))
    assert mean_iou(counts) > 0.5  # 0.22 where everything is called ground

    model, _ = yolos(folder)
    labels = []
    for one in objects:
        corners = torch.from_numpy(one.boxes_M4) / SIDE
        middle, size = (corners[:, :2] + corners[:, 2:]) / 2, corners[:, 2:] - corners[:, :2]
        labels.append({"class_labels": torch.from_numpy(one.classes_M), "boxes": torch.cat([middle, size], dim=1)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(250):
        optimizer.zero_grad()
        model.train()(pixel_values=x, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    with torch.no_grad():
        said = model.eval()(x)
    found = []
    for logits, boxes in zip(said.logits.softmax(-1), said.pred_boxes * SIDE, strict=True):
        score, kind = logits[:, :-1].max(-1)
        corners = torch.cat([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2], dim=1)
        found.append(Detections(corners.numpy().astype(float), kind.numpy(), score.numpy().astype(float)))
    assert average_precision(objects, found, len(KINDS))["AP50"] > 0.5
