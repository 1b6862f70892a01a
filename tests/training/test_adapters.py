"""Trainer of transformers and Lightning under plans on two processes: the losses of one process without Meshwright.

python -m tests.training.test_adapters WORLD_SIZE plain OUT     the library alone, in one process
python -m tests.training.test_adapters WORLD_SIZE planned OUT   two ranks; rank 0 writes what was found
"""

import json
import os
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from meshwright.capture import capture_model
from meshwright.spec import MeshwrightError, Plan, StagePlan, Workload
from tests.processes import fork_ranks, run_ranks

pytestmark = [pytest.mark.long, pytest.mark.distributed, pytest.mark.timeout(450)]
BATCH, MICROBATCHES, COUNT, LENGTH, WORDS, STEPS = 8, 4, 24, 6, 32, 5
SHORT = range(5)  # sentences with fewer labels


def gpt_plan(model=None, **options):
    from meshwright.training.adapters import trainer_step

    return plan_of(*trainer_step(model or gpt(), example()), **options)


def plan_of(model, inputs, *, replicas=False, **options):
    """Two stages, or two replicas of one."""
    graph = capture_model(model, inputs, verify=False).graph
    count = len(graph.layers)
    halves = (StagePlan(start=0, stop=count // 2, ranks=(0,)), StagePlan(start=count // 2, stop=count, ranks=(1,)))
    return Plan(
        model="own",
        graph_hash=graph.content_hash,
        cluster="",
        workload=Workload(global_batch=BATCH),
        stages=(StagePlan(start=0, stop=count, ranks=(0, 1)),) if replicas else halves,
        num_microbatches=MICROBATCHES,
        schedule=options.get("schedule", "1f1b"),
    )


# --- transformers -----------------------------------------------------------------------------


class Texts(torch.utils.data.Dataset):
    """Tokens and labels; of the sentences of ``short`` the last labels count for nothing."""

    def __init__(self, short=(), count=COUNT):
        self.tokens = torch.randint(WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(1))
        self.short = short

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        labels = self.tokens[index].clone()
        labels[LENGTH // 2 :] = -100 if index in self.short else labels[LENGTH // 2 :]
        return {"input_ids": self.tokens[index], "labels": labels}


def gpt():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, **none)).double()


def uncounted():
    """A model whose loss is the mean over what it is given."""
    model = gpt()
    model.accepts_loss_kwargs = False
    return model


def example():
    tokens = torch.zeros(2, LENGTH, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


def arguments(folder, **options):
    from transformers import TrainingArguments

    given = {
        "per_device_train_batch_size": BATCH,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "max_grad_norm": 0.5,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return TrainingArguments(output_dir=str(folder), **{**given, **options})


def read_log(trainer):
    """By step: loss and learning rate."""
    return [[row["loss"], row["learning_rate"]] for row in trainer.state.log_history if "loss" in row]


def weights_of(model):
    return {name: item.flatten()[:3].tolist() for name, item in model.state_dict().items()}


def train_plainly(folder):
    from transformers import Trainer

    trainer = Trainer(model=gpt(), args=arguments(folder), train_dataset=Texts())
    trainer.train()
    found = {"log": read_log(trainer), "weights": weights_of(trainer.model), "flos": trainer.state.total_flos}
    short = Trainer(model=gpt(), args=arguments(folder), train_dataset=Texts(short=SHORT))
    short.train()
    return {**found, "short": read_log(short)}


def train_planned(folder, replicas):
    from transformers import GPT2LMHeadModel

    from meshwright.training.adapters import PlannedTrainer

    plan = gpt_plan(replicas=replicas)
    args = arguments(folder, save_strategy="steps", save_steps=3)
    trainer = PlannedTrainer(model=gpt(), args=args, train_dataset=Texts(), plan=plan)
    trainer.train()
    trainer.save_model(str(folder / "last"))
    found = {"log": read_log(trainer), "flos": trainer.state.total_flos}
    found["weights"] = weights_of(GPT2LMHeadModel.from_pretrained(folder / "last"))
    found["twice"] = refusal(trainer.train)
    found["evaluate"], found["predict"] = refusal(trainer.evaluate, Texts()), refusal(trainer.predict, Texts())
    trainer.planned.close()
    again = PlannedTrainer(model=gpt(), args=args, train_dataset=Texts(), plan=plan)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    found["resumed"] = read_log(again)
    again.planned.close()
    short = PlannedTrainer(model=gpt(), args=arguments(folder), train_dataset=Texts(short=SHORT), plan=plan)
    short.train()
    found["short"] = read_log(short)
    short.planned.close()
    return found


def refusal(call, *given, **options):
    try:
        call(*given, **options)
    except MeshwrightError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


REFUSED_ARGUMENTS = {
    "batch": {"per_device_train_batch_size": 4},
    "accumulation": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "bf16": {"bf16": True},
    "label_smoothing_factor": {"label_smoothing_factor": 0.1},
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "neftune_noise_alpha": {"neftune_noise_alpha": 5.0},
    "eval_strategy": {"eval_strategy": "steps"},
}


def refuse_trainer(folder):
    from dataclasses import replace

    from transformers import TrainerCallback

    from meshwright.training.adapters import PlannedTrainer

    plan = gpt_plan()

    class OwnLoss(PlannedTrainer):
        def compute_loss(self, *given, **options):
            return super().compute_loss(*given, **options)

    class Looks(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **options):
            return control

    def start(kind=PlannedTrainer, plan=plan, dataset=None, given=None, trains=False, model=None, **options):
        args = arguments(folder, **(given or {}))
        trainer = kind(model=model or gpt(), args=args, train_dataset=dataset or Texts(), plan=plan, **options)
        if trains:
            trainer.train()

    found = {name: refusal(start, given=options) for name, options in REFUSED_ARGUMENTS.items()}
    found["schedule"] = refusal(start, plan=replace(plan, schedule="pipedream"))
    found["inference"] = refusal(start, plan=replace(plan, workload=replace(plan.workload, kind="inference")))
    found["compute_loss"] = refusal(start, kind=OwnLoss)
    found["loss func"] = refusal(start, compute_loss_func=lambda *_: None)
    found["rest"] = refusal(start, dataset=Texts(count=COUNT - 1))
    found["labels"] = refusal(
        start, model=uncounted(), plan=gpt_plan(uncounted()), dataset=Texts(short=SHORT), trains=True
    )
    found["other plan"] = refusal(start, plan=plan_of(gpt(), example()), trains=True)
    found["callback"] = refusal(start, callbacks=[Looks()], trains=True)
    return found


# --- Lightning --------------------------------------------------------------------------------


def rows():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(COUNT, 5, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())


def loader(count=BATCH):
    order = torch.Generator().manual_seed(5)
    return torch.utils.data.DataLoader(rows(), batch_size=count, shuffle=True, generator=order)


def classifier(step=None, **methods):
    """A LightningModule; with another ``training_step``, or more methods."""
    import pytorch_lightning as pl

    class Classifier(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 2)])

        def forward(self, x):
            for block in self.blocks:
                x = torch.tanh(block(x))
            return x

        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = nn.functional.cross_entropy(self(x), y)
            self.log("train_loss", loss, on_step=True, on_epoch=True)
            return loss

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    more = {**methods, **({"training_step": step} if step else {})}
    torch.manual_seed(3)
    return type("Classifier", (Classifier,), more)().double()


def watcher():
    import pytorch_lightning as pl

    class Watcher(pl.Callback):
        def __init__(self):
            self.rows = []

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            rate = trainer.optimizers[0].param_groups[0]["lr"]
            self.rows.append([outputs["loss"].item(), rate, trainer.callback_metrics["train_loss_step"].item()])

        def on_train_epoch_end(self, trainer, module):
            self.rows[-1].append(trainer.callback_metrics["train_loss_epoch"].item())

    return Watcher()


def lightning_trainer(folder, callbacks, **options):
    import pytorch_lightning as pl

    quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "logger"), False)
    given = {"max_epochs": 2, "gradient_clip_val": 0.1, "accelerator": "cpu"}
    return pl.Trainer(default_root_dir=folder, callbacks=callbacks, **quiet, **{**given, **options})


