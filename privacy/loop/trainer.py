"""transformers' Trainer with private steps around `PrivateLoop`.

    trainer = PrivateTrainer(model, args, train_dataset=data, example=fields(model),
                             run_dir="runs/mine", expected_batch_size=64, target_epsilon=3.0)
    trainer.train()

Nothing of the package imports this module, since it needs transformers and accelerate.
"""

import inspect
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import TrainerControl, TrainerState
from transformers.trainer_utils import TrainOutput

from ..errors import PrivacyConfigError
from . import lineage
from .loop import PrivateLoop, require_keywords

FIXED_ARGUMENTS = {
    "fp16": (False, "weights are float32"),
    "bf16": (False, "weights are float32"),
    "gradient_accumulation_steps": (
        1,
        "expected_batch_size says how large a batch is, whatever the micro-batch",
    ),
    "neftune_noise_alpha": (None, "its noise is drawn for a batch"),
    "label_smoothing_factor": (0.0, "the loss per example is the plain cross-entropy; give loss="),
    "deepspeed": (None, "the trainer of the project shards weights"),
    "torch_compile": (False, "the loop clips the model as it is"),
}
"""Arguments that have to keep their default -> the default, and the reason."""
SET_BY_ARGS = {
    "num_steps": "max_steps",
    "max_grad_norm": "max_grad_norm",
    "micro_batch_size": "per_device_train_batch_size",
    "num_workers": "dataloader_num_workers",
}
"""Arguments of `PrivateLoop` -> the arguments of transformers that set them."""


# The type checker does not read transformers.
class PrivateTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose `train` takes `args.max_steps` private steps; run again, it resumes.

    `args.per_device_train_batch_size` is the micro-batch, `args.max_grad_norm` the bound of one
    example's gradient, and the schedule of `args` sets the rate. Only public quantities are logged:
    epsilon, rate and noised gradient norm, and no training loss.

    Args:
        run_dir: of `PrivateLoop`.
        rest: further arguments of `PrivateLoop`, except for `num_steps`, `max_grad_norm`,
            `micro_batch_size` and `num_workers`, which `args` sets; or arguments of transformers.
        eval_is_public: declares that evaluation data are public, since their losses are logged
            without noise.

    Raises:
        PrivacyConfigError: an argument of transformers that does not fit private steps, or
            evaluation on data that are not declared public.
    """

    def __init__(
        self,
        model: Any,
        args: TrainingArguments,
        *,
        run_dir: str | Path,
        train_dataset: Any,
        eval_is_public: bool = False,
        **rest: Any,
    ) -> None:
        names = PrivateLoop.__init__.__annotations__.keys() - SET_BY_ARGS
        for name in rest.keys() & SET_BY_ARGS:
            raise PrivacyConfigError(
                f"PrivateTrainer takes no {name}: give TrainingArguments {SET_BY_ARGS[name]}"
            )
        trainer_names = inspect.signature(Trainer.__init__).parameters
        require_keywords(rest, {*names, *trainer_names}, "PrivateTrainer")
        self._private = {name: rest.pop(name) for name in list(rest) if name in names}
        lineage.run_folders_of(self._private.get("starts_from"))
        self._run_dir = run_dir
        self._eval_is_public = eval_is_public
        if args.max_steps < 1:
            raise PrivacyConfigError(
                "give TrainingArguments max_steps: epochs are not counted, since a batch is drawn "
                "by coins"
            )
        for name, (default, reason) in FIXED_ARGUMENTS.items():
            setting = getattr(args, name, default)
            if setting != default:
                raise PrivacyConfigError(
                    f"TrainingArguments {name}={setting!r} is refused: {reason}; take {default!r}"
                )
        overrides_loss = type(self).compute_loss is not Trainer.compute_loss
        if rest.get("compute_loss_func") is not None or overrides_loss:
            raise PrivacyConfigError(
                "compute_loss and compute_loss_func are refused: private steps need one loss per "
                "example and would not call them; give loss="
            )
        # An enumeration of transformers, or its plain text.
        scheduler = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
        if str(scheduler) == "reduce_lr_on_plateau":
            raise PrivacyConfigError(
                "lr_scheduler_type='reduce_lr_on_plateau' is refused: it follows a metric; take a "
                "schedule of steps, or set the rate from public metrics in a PrivateLoop"
            )
        super().__init__(model, args, train_dataset=train_dataset, **rest)
        if self.eval_dataset is not None:
            self._require_public()

    def evaluation_loop(self, dataloader: Any, *arguments: Any, **keywords: Any) -> Any:
        """Evaluates or predicts as transformers does, on public data only."""
        self._require_public()
        return super().evaluation_loop(dataloader, *arguments, **keywords)

    def _require_public(self) -> None:
        if not self._eval_is_public:
            raise PrivacyConfigError(
                "a loss on private data would be logged without noise: declare that the evaluation "
                "data are public, and not those of training, by eval_is_public=True"
            )

    def train(self, resume_from_checkpoint: Any = None, **unused: Any) -> TrainOutput:
        """Trains to `args.max_steps`, from the last checkpoint of the run folder on."""
        if resume_from_checkpoint or any(argument is not None for argument in unused.values()):
            raise PrivacyConfigError(
                "the run folder resumes by itself: call train() without arguments"
            )
        args = self.args
        model = self.model
        optimizer = self.create_optimizer()
        settings = {name: getattr(args, argument) for name, argument in SET_BY_ARGS.items()}
        with PrivateLoop(
            model,
            optimizer,
            self.train_dataset,
            run_dir=self._run_dir,
            **settings,
            **self._private,
        ) as loop:
            self.loop = loop
            if self._private.get("learning_rate") is None:
                loop.register(self.create_scheduler(args.max_steps, optimizer))
            self.state = TrainerState(
                global_step=loop.steps_done, max_steps=args.max_steps, num_train_epochs=1
            )
            self.state.is_world_process_zero = self.is_world_process_zero()
            self.state.is_local_process_zero = self.is_local_process_zero()
            self.state.compute_steps(args, args.max_steps)
            self.control = self.callback_handler.on_train_begin(args, self.state, TrainerControl())
            for step in loop:
                self.state.global_step = step.number
                self.control = self.callback_handler.on_step_end(args, self.state, self.control)
                if self.control.should_log:
                    metrics = {
                        "epsilon": step.epsilon,
                        "learning_rate": step.lr,
                        "grad_norm": step.noised_grad_norm,
                    }
                    self.log(metrics)
                if self.control.should_evaluate:
                    attributes = set(vars(model))
                    was_training = model.training
                    self.evaluate()
                    # Transformers leaves mode and marks on the model, and the loop refuses a model
                    # that the self-check has not seen.
                    model.train(was_training)
                    for mark in set(vars(model)) - attributes:
                        delattr(model, mark)
                if self.control.should_save:
                    loop.save()
                self.control.should_log = False
                self.control.should_evaluate = False
                self.control.should_save = False
                if self.control.should_training_stop:
                    break
            self.control = self.callback_handler.on_train_end(args, self.state, self.control)
        metrics = {"epsilon": loop.epsilon, "delta": loop.delta}
        # NaN in place of the training loss, which is private.
        return TrainOutput(self.state.global_step, float("nan"), metrics)
