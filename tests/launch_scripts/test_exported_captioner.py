"""An exported captioner with transformers' own classes does what evaluation does with the run."""

import io
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

from data.reading.reader import RawExample
from models.generation import beam_captions
from tests.data.test_tokenizer import word_piece
from tests.trainer.trained_runs import recipe, trained
from trainer.weights.export import export
from trainer.weights.import_weights import import_weights
from trainer.weights.open_model import OpenedModel, open_model

transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
NUM_TOKENS = 8
WORDS = "a red circle above the blue square , dog photo of two unaffordable \u00e9t\u00e9s DOGS 7"


class Exported(NamedTuple):
    folder: Path
    opened: OpenedModel
    model: Any
    processor: Any
    tokenizer: Any


@pytest.fixture(scope="module", params=["tokenizer", "shapes", "bert-base-uncased", "foreign"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """The foreign tokenizer has no start and end tokens of its own, cuts after three tokens and pads to fifty."""
    place = tmp_path_factory.mktemp(request.param)
    path = ROOT / f"data/tokenizer/{request.param}.json"
    if request.param == "foreign":
        path = word_piece(place / "words.json", ("[PAD]", "[CLS]", "[SEP]"))
    config = recipe()
    data = config.data.model_copy(update={"tokenizer": str(path)})
    trained(place / "run", config.model_copy(update={"data": data}))
    opened = open_model(place / "run")
    export(opened, "hf", place / "made")
    shutil.copytree(place / "made", place / "out")  # nothing of the place where it was made
    shutil.rmtree(place / "made")
    folder, package = place / "out/captioner", sys.modules["models"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(place / "modules")
        )
        patched.setattr("builtins.input", lambda *_: pytest.fail("a question was asked"))
        model = transformers.AutoModel.from_pretrained(folder, trust_remote_code=True)
        assert (
            sys.modules["models"] is package and str(folder) not in sys.path and not model.training
        )
        return Exported(
            folder,
            opened,
            model,
            transformers.AutoImageProcessor.from_pretrained(folder),
            transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False),
        )


def picture(width: int, height: int, form: str = "PNG", **options: Any) -> bytes:
    pixels = np.random.default_rng(width * height).integers(
        0, 256, (height, width, 3), dtype=np.uint8
    )
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form, **options)
    return file.getvalue()


def pictures(folder: Path) -> list[Path]:
    """Square and other ones; JPEGs of many times the model's size, and one that lies on its side."""
    exif = Image.Exif()
    exif[0x0112] = 6
    made = {
        "square.png": picture(20, 20),
        "wide.png": picture(41, 16),
        "tall.png": picture(17, 60),
        "small.png": picture(5, 9),
        "large.jpg": picture(400, 301, "JPEG"),
        "turned.jpg": picture(90, 33, "JPEG", exif=exif),
    }
    for name, data in made.items():
        (folder / name).write_bytes(data)
    return [folder / name for name in made]


def captions(count: int) -> list[str]:
    """Short and too long ones, with spaces and ends of lines as files have them."""
    rng = np.random.default_rng(0)
    found = ["a red circle", "dog\n", "  a   red\tdog ", "word " * 40]
    while len(found) < count:
        found.append(
            str(rng.choice([" ", "  ", "\n"])).join(rng.choice(WORDS.split(), rng.integers(1, 12)))
        )
    return found


@torch.no_grad()
def test_losses_and_captions_are_those_of_evaluation(exported: Exported, tmp_path: Path) -> None:
    """Any caption with any picture: the tokens to the last one, the loss to rounding, whatever is said of the padding."""
    make_example: Any = exported.opened.task.make_example(train=False)
    paths, texts = pictures(tmp_path), captions(24)
    chosen = [paths[row % len(paths)] for row in range(len(texts))]
    rows = [
        make_example(RawExample(path.read_bytes(), {"txt": text.encode()}), 0)
        for path, text in zip(chosen, texts, strict=True)
    ]
    ours = {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}
    pixels = exported.processor([str(path) for path in chosen], return_tensors="pt")
    assert (pixels["pixel_values"] - ours["images_CHW"]).abs().max() < 1e-5
    inputs = exported.tokenizer(texts, return_tensors="pt", padding=True, truncation=True)
    length = inputs["input_ids"].shape[1]
    assert length <= NUM_TOKENS and torch.equal(inputs["input_ids"], ours["tokens_L"][:, :length])
    assert torch.equal(inputs["attention_mask"].bool(), ours["token_mask_L"][:, :length])
    expected = exported.opened.model(
        *(ours[name] for name in ("images_CHW", "tokens_L", "token_mask_L"))
    )
    everything = torch.ones_like(inputs["attention_mask"])
    for told in (
        inputs,
        {"input_ids": inputs["input_ids"]},
        {**inputs, "attention_mask": everything},
    ):
        torch.testing.assert_close(
            exported.model(**pixels, **told).loss, expected, atol=1e-5, rtol=1e-5
        )
    for how in ({"num_beams": 1}, {"num_beams": 3, "length_penalty": 1.0}):
        found = exported.tokenizer.batch_decode(
            exported.model.generate(**pixels, **how), skip_special_tokens=True
        )
        written = beam_captions(
            exported.opened.model, ours["images_CHW"], max_tokens=NUM_TOKENS - 1, **how
        )  # type: ignore[arg-type]
        assert found == [make_example.tokenizer.decode(row) for row in written.tokens_BL.tolist()]
        assert any(found) or "foreign" in str(exported.folder)
    bare = exported.tokenizer(["a red dog"], return_tensors="pt", add_special_tokens=False)
    config, one = exported.model.captioner.config, {"pixel_values": pixels["pixel_values"][:1]}
    for told in (bare, {"input_ids": torch.tensor([[config.pad_id, config.bos_id]])}):
        with pytest.raises(ValueError, match="must begin with the start token"):
            exported.model(**one, **told)


def test_the_tokenizer_comes_back(exported: Exported, tmp_path: Path) -> None:
    """Where it had start and end, with the very bytes, so that a run may start from the import; else with these added."""
    import_weights("safetensors", exported.folder, tmp_path / "back")
    back = open_model(tmp_path / "back")
    before, after = (
        opened.task.make_example(train=False).tokenizer
        for opened in (exported.opened, back)  # type: ignore[attr-defined]
    )
    for text in captions(20):
        assert before.encode(text, 12)[0].tolist() == after.encode(text, 12)[0].tolist()
    same = exported.opened.manifest["tokenizer_sha256"] == back.manifest["tokenizer_sha256"]
    assert same == ("foreign" not in str(exported.folder))
