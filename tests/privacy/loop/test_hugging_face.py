"""Losses per example in place of the means of transformers, and its Trainer with private steps."""

import contextlib
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from privacy.errors import PrivacyConfigError
from privacy.loop.fields import Example, floats, integers
from privacy.loop.hugging_face import fields, loss_of
from tests.privacy.loop.own import ledger_of, make, quick


def language_model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config).eval()


def image_model() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        image_size=8,
        patch_size=4,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        num_labels=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return ViTForImageClassification(config)


@pytest.mark.parametrize("make", [language_model, image_model])
def test_a_loss_per_example_is_the_model_s_own_for_a_batch_of_one(make: Any) -> None:
    model = make()
    made = Example(fields(model, length=6) if make is language_model else fields(model))
    batch = made.made_up(5)
    if make is language_model:
        batch["labels"] = torch.where(torch.rand(5, 6) < 0.3, -100, batch["input_ids"])
    with torch.no_grad():
        mine_B = loss_of(model, made)(**batch)
        theirs = [model(**{name: x[i : i + 1] for name, x in batch.items()}).loss for i in range(5)]
    assert torch.allclose(mine_B, torch.stack(theirs), atol=1e-6)


def test_an_unknown_head_and_items_without_labels_are_refused() -> None:
    from transformers import ViTConfig, ViTModel

    model = ViTModel(
        ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    )
    with pytest.raises(PrivacyConfigError, match="ViTModel is not known here"):
        fields(model)
    known = image_model()
    without = {name: field for name, field in fields(known).items() if name != "labels"}
    with pytest.raises(PrivacyConfigError, match="with labels"):
        loss_of(known, Example(without))
    with pytest.raises(PrivacyConfigError, match="is not a model of transformers"):
        loss_of(torch.nn.Linear(2, 2), Example({"labels": fields(known)["labels"]}))


