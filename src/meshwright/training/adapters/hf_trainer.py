"""`transformers.Trainer` under a plan: Trainer runs the loop, logs, callbacks and schedulers, Meshwright the steps.

    every rank    DataLoader of whole global batches ──▶ training_step ──▶ meshwright's Trainer.step ──▶ loss
                                                                            (clips and updates, too)
    Trainer       is configured as a single process with a rank: it wraps and shards nothing; rank 0 logs and writes

Trainer divides the loss of a batch by the number of labels in the whole batch. The model that is planned and captured
therefore takes that number as an input (`trainer_step`).

The `optimizer.step()` of Trainer's loop runs after the update and finds no gradients, so it does nothing.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate import PartialState  # type: ignore[import-untyped]
from accelerate.utils import DistributedType  # type: ignore[import-untyped]
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer import SCHEDULER_NAME

from meshwright.spec import GraphMismatchError, Placement, Plan, PlanError, RunError
from meshwright.training.adapters.shared import (
    RefusedSetting,
    microbatch_size,
    refuse_given,
    refuse_overridden,
    take_plan,
)
from meshwright.training.trainer import Trainer, prepare

# The folder next to the model in a checkpoint of transformers.
_FOLDER = "meshwright"
# Labels that are ignored in the loss, as everywhere in transformers.
_IGNORED = -100
# Private methods of Trainer that are overridden below.
_REPLACED = ("_clip_grad_norm", "_get_grad_norm", "_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler")
_PREFIX = "module."


def trainer_step(model: torch.nn.Module, batch: dict[str, Any]) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return model and batch for a plan under Trainer; the function given to `meshwright plan` has to return them.

    Args:
        model: the model; it is put in training mode, without a key-value cache, as Trainer does.
        batch: an example of the data collator's output, with labels; dim 0 of each tensor is the batch.

    Returns:
        A module that computes the loss as Trainer does, and its inputs by name: the batch, and the number of labels if
        the model's loss takes it.
    """
    model.train()
    if getattr(model, "config", None) is not None:
        model.config.use_cache = False  # type: ignore[union-attr]
    if "labels" not in batch or not _takes_count(model):
        return model, dict(batch)
    return _CountedLoss(model), {**batch, **_counts(1, 1)}