def light_plainly(folder):
    seen = watcher()
    module = classifier()
    lightning_trainer(folder, [seen], enable_checkpointing=False).fit(module, loader())
    return {"log": seen.rows, "weights": weights_of(module)}


def light_plan(**options):
    from meshwright.training.adapters import lightning_step

    return plan_of(*lightning_step(classifier(), next(iter(loader()))), **options)


def light_planned(folder, replicas):
    from meshwright.training.adapters import PlannedStrategy

    seen, module = watcher(), classifier()
    trainer = lightning_trainer(folder, [seen], strategy=PlannedStrategy(light_plan(replicas=replicas)))
    trainer.fit(module, loader())
    trainer.save_checkpoint(folder / "kept.ckpt")
    kept = torch.load(folder / "kept.ckpt", weights_only=True)["state_dict"]
    loaded = classifier()
    loaded.load_state_dict(kept)
    found = {"log": seen.rows, "weights": weights_of(loaded)}
    found["twice"] = refusal(trainer.fit, module, loader())
    found["resume"] = refusal(
        lightning_trainer(folder, [], strategy=PlannedStrategy(light_plan())).fit,
        classifier(),
        loader(),
        ckpt_path=str(folder / "kept.ckpt"),
        weights_only=True,
    )
    trainer.strategy.planned.close()
    return found


