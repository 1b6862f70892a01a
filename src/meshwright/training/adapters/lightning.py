"""Lightning's `Trainer` under a plan: Lightning runs the loop, logs, callbacks and schedulers, Meshwright the steps.

The model that is planned and captured is the ``training_step`` of a LightningModule, as a module that returns its loss
(`lightning_step`). The step is traced once, on tensors without values. Values that it logs besides the loss, or reads
from Lightning's Trainer, would be the same in every step, so they are refused.

    Trainer ── batch ──▶ PlannedStrategy.training_step ──▶ meshwright's Trainer.step ──▶ loss, which is then logged
            ── backward, optimizer_step ──▶ nothing is left to do
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.plugins.precision import Precision
from pytorch_lightning.strategies import Strategy
from pytorch_lightning.trainer.states import TrainerFn

from meshwright.runtime import choose_device, join_group
from meshwright.runtime.devices import own_device
from meshwright.spec import Placement, Plan, PlanError, RunError
from meshwright.training.adapters.shared import RefusedSetting, refuse_given, refuse_overridden, take_plan
from meshwright.training.trainer import Trainer, prepare

_PREFIX = "module."
_WITHIN = "the plan's step runs backward and update itself"
# Hooks that Lightning calls between phases that the plan executes in one call.
_HOOKS = dict.fromkeys(("on_before_backward", "on_after_backward", "on_before_optimizer_step"), _WITHIN)
_MODULE_HOOKS = {
    **dict.fromkeys(("backward", "optimizer_step", "optimizer_zero_grad", "on_before_zero_grad"), _WITHIN),
    "configure_gradient_clipping": "the plan's step clips gradients itself, by gradient_clip_val",
}


def lightning_step(module: pl.LightningModule, batch: Any) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """Return model and batch for a plan of a LightningModule, for the function given to `meshwright plan` to return.

    Args:
        module: the LightningModule.
        batch: an example of what the DataLoader yields; dim 0 of every tensor is the batch.

    Returns:
        A module that computes the loss of ``training_step``, and its inputs.
    """
    return _StepLoss(module), (_as_tuple(batch),)


class PlannedStrategy(Strategy):
    """Runs every step of `pytorch_lightning.Trainer.fit` under a plan: ``Trainer(strategy=PlannedStrategy(plan))``.

    Args:
        plan: a Plan, a Placement or the file of either, made from what `lightning_step` returns.
        run_seed: seed of dropout and other random ops.
        verify: compare the captured step with the eager one before the first step.

    All ranks run the script and read the same global batches. Raises PlanError if the plan is for inference or
    asynchronous. `fit` raises RunError for settings of Lightning that the plan decides or that are not supported.
    """

    def __init__(self, plan: Plan | Placement | Path | str, *, run_seed: int = 0, verify: bool = True) -> None:
        super().__init__()
        self._plan, self._run_seed, self._verify = take_plan(plan), run_seed, verify
        self._planned: Trainer | None = None
        self._step: _StepLoss | None = None
        self._clip_norm: float | None = None
        self._kind = choose_device(self._plan, None)
        self.global_rank = int(os.environ.get("RANK", "0"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def planned(self) -> Trainer:
        """Meshwright's trainer, with timelines and losses. Raises RunError before the first step, which creates it."""
        if self._planned is None:
            raise RunError("No step has run yet; the first step creates the planned trainer. Call `fit` first.")
        return self._planned

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        return own_device(self._kind)

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.global_rank == 0

    def setup_environment(self) -> None:
        """Join the process group that torchrun set up. Raises RunError if Lightning's accelerator is not the plan's."""
        name = type(self.accelerator).__name__.removesuffix("Accelerator").lower()
        if name != self._kind:
            accelerator = "gpu" if self._kind == "cuda" else self._kind
            raise RunError(
                f"Lightning's Trainer computes on {name}, but the plan is for {self._kind}. Give "
                f"Trainer(accelerator={accelerator!r}), or plan for another cluster."
            )
        self.global_rank, _ = join_group(self._kind)
        self.world_size = dist.get_world_size()
        super().setup_environment()

    def setup(self, trainer: pl.Trainer) -> None:
        """Create the optimizers. Raises RunError for settings, hooks and callbacks that are not supported."""
        assert self.lightning_module is not None, "Lightning connects a module first"
        self._refuse(trainer, self.lightning_module)
        self._clip_norm = float(trainer.gradient_clip_val) if trainer.gradient_clip_val else None
        super().setup(trainer)
        self._step = _StepLoss(self.lightning_module)

    def training_step(self, batch: Any, *_arguments: Any, **_options: Any) -> torch.Tensor:
        """Run a whole step of the plan, update included; return its loss, the same on every rank."""
        assert self._step is not None, "Lightning sets the strategy up first"
        module = self._step.module
        inputs = (_as_tuple(batch),)
        if self._planned is None:
            module.train()
            self._planned = prepare(
                self._step,
                None,
                self.optimizers[0],
                (inputs, ()),
                plan=self._plan,
                run_seed=self._run_seed,
                clip_norm=self._clip_norm,
                verify=self._verify,
            )
        loss = torch.tensor(self._planned.step(inputs), dtype=torch.float64, device=self.root_device)
        for name, options in self._step.logged.items():
            module.log(name, loss, **options)
        return loss

    def backward(self, closure_loss: torch.Tensor, *_arguments: Any, **_options: Any) -> torch.Tensor:
        """Do nothing: `training_step` has run the backward."""
        return closure_loss

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,  # noqa: ARG002
        closure: Callable[[], Any],
        model: Any = None,  # noqa: ARG002
        **_options: Any,
    ) -> Any:
        """Run the closure, which calls `training_step`; the plan's step updates the parameters."""
        return closure()

    def validation_step(self, *_arguments: Any, **_options: Any) -> NoReturn:
        """Not supported: always raises RunError."""
        _refuse_evaluation("validate")

    def test_step(self, *_arguments: Any, **_options: Any) -> NoReturn:
        """Not supported: always raises RunError."""
        _refuse_evaluation("test")

    def predict_step(self, *_arguments: Any, **_options: Any) -> NoReturn:
        """Not supported: always raises RunError."""
        _refuse_evaluation("predict")

    def model_to_device(self) -> None:
        """Do nothing: `prepare` moves this rank's part of the model."""

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the whole model's state on rank 0, under the LightningModule's names; empty elsewhere."""
        if self._planned is None:
            assert self.lightning_module is not None, "Lightning connects a module first"
            return self.lightning_module.state_dict()
        state = self._planned.state_dict() or {}
        return {name.removeprefix(_PREFIX): value for name, value in state.items()}

    def optimizer_state(self, _optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return an empty dict: Lightning's checkpoints contain weights only.

        ``planned.save_checkpoint`` writes the optimizer states of all ranks.
        """
        return {}

    def load_checkpoint(self, checkpoint_path: Any, *_arguments: Any, **_options: Any) -> NoReturn:
        """Raise RunError: Lightning's checkpoints do not contain the ranks' optimizer states."""
        raise RunError(
            f"`fit` was given the checkpoint {checkpoint_path}; expected no ckpt_path, since Lightning's checkpoints "
            "under a plan contain no optimizer states. Load the weights (load_from_checkpoint) and train from there."
        )

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return a tensor's mean (or sum, by ``reduce_op``) over all ranks; other objects are returned unchanged."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        found = tensor.detach().clone()
        dist.all_reduce(found, group=group)
        return found if str(reduce_op).lower().endswith("sum") else found / dist.get_world_size(group)

    def barrier(self, *_arguments: Any, **_options: Any) -> None:
        """Wait for all ranks."""
        if dist.is_initialized():
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank ``src``."""
        held = [obj]
        if dist.is_initialized():
            dist.broadcast_object_list(held, src)
        return held[0]

    def all_gather(
        self,
        tensor: torch.Tensor,
        group: Any = None,
        sync_grads: bool = False,  # noqa: ARG002
    ) -> torch.Tensor:
        """Return the tensors of all ranks, stacked."""
        found = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(found, tensor.contiguous(), group=group)
        return torch.stack(found)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks (with ``all=False``: any rank) decide True."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, bool(decision))
        return min(found) if all else max(found)

    def teardown(self) -> None:
        """End the strategy as others do, but leave the model on its device, so that it can still be saved."""
        assert self.accelerator is not None, "Lightning gives one"
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def _refuse(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self._planned is not None:
            raise RunError(
                "`fit` was called a second time; under a plan each rank keeps only its part of the model. Train in one "
                "go (max_epochs, max_steps), or start again from saved weights in a new process."
            )
        if trainer.state.fn != TrainerFn.FITTING:
            _refuse_evaluation(str(getattr(trainer.state.fn, "value", trainer.state.fn)))
        count, plugin = trainer.accumulate_grad_batches, type(trainer.precision_plugin)
        clips, given = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
        by_value = bool(clips) and str(getattr(given, "value", given) or "norm") != "norm"
        precision = self._plan.workload.precision
        refuse_given(
            "Lightning's Trainer",
            [
                RefusedSetting(
                    count != 1,
                    f"accumulate_grad_batches={count}",
                    f"1, since the plan makes {self._plan.num_microbatches} microbatches of a batch itself",
                    f"Let the DataLoader make batches of {self._plan.workload.global_batch}.",
                ),
                RefusedSetting(
                    plugin is not Precision,
                    f"precision={trainer.precision!r}",
                    f"'32-true', since the precision is the plan's {precision}",
                    "Leave it out, and plan with --precision.",
                ),
                RefusedSetting(by_value, "gradient_clip_algorithm='value'", "'norm'", "Clip by norm."),
                RefusedSetting(trainer.enable_validation, "batches for validation", "training alone", _EVALUATE),
                RefusedSetting(
                    not module.automatic_optimization,
                    "a module with manual optimization",
                    "automatic_optimization, since the plan runs backward and update",
                    "Train with your own loop and meshwright.prepare.",
                ),
                RefusedSetting(
                    bool(getattr(trainer, "_detect_anomaly", False)),
                    "detect_anomaly=True",
                    "False, since the plan runs the backwards",
                    "Look for anomalies in one process.",
                ),
                RefusedSetting(
                    bool(getattr(trainer, "sync_batchnorm", False)),
                    "sync_batchnorm=True",
                    "False, since batch norm uses the statistics of each microbatch",
                    "Leave it out.",
                ),
            ],
        )
        refuse_overridden("The module", type(module), pl.LightningModule, {**_HOOKS, **_MODULE_HOOKS})
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            names = {**_HOOKS, "on_before_zero_grad": _WITHIN}
            refuse_overridden("The callback", type(callback), pl.Callback, names)
        if "dataloader_iter" in inspect.signature(module.training_step).parameters:
            raise RunError("training_step takes a dataloader_iter; expected a batch. Let it take (batch, batch_idx).")


_EVALUATE = "Give limit_val_batches=0, and validate the saved model with a plain Trainer in another process."


def _refuse_evaluation(what: str) -> NoReturn:
    raise RunError(
        f"PlannedStrategy cannot {what}; expected `fit` alone, since each rank keeps only its part of the model. "
        + _EVALUATE
    )


class _StepLoss(torch.nn.Module):
    """The loss of a LightningModule's ``training_step``, with the names and options under which it was logged."""

    def __init__(self, module: pl.LightningModule) -> None:
        super().__init__()
        self.module = module
        self._logged = _Logged()

    @property
    def logged(self) -> Mapping[str, dict[str, Any]]:
        """The options by name."""
        return self._logged.options

    def forward(self, batch: Any) -> torch.Tensor:
        """The loss of a batch."""
        module, values = self.module, dict[str, tuple[Any, dict[str, Any]]]()

        def log(name: str, value: Any, *arguments: Any, **options: Any) -> None:
            if arguments:
                options = {**dict(zip(_LOG_OPTIONS, arguments, strict=False)), **options}
            values[name] = value, options

        trainer = module._trainer
        takes_index = len(inspect.signature(module.training_step).parameters) > 1
        module._trainer = _Absent("the trainer")  # type: ignore[assignment]
        module.log = log  # type: ignore[method-assign]
        try:
            made = module.training_step(batch, _Absent("batch_idx")) if takes_index else module.training_step(batch)
        finally:
            module._trainer = trainer
            del module.log
        loss = _loss_of(made)
        for name, (value, _) in values.items():
            if value is not loss:
                raise PlanError(
                    f"training_step logs {name!r}, which is not the loss that it returns; only the loss can be logged, "
                    "since no rank has all values of a step. Log the loss itself, and compute the rest from saved "
                    "weights."
                )
        self._logged.options = {name: options for name, (_, options) in values.items()}
        return loss


