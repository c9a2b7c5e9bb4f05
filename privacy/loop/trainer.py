"""transformers' Trainer with private steps: its arguments, callbacks, schedules, logs and evaluation around `PrivateLoop`.

    trainer = PrivateTrainer(model, args, train_dataset=data, example=fields(model), run_dir="runs/mine", expected_batch_size=64,
                             target_epsilon=3.0)
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
from .loop import PrivateLoop, require_known

UNFIT = {
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
"""Arguments that have to keep their default here -> the default, and why."""
SAID_BY_ARGS = {
    "num_steps": "max_steps",
    "max_grad_norm": "max_grad_norm",
    "micro_batch_size": "per_device_train_batch_size",
    "num_workers": "dataloader_num_workers",
}
"""Arguments of `PrivateLoop` -> what says them here."""


class PrivateTrainer(Trainer):  # type: ignore[misc]  # transformers is not read by the type checker
    """A Trainer whose `train` takes `args.max_steps` private steps; run again, it resumes from `run_dir`.

    `args.per_device_train_batch_size` is the micro-batch, `args.max_grad_norm` the bound of one example's gradient, and the
    schedule of `args` sets the rate. Public quantities alone are logged: epsilon, rate and noised gradient norm, and no
    training loss.

    Args:
        run_dir, rest: of `PrivateLoop`, except for `num_steps`, `max_grad_norm`, `micro_batch_size` and `num_workers`, which
            `args` says; or of transformers.
        eval_is_public: declares that evaluation data are public, since their losses are logged without noise.

    Raises:
        PrivacyConfigError: an argument of transformers that does not fit private steps, or evaluation on data that nobody
            declares public.
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
        names = PrivateLoop.__init__.__annotations__.keys() - SAID_BY_ARGS
        for name in rest.keys() & SAID_BY_ARGS:
            raise PrivacyConfigError(
                f"PrivateTrainer takes no {name}: give TrainingArguments {SAID_BY_ARGS[name]}"
            )
        require_known(
            rest, {*names, *inspect.signature(Trainer.__init__).parameters}, "PrivateTrainer"
        )
        self._private = {name: rest.pop(name) for name in list(rest) if name in names}
        lineage.stated(self._private.get("starts_from"))
        self._run_dir, self._eval_is_public = run_dir, eval_is_public
        if args.max_steps < 1:
            raise PrivacyConfigError(
                "give TrainingArguments max_steps: epochs are not counted, since a batch is drawn by coins"
            )
        for name, (usual, why) in UNFIT.items():
            if getattr(args, name, usual) != usual:
                raise PrivacyConfigError(
                    f"TrainingArguments {name}={getattr(args, name)!r} is refused: {why}; take {usual!r}"
                )
        if (
            rest.get("compute_loss_func") is not None
            or type(self).compute_loss is not Trainer.compute_loss
        ):
            raise PrivacyConfigError(
                "compute_loss and compute_loss_func are refused: private steps need one loss per example and would not call "
                "them; give loss="
            )
        if (
            str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
            == "reduce_lr_on_plateau"
        ):
            raise PrivacyConfigError(
                "lr_scheduler_type='reduce_lr_on_plateau' is refused: it follows a metric; take a schedule of steps, or set the "
                "rate from public metrics in a PrivateLoop"
            )
        super().__init__(model, args, train_dataset=train_dataset, **rest)
        if self.eval_dataset is not None:
            self._require_public()

    def evaluation_loop(self, dataloader: Any, *more: Any, **named: Any) -> Any:
        """Goes over data as transformers does for `evaluate` and `predict`; they have to be public."""
        self._require_public()
        return super().evaluation_loop(dataloader, *more, **named)

    def _require_public(self) -> None:
        if not self._eval_is_public:
            raise PrivacyConfigError(
                "a loss on private data would be logged without noise: declare that the evaluation data are public, and not "
                "those of training, by eval_is_public=True"
            )

    def train(self, resume_from_checkpoint: Any = None, **unused: Any) -> TrainOutput:
        """Trains to `args.max_steps`; the run folder says where it goes on."""
        if resume_from_checkpoint or any(value is not None for value in unused.values()):
            raise PrivacyConfigError(
                "the run folder resumes by itself: call train() without arguments"
            )
        args, model = self.args, self.model
        optimizer = self.create_optimizer()
        with PrivateLoop(
            model,
            optimizer,
            self.train_dataset,
            run_dir=self._run_dir,
            **{name: getattr(args, said) for name, said in SAID_BY_ARGS.items()},
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
                    self.log(
                        {
                            "epsilon": step.epsilon,
                            "learning_rate": step.lr,
                            "grad_norm": step.noised_grad_norm,
                        }
                    )
                if self.control.should_evaluate:
                    known, was_training = set(vars(model)), model.training
                    self.evaluate()
                    model.train(
                        was_training
                    )  # as the self-check has seen it: transformers leaves marks on it
                    for mark in set(vars(model)) - known:
                        delattr(model, mark)
                if self.control.should_save:
                    loop.save()
                self.control.should_log = self.control.should_evaluate = (
                    self.control.should_save
                ) = False
                if self.control.should_training_stop:
                    break
            self.control = self.callback_handler.on_train_end(args, self.state, self.control)
        metrics = {"epsilon": loop.epsilon, "delta": loop.delta}
        return TrainOutput(
            self.state.global_step, float("nan"), metrics
        )  # the training loss stays private