def refuse_lightning(folder):
    import pytorch_lightning as pl

    from meshwright.training.adapters import PlannedStrategy, lightning_step

    plan = light_plan()

    def start(module=None, callbacks=(), loaders=None, **options):
        given = {"strategy": PlannedStrategy(plan), "enable_checkpointing": False, **options}
        lightning_trainer(folder, [*callbacks], **given).fit(module or classifier(), *(loaders or [loader()]))

    def logs_more(self, batch, batch_idx):
        made = self(batch[0])
        self.log("accuracy", (made.argmax(1) == batch[1]).double().mean())
        return nn.functional.cross_entropy(made, batch[1])

    def by_index(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1]) * (2 if batch_idx % 2 else 1)

    def by_epoch(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1]) * self.current_epoch

    def returns_more(self, batch, batch_idx):
        made = self(batch[0])
        return {"loss": nn.functional.cross_entropy(made, batch[1]), "made": made}

    class Looks(pl.Callback):
        def on_after_backward(self, trainer, module):
            pass

    manual = classifier()
    manual.automatic_optimization = False
    validated = classifier(validation_step=lambda self, batch, batch_idx: None)

    def traced(step):
        return refusal(lambda: capture_model(*lightning_step(classifier(step), next(iter(loader()))), verify=False))

    return {
        "accumulation": refusal(start, accumulate_grad_batches=2),
        "precision": refusal(start, precision="bf16-mixed"),
        "clip by value": refusal(start, gradient_clip_algorithm="value"),
        "validation": refusal(start, validated, loaders=(loader(), loader())),
        "manual": refusal(start, manual, gradient_clip_val=None),
        "anomaly": refusal(start, detect_anomaly=True),
        "module hook": refusal(start, classifier(on_after_backward=lambda self: None)),
        "callback": refusal(start, callbacks=[Looks()]),
        "validate": refusal(
            lightning_trainer(folder, [], strategy=PlannedStrategy(plan)).validate, validated, loader()
        ),
        "other batch": refusal(start, loaders=[loader(6)]),
        "logs": traced(logs_more),
        "batch_idx": traced(by_index),
        "epoch": traced(by_epoch),
        "returns": traced(returns_more),
    }


# --- processes --------------------------------------------------------------------------------


def find(folder):
    torch.set_num_threads(1)
    found = {}
    for name, call in {
        "pipeline": lambda place: train_planned(place, replicas=False),
        "replicas": lambda place: train_planned(place, replicas=True),
        "refused": refuse_trainer,
        "lightning pipeline": lambda place: light_planned(place, replicas=False),
        "lightning replicas": lambda place: light_planned(place, replicas=True),
        "lightning refused": refuse_lightning,
    }.items():
        place = folder / name.replace(" ", "-")
        place.mkdir(exist_ok=True)
        found[name] = call(place)
    return found


def main(world_size, kind, out):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    out = Path(out)
    if kind == "plain":
        for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        torch.set_num_threads(1)
        found = {"trainer": train_plainly(out.parent), "lightning": light_plainly(out.parent)}
        out.write_text(json.dumps(found))
        return

    def run():
        import torch.distributed as dist

        # As torchrun tells its ranks; without this Lightning and accelerate would see one node each.
        os.environ.update(LOCAL_WORLD_SIZE=str(world_size), TORCHELASTIC_RUN_ID="test")
        found = find(out.parent)
        if dist.get_rank() == 0:
            out.write_text(json.dumps(found))
        dist.barrier()
        dist.destroy_process_group()

    fork_ranks(int(world_size), run)


# --- tests ------------------------------------------------------------------------------------


def numbers(held):
    """All numbers of nested lists and dicts, in order."""
    if isinstance(held, dict):
        return [number for name in sorted(held) for number in numbers(held[name])]
    return [number for item in held for number in numbers(item)] if isinstance(held, list) else [held]


def difference(one, other):
    return max(abs(a - b) for a, b in zip(numbers(one), numbers(other), strict=True))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder, found = tmp_path_factory.mktemp("adapters"), {}
    for kind, world_size in (("plain", 1), ("planned", 2)):
        (folder / kind).mkdir()
        out = folder / kind / "out.json"
        run_ranks("tests.training.test_adapters", world_size, kind, str(out), timeout_s=200)
        found[kind] = json.loads(out.read_text())
    return found