class _Logged:
    """Keeps names and options after a trace, which restores dicts of the module."""

    def __init__(self) -> None:
        self.options: dict[str, dict[str, Any]] = {}


_LOG_OPTIONS = tuple(inspect.signature(pl.LightningModule.log).parameters)[3:]


def _loss_of(made: Any) -> torch.Tensor:
    if isinstance(made, Mapping) and set(made) == {"loss"}:
        made = made["loss"]
    if isinstance(made, torch.Tensor):
        return made
    found = f"a dict with {', '.join(map(str, made))}" if isinstance(made, Mapping) else type(made).__name__
    raise PlanError(f"training_step returned {found}; expected the loss alone. Return the loss, or {{'loss': loss}}.")


class _Absent:
    """Stands for a value that differs from step to step during the trace; using it is an error."""

    def __init__(self, what: str) -> None:
        object.__setattr__(self, "_what", what)

    def _refuse(self, *_arguments: Any) -> NoReturn:
        what = object.__getattribute__(self, "_what")
        raise PlanError(
            f"training_step uses {what}; expected a step that depends on the batch alone, since it is traced once "
            "and run as traced. Move that code to a hook, such as on_train_batch_start."
        )

    __getattr__ = __bool__ = __int__ = __index__ = __float__ = __eq__ = __hash__ = __lt__ = __le__ = __gt__ = _refuse
    __ge__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __floordiv__ = _refuse
    __truediv__ = __format__ = __str__ = _refuse


def _as_tuple(batch: Any) -> Any:
    return tuple(batch) if isinstance(batch, list) else batch