@pytest.fixture
def no_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Trainer of transformers as it is, but for what it asks accelerate: one process on the CPU."""
    from transformers import Trainer, TrainingArguments

    def one_process(trainer: Any) -> None:
        trainer.accelerator = SimpleNamespace(
            is_main_process=True, unwrap_model=lambda model: model
        )
        trainer.is_deepspeed_enabled = trainer.is_fsdp_enabled = trainer.is_fsdp_xla_enabled = False

    monkeypatch.setattr(Trainer, "create_accelerator_and_postprocess", one_process)
    monkeypatch.setattr(TrainingArguments, "__post_init__", lambda _: None)
    facts = {"_setup_devices": torch.device("cpu"), "_n_gpu": 0, "distributed_state": None}
    for name, value in (facts | {"process_index": 0, "local_process_index": 0}).items():
        monkeypatch.setattr(TrainingArguments, name, value, raising=False)


def trainer_of(
    folder: Path, data: Any, held_out: Any, args: dict[str, Any] | None = None, **changes: Any
) -> Any:
    """A PrivateTrainer of three steps."""
    from transformers import TrainingArguments

    from privacy.loop.trainer import PrivateTrainer

    model = image_model()
    return PrivateTrainer(
        model,
        TrainingArguments(str(folder / "out"), **({"max_steps": 3} | (args or {}))),
        run_dir=folder / "run",
        train_dataset=data,
        eval_dataset=held_out,
        example=fields(model),
        starts_from="public",
        expected_batch_size=10,
        noise_multiplier=4.0,
        **changes,
    )


@pytest.mark.usefixtures("no_accelerate")
def test_without_accelerate_too_a_trainer_keeps_the_claim(tmp_path: Path) -> None:
    """It takes `max_steps` private steps at the rates of its schedule, says no training loss, stops and goes on where it stood.

    Evaluation switches the model to another mode and marks it, as that of transformers does; neither may reach a step.
    """
    from transformers import TrainerCallback
    from transformers.trainer_utils import IntervalStrategy

    generator = torch.Generator().manual_seed(3)
    data = [
        {"pixel_values": torch.randn(3, 8, 8, generator=generator), "labels": i % 4}
        for i in range(44)
    ]
    data, held_out = data[:40], data[40:]

    class StopsAfter(TrainerCallback):  # type: ignore[misc]  # transformers is not read by the type checker
        def __init__(self, last: int) -> None:
            self.last = last

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == self.last

    def trainer(last: int = 3, args: dict[str, Any] | None = None, **changes: Any) -> Any:
        steps = IntervalStrategy.STEPS
        more = {
            "logging_steps": 1,
            "logging_strategy": steps,
            "eval_strategy": steps,
            "eval_steps": 1,
            "use_cpu": True,
        }
        more |= {"save_strategy": IntervalStrategy.NO, "report_to": [], "disable_tqdm": True} | (
            args or {}
        )
        callbacks = [StopsAfter(last)]
        made = trainer_of(
            tmp_path, data, held_out, more, callbacks=callbacks, eval_is_public=True, **changes
        )
        made.evaluate = lambda: (made.model.eval(), setattr(made.model, "left_behind", True))
        return made

    with quick():
        with pytest.raises(PrivacyConfigError, match="without arguments"):
            trainer().train(resume_from_checkpoint=True)
        unfit = {
            "bf16": True,
            "gradient_accumulation_steps": 2,
            "max_steps": -1,
            "neftune_noise_alpha": 5.0,
        }
        for name, value in unfit.items():
            with pytest.raises(PrivacyConfigError, match=name):
                trainer(args={name: value})
        with pytest.raises(PrivacyConfigError, match="follows a metric"):
            trainer(args={"lr_scheduler_type": "reduce_lr_on_plateau"})
        with pytest.raises(PrivacyConfigError, match="give loss="):
            trainer(compute_loss_func=lambda *_: torch.zeros(()))
        assert not (tmp_path / "run").exists()  # nothing was begun for a refusal
        first, second = trainer(last=2), trainer()
        assert first.train().global_step == 2
        found = second.train()
        claimed = {"epsilon": second.loop.epsilon, "delta": second.loop.delta}
    ledger = ledger_of(tmp_path / "run")
    assert (found.global_step, ledger.num_charged, ledger.closed) == (3, 3, "finished")
    assert math.isnan(found.training_loss) and found.metrics == claimed
    logged = [*first.state.log_history, *second.state.log_history]
    assert all(
        entry.keys() == {"epsilon", "learning_rate", "grad_norm", "epoch", "step"}
        for entry in logged
    )
    rates = [5e-5 * left / 3 for left in (3, 2, 1)]  # transformers' default: linear to zero
    assert [entry["learning_rate"] for entry in logged] == pytest.approx(rates)
    assert second.model.training and not hasattr(second.model, "left_behind")


@pytest.mark.usefixtures("no_accelerate")
def test_evaluation_on_training_items_is_refused_unless_they_are_declared_public(
    tmp_path: Path,
) -> None:
    """At the start, and where `evaluate` and `predict` bring other data."""
    data = [{"pixel_values": torch.zeros(3, 8, 8), "labels": i % 4} for i in range(44)]

    def trainer(given: Any, **changes: Any) -> Any:
        return trainer_of(tmp_path, data[:40], given, **changes)

    for given in (data, data[40:], {"public": data[40:], "other": data[5:6]}):
        with pytest.raises(PrivacyConfigError, match="by eval_is_public=True"):
            trainer(given)
        trainer(given, eval_is_public=True)
    with pytest.raises(PrivacyConfigError, match="by eval_is_public=True"):
        trainer(None).evaluation_loop(
            torch.utils.data.DataLoader(data), "said by evaluate or predict"
        )
    with pytest.raises(
        PrivacyConfigError, match=r"PrivateTrainer takes no delta: did you mean target_delta\?$"
    ):
        trainer(None, delta=1e-5)
    with pytest.raises(PrivacyConfigError, match="give TrainingArguments max_steps"):
        trainer(None, num_steps=3)


@pytest.mark.parametrize(
    "name", ["LLaVA", "PaliGemma", pytest.param("BLIP-2", marks=pytest.mark.full)]
)
@pytest.mark.parametrize("is_declared", [False, True])
def test_placeholders_of_a_picture_are_declared_or_the_line_says_how(
    name: str, is_declared: bool, tmp_path: Path
) -> None:
    """Rows without an item would have none: transformers raises an error, or gives one item the picture of another."""
    from tests.privacy.clipping.test_zoo import MODELS, WORDS

    build, loss, inputs = MODELS[name]
    torch.manual_seed(0)
    model = build().eval()
    made_up = inputs(4)
    for p in model.parameters():
        p.requires_grad_(False)
    model.get_output_embeddings().weight.requires_grad_(True)
    image_id = model.config.image_token_id
    fixed = {image_id: int((made_up["ids"][0] == image_id).sum())} if is_declared else None
    data = [{n: x[i] for n, x in inputs(16).items()} for i in range(16)]
    example = {
        "images": floats(*made_up["images"].shape[1:]),
        "ids": integers(WORDS, made_up["ids"].shape[1], fixed=fixed),
    }
    settings: dict[str, Any] = {
        "example": example,
        "loss": lambda **item: loss(model, **item),
        "made_up": made_up,
        "expected_batch_size": 4,
        "num_steps": 1,
        "micro_batch_size": 4,
    }
    line = r"rows without an item .* by integers\(\.\.\., fixed=\{id: count\}\)"
    refused = (
        contextlib.nullcontext() if is_declared else pytest.raises(PrivacyConfigError, match=line)
    )
    with quick(), refused, make(tmp_path / "run", model, data, **settings) as loop:
        assert loop.step().private["num_nonfinite"].inside() == 0
    assert (tmp_path / "run/ledger.jsonl").exists() == is_declared