# The losses of transformers are computed in float32.
@pytest.mark.parametrize("layout", ["pipeline", "replicas"])
def test_trainer_has_the_losses_of_one_process(found, layout):
    planned, plain = found["planned"][layout], found["plain"]["trainer"]
    assert len(plain["log"]) == STEPS
    assert difference(planned["log"], plain["log"]) < 2e-6
    assert difference(planned["weights"], plain["weights"]) < 2e-6
    assert planned["flos"] == plain["flos"]


@pytest.mark.parametrize("layout", ["pipeline", "replicas"])
def test_trainer_divides_by_the_labels_of_the_whole_batch(found, layout):
    plain = found["plain"]["trainer"]
    assert difference(found["planned"][layout]["short"], plain["short"]) < 2e-6
    assert difference(plain["short"], plain["log"]) > 0.05


@pytest.mark.parametrize("layout", ["pipeline", "replicas"])
def test_trainer_goes_on_from_a_checkpoint(found, layout):
    planned = found["planned"][layout]
    assert difference(planned["resumed"], planned["log"]) < 1e-12


@pytest.mark.parametrize("layout", ["pipeline", "replicas"])
def test_lightning_has_the_losses_of_one_process(found, layout):
    planned, plain = found["planned"][f"lightning {layout}"], found["plain"]["lightning"]
    assert len(plain["log"]) == 2 * COUNT // BATCH
    assert difference(planned["log"], plain["log"]) < 1e-12
    assert difference(planned["weights"], plain["weights"]) < 1e-12


@pytest.mark.parametrize(
    ("group", "name", "words"),
    [
        ("refused", "batch", "PlanError: Batches of per_device_train_batch_size=4"),
        ("refused", "accumulation", "gradient_accumulation_steps=4 were given; expected 8 and 1"),
        ("refused", "bf16", "bf16=True; expected the plan's float32"),
        ("refused", "label_smoothing_factor", "label_smoothing_factor=0.1"),
        ("refused", "gradient_checkpointing", "expected the plan's recomputation"),
        ("refused", "neftune_noise_alpha", "neftune_noise_alpha=5.0"),
        ("refused", "eval_strategy", "expected 'no'"),
        ("refused", "schedule", "PlanError: The plan's schedule 'pipedream' is asynchronous"),
        ("refused", "inference", "The plan is for inference; expected a plan for training"),
        ("refused", "compute_loss", "has its own `compute_loss`"),
        ("refused", "loss func", "compute_loss_func"),
        ("refused", "rest", "PlanError: The data set has 23 samples"),
        ("refused", "labels", "labels (not counting -100)"),
        ("refused", "other plan", "plan a function that returns trainer_step(model, batch)"),
        ("refused", "callback", "has its own `on_pre_optimizer_step`"),
        ("pipeline", "twice", "`train` was called a second time"),
        ("pipeline", "evaluate", "does not support `evaluate`"),
        ("pipeline", "predict", "does not support `predict`"),
        ("lightning pipeline", "twice", "`fit` was called a second time"),
        ("lightning pipeline", "resume", "expected no ckpt_path"),
        ("lightning refused", "accumulation", "accumulate_grad_batches=2; expected 1"),
        ("lightning refused", "precision", "precision='bf16-mixed'"),
        ("lightning refused", "clip by value", "gradient_clip_algorithm='value'"),
        ("lightning refused", "validation", "batches for validation"),
        ("lightning refused", "manual", "manual optimization"),
        ("lightning refused", "anomaly", "detect_anomaly=True"),
        ("lightning refused", "module hook", "has its own `on_after_backward`"),
        ("lightning refused", "callback", "has its own `on_after_backward`"),
        ("lightning refused", "validate", "cannot validate"),
        ("lightning refused", "other batch", "GraphMismatchError"),
        ("lightning refused", "logs", "logs 'accuracy', which is not the loss"),
        ("lightning refused", "batch_idx", "uses batch_idx"),
        ("lightning refused", "epoch", "uses the trainer"),
        ("lightning refused", "returns", "a dict with loss, made"),
    ],
)
def test_what_is_not_supported_is_refused(found, group, name, words):
    assert words in found["planned"][group][name]


@pytest.mark.parametrize(
    ("name", "hidden", "line"),
    [
        ("PlannedTrainer", "transformers", "pip install 'meshwright[torch,trainer]'"),
        ("PlannedStrategy", "pytorch_lightning", "pip install 'meshwright[torch,lightning]'"),
    ],
)
def test_a_missing_library_is_named(run_fresh, name, hidden, line):
    code = f"""
import sys
sys.modules[{hidden!r}] = None
try:
    from meshwright.training.adapters import {name}
except ImportError as error:
    print(error)
"""
    said = run_fresh(code)
    assert said.startswith(f"{name} needs ")
    assert line in said


if __name__ == "__main__":
    main(*sys.argv[1:])