class PlannedTrainer(transformers.Trainer):
    """A `transformers.Trainer` whose steps run under a plan. All ranks create it and call `train` together.

    Args:
        model: the whole model, equal on all ranks, which computes its loss from a batch with labels.
        args: as for Trainer. ``per_device_train_batch_size`` has to be the plan's global batch in samples;
            ``max_grad_norm`` is the largest norm of all gradients of the model together.
        *arguments: as for Trainer.
        plan: a Plan, a Placement or the file of either.
        verify: compare the captured model with the eager one before the first step.
        **options: as for Trainer.

    Raises PlanError if the plan is for inference or asynchronous, or has another batch size; RunError for settings of
    Trainer that the plan decides or that are not supported.
    """

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *arguments: Any,
        plan: Plan | Placement | Path | str,
        verify: bool = True,
        **options: Any,
    ) -> None:
        if missing := [name for name in _REPLACED if not hasattr(transformers.Trainer, name)]:
            raise RunError(
                f"transformers {transformers.__version__} has no Trainer.{missing[0]}, which PlannedTrainer overrides; "
                "expected a supported version. Run: pip install 'transformers>=5.23,<6'."
            )
        self._plan = take_plan(plan)
        if args is None:
            raise RunError(
                "PlannedTrainer was given no args; expected TrainingArguments whose per_device_train_batch_size is the "
                f"plan's global batch of {self._plan.workload.global_batch}. Pass them as args."
            )
        self._planned: Trainer | None = None
        self._verify = verify
        self._resumed: Path | None = None
        self._num_parameters: int | None = None
        _check_arguments(self._plan, args)
        _be_one_process()
        super().__init__(model, args, *arguments, **options)
        self._check_own()

    @property
    def planned(self) -> Trainer:
        """Meshwright's trainer, with timelines and losses. Raises RunError before the first step, which creates it."""
        if self._planned is None:
            raise RunError("No step has run yet; the first step creates the planned trainer. Call `train` first.")
        return self._planned

    def train(self, *arguments: Any, **options: Any) -> Any:
        """Train as Trainer does. Raises RunError for a second call, and for callbacks that need gradients."""
        if self._planned is not None:
            raise RunError(
                "`train` was called a second time; under a plan each rank keeps only its part of the model. Train in "
                "one go (num_train_epochs, max_steps), or continue from a checkpoint in a new process."
            )
        for callback in self.callback_handler.callbacks:
            why = "the plan's step has applied and cleared the gradients by then"
            refuse_overridden("The callback", type(callback), TrainerCallback, {"on_pre_optimizer_step": why})
        return super().train(*arguments, **options)

    def training_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Run a whole step of the plan, update included; return its loss, the same on every rank."""
        given = dict(inputs)
        if num_items_in_batch is None or not _takes_count(model):
            self._check_labels(inputs)
        else:
            given.update(_counts(int(num_items_in_batch), len(inputs["labels"]) // microbatch_size(self._plan)))
        if self._planned is None:
            self._planned = self._prepare_model(model, given)
        loss = self._planned.step(given)
        return torch.tensor(loss, dtype=torch.float64, device=self.args.device)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole model, gathered from all ranks, for `from_pretrained`. All ranks call it together."""
        assert self.model is not None, "Trainer has refused to be made without one"
        state = self.model.state_dict()
        if self._planned is not None:
            state = {name.removeprefix(_PREFIX): item for name, item in (self._planned.state_dict() or {}).items()}
        if self.args.should_save:
            self._save(output_dir or self.args.output_dir, state_dict=state)
        if dist.is_initialized():
            dist.barrier()

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return Trainer's estimate of the FLOPs of a batch, for the whole model; 0 before the first step."""
        name = getattr(self.model, "main_input_name", "input_ids")
        if self._num_parameters is None or name not in inputs:
            return 0
        return 6 * int(inputs[name].numel()) * self._num_parameters

    def evaluate(self, *_arguments: Any, **_options: Any) -> Any:
        """Raise RunError: each rank has only its part of the model."""
        _refuse_evaluation("evaluate")

    def predict(self, *_arguments: Any, **_options: Any) -> Any:
        """Raise RunError: each rank has only its part of the model."""
        _refuse_evaluation("predict")

    def hyperparameter_search(self, *_arguments: Any, **_options: Any) -> Any:
        """Raise RunError: a plan is for one model and one batch."""
        raise RunError(
            "PlannedTrainer does not support `hyperparameter_search`; expected `train`, since a plan is for one model "
            "and batch. Search with a plain Trainer, and plan for the result."
        )

    def _prepare_model(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Trainer:
        model.train()
        count = getattr(model, "num_parameters", None)
        self._num_parameters = count(exclude_embeddings=True) if count is not None else None
        held = self.optimizer
        try:
            planned = prepare(
                _CountedLoss(model) if "num_items" in inputs else model,
                None,
                getattr(held, "optimizer", held),  # accelerate's wrapper has it
                (inputs, ()),
                plan=self._plan,
                run_seed=self.args.seed,
                clip_norm=self.args.max_grad_norm if self.args.max_grad_norm > 0 else None,
                verify=self._verify,
            )
        except GraphMismatchError as error:
            raise GraphMismatchError(
                f"{error} For PlannedTrainer, plan a function that returns trainer_step(model, batch)."
            ) from None
        if self._resumed is not None:
            planned.resume(self._resumed)
        return planned

    def _move_model_to_device(self, model: torch.nn.Module, device: torch.device) -> None:
        """Do nothing: `prepare` moves this rank's part."""

    def _clip_grad_norm(self, model: torch.nn.Module) -> None:
        """Do nothing: the step has clipped."""

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> None:
        """Return None, so that no norm is logged: gradients are already cleared."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.planned.save_checkpoint(Path(output_dir) / _FOLDER, keep=1)
        if self.args.should_save and self.lr_scheduler is not None:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint) / _FOLDER
        if not folder.is_dir():
            raise RunError(
                f"{checkpoint} has no folder {_FOLDER} with optimizer states (a checkpoint of a plain Trainer, or one "
                "with save_only_model, has none). Give a checkpoint that PlannedTrainer wrote, or load the weights "
                "alone with `from_pretrained`."
            )
        self._resumed = folder
        assert self.lr_scheduler is not None, "Trainer makes it first"
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:
            super()._save_rng_state(output_dir)

    def _check_own(self) -> None:
        """Raise RunError for unsupported settings and overrides of the trainer itself."""
        refuse_overridden(
            "The trainer",
            type(self),
            PlannedTrainer,
            {
                "training_step": "the plan runs the steps",
                "compute_loss": "the captured model computes the loss",
                "optimizer_step": "updates are part of the step",
            },
        )
        refuse_given(
            "PlannedTrainer",
            [
                RefusedSetting(
                    self.compute_loss_func is not None,
                    "compute_loss_func",
                    "a model that computes its loss from labels",
                    "Compute the loss in the model's forward.",
                ),
            ],
        )
        size = microbatch_size(self._plan)
        dataset: Any = self.train_dataset
        if self.args.dataloader_drop_last or not hasattr(dataset, "__len__"):
            return
        if rest := len(dataset) % size:
            raise PlanError(
                f"The data set has {len(dataset)} samples, so its last microbatch has {rest} samples instead of "
                f"{size}; expected whole microbatches. Give dataloader_drop_last=True, or another number of samples."
            )

    def _check_labels(self, inputs: dict[str, Any]) -> None:
        """Raise RunError if microbatches have unequal numbers of labels: their mean is not the mean over labels."""
        labels = inputs.get("labels")
        if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or not labels.ndim:
            return
        size = microbatch_size(self._plan)
        kept = labels[..., 1:] if getattr(self, "_loss_shifts_labels", False) else labels
        counts = kept.ne(_IGNORED).reshape(len(labels), -1).sum(1)
        if len(counts) % size:
            return  # `step` reports the error
        found = sorted({int(item) for item in counts.reshape(-1, size).sum(1)})
        if len(found) > 1:
            raise RunError(
                f"Microbatches have {found[0]} to {found[-1]} labels (not counting {_IGNORED}); expected the same "
                "number in each, since the loss of a step is the mean over its microbatches, while Trainer takes the "
                "mean over labels. Pack sequences to one length, or plan with fewer, larger microbatches (-m 1)."
            )


class _CountedLoss(torch.nn.Module):
    """A model's loss, divided by a microbatch's share of the number of labels, equal or not."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, num_items: torch.Tensor, num_shares: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """The loss of a microbatch; its batch has ``num_shares`` microbatches with ``num_items`` labels together."""
        made = self.module(**inputs, num_items_in_batch=num_items / num_shares)
        loss: torch.Tensor = made["loss"] if isinstance(made, dict) else made[0]
        return loss


def _counts(num_items: int, num_shares: int) -> dict[str, torch.Tensor]:
    """Integer tensors, which no precision of a plan casts."""
    return {"num_items": torch.tensor(num_items), "num_shares": torch.tensor(num_shares)}


def _takes_count(model: torch.nn.Module) -> bool:
    """Whether a model's loss takes the number of labels, by Trainer's own rule."""
    if hasattr(model, "accepts_loss_kwargs"):
        return bool(model.accepts_loss_kwargs)
    parameters = inspect.signature(model.forward).parameters.values()
    return any(item.kind == inspect.Parameter.VAR_KEYWORD for item in parameters)


def _refuse_evaluation(method: str) -> None:
    raise RunError(
        f"PlannedTrainer does not support `{method}`; expected `train` alone, since each rank keeps only its part of "
        "the model. Save it (`save_model`), and evaluate in another process with a plain Trainer."
    )


def _be_one_process() -> None:
    """Let accelerate see one process that knows its rank, so that it shards no batches and wraps no model."""
    state = PartialState()
    state.distributed_type = DistributedType.NO
    state.num_processes = 1


def _check_arguments(plan: Plan | Placement, args: TrainingArguments) -> None:
    batch, global_batch = args.per_device_train_batch_size, plan.workload.global_batch
    accumulated = args.gradient_accumulation_steps
    if (batch, accumulated) != (global_batch, 1):
        raise PlanError(
            f"Batches of per_device_train_batch_size={batch} with gradient_accumulation_steps={accumulated} were "
            f"given; expected {global_batch} and 1: the plan's global batch, which the plan cuts into "
            f"{plan.num_microbatches} microbatches itself. Set both arguments to these, or plan with --batch "
            f"{batch * accumulated}."
        )
    precision = f"the plan's {plan.workload.precision}"
    # Attribute of the arguments, expected value, remedy.
    flags = {
        "fp16": (precision, "Leave it out, and plan with --precision amp-float16."),
        "bf16": (precision, "Leave it out, and plan with --precision amp."),
        "deepspeed": ("the plan's own parallelism", "Leave it out, and plan with --zero for sharded states."),
        "fsdp": ("the plan's own parallelism", "Leave it out, and plan with --zero for sharded states."),
        "parallelism_config": ("the plan's own parallelism", "Leave it out."),
        "torch_compile": ("the captured model", "Leave it out, and plan with --compile."),
        "activation_checkpointing": ("the plan's recomputation", "Leave it out, and plan with --recompute."),
        "gradient_checkpointing": ("the plan's recomputation", "Leave it out, and plan with --recompute."),
        "use_liger_kernel": ("the model as it was planned", "Leave it out."),
        "neftune_noise_alpha": ("the model as it was planned", "Leave it out, or add the noise in the model."),
        "label_smoothing_factor": ("the loss that the model computes", "Leave it out, or smooth labels in the model."),
        "auto_find_batch_size": ("the plan's batch", "Leave it out."),
        "eval_on_start": ("training alone", "Leave it out, and evaluate what was saved with a plain Trainer."),
        "load_best_model_at_end": ("training alone", "Leave it out, and evaluate what was saved with a plain Trainer."),
        "push_to_hub": ("a local folder", "Leave it out, and upload the saved model."),
        "enable_jit_checkpoint": ("checkpoints between steps", "Leave it out, and use save_steps."),
        "torch_empty_cache_steps": ("steps of the plan", "Leave it out."),
    }
    evaluates = str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no"
    layerwise = any(word in str(args.optim).lower() for word in ("layerwise", "lomo"))
    refuse_given(
        "PlannedTrainer",
        [
            *(
                RefusedSetting(
                    bool(getattr(args, name, None)), f"{name}={getattr(args, name, None)!r}", expected, advice
                )
                for name, (expected, advice) in flags.items()
            ),
            RefusedSetting(evaluates, f"eval_strategy={args.eval_strategy!r}", "'no'", flags["eval_on_start"][1]),
            RefusedSetting(
                layerwise,
                f"optim={args.optim!r}",
                "an optimizer that updates in one step",
                "Choose another, such as adamw.",
            ),
            RefusedSetting(
                args.n_gpu > 1, f"{args.n_gpu} GPUs in one process", "one", "Start one process per GPU (torchrun)."
            ),
        ],
    )
