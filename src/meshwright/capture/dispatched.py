"""Does the captured graph call the operators that the model calls in training?

While a model is traced, libraries may take branches that only exporting needs, with equal results and other costs. So
what torch dispatches is counted while both run on small batches (`verify`): calls by module, operator and shapes of
results. Views are free, and checks on whole numbers (are these positions packed?) that the graph leaves out compute
nothing that it needs.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_FREE = frozenset(
    ("alias", "as_strided", "detach", "expand", "lift_fresh", "permute", "select", "slice", "split", "split_with_sizes",
     "squeeze", "t", "transpose", "unbind", "unsqueeze", "view", "_assert_tensor_metadata", "_reshape_alias",
     "_unsafe_view")
)  # fmt: skip
# One operator under two names: ours has shapes for tensors without data (`grouped`).
_SAME = {"_grouped_mm": "grouped_mm"}
# The remark names at most this many modules, and operators of each.
_TOLD_MODULES, _TOLD_OPERATORS = 3, 4

# An operator, and the shapes and dtypes of its results.
_Call = tuple[str, tuple[tuple[tuple[int, ...], torch.dtype], ...]]


class Dispatched(TorchDispatchMode):
    """Counts what is dispatched in the last call, by the module that runs; "" is the model itself.

    Of several calls the last one counts: the first may make what is used from then on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, Counter[_Call]] = {}
        self._module = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count a call, and let it happen."""
        made = func(*args, **(kwargs or {}))
        name = func._schema.name.rpartition("::")[2]
        if name not in _FREE:
            looks = tuple(
                (tuple(item.shape), item.dtype) for item in pytree.tree_leaves(made) if isinstance(item, torch.Tensor)
            )
            self.calls.setdefault(self._module, Counter())[_SAME.get(name, name), looks] += 1
        return made

    @contextmanager
    def counting(self, model: nn.Module) -> Iterator[None]:
        """While active, count what the model dispatches."""
        self.calls.clear()
        path = [""]

        def enter(name: str) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                path.append(name)
                self._module = name

            return hook

        def leave(*_: Any) -> None:
            path.pop()
            self._module = path[-1]

        with ExitStack() as stack:
            for name, module in model.named_modules():
                stack.callback(module.register_forward_pre_hook(enter(name)).remove)
                stack.callback(module.register_forward_hook(leave, always_call=True).remove)
            stack.enter_context(self)
            yield

    def run(self, part: fx.GraphModule, modules: Mapping[str, str], batch: Sequence[torch.Tensor]) -> Any:
        """Run a part, and count what it dispatches; ``modules`` names the module of each of its nodes."""
        dispatched = self
        self.calls.clear()

        class Interpreter(fx.Interpreter):
            def run_node(self, n: fx.Node) -> Any:
                dispatched._module = modules.get(n.name, "")
                return super().run_node(n)

        with self:
            return Interpreter(part).run(*batch)


def explain_calls(model: Dispatched, graph: Dispatched) -> str:
    """How what the graph dispatches differs from what the model does; empty if it does not."""
    wanted, found = sum(model.calls.values(), Counter()), sum(graph.calls.values(), Counter())
    lost = {call for call in wanted - found if any(dtype.is_floating_point for _, dtype in call[1])}
    added = set(found - wanted)
    if not lost and not added:
        return ""
    told = []
    for name in dict.fromkeys((*model.calls, *graph.calls)):
        own, other = (item.calls.get(name, Counter()) for item in (model, graph))
        missing = _names(call for call in own - other if call in lost)
        more = _names(call for call in other - own if call in added)
        if missing or more:
            told.append(f"{name or 'the model itself'!r} ({missing or 'nothing'} became {more or 'nothing'})")
    more_modules = f" and {len(told) - _TOLD_MODULES} more modules" if len(told) > _TOLD_MODULES else ""
    return (
        f"The captured graph computes what the model computes, by other operators in {', '.join(told[:_TOLD_MODULES])}"
        f"{more_modules}: while it was traced, the model took a branch that training does not take. Times and memory "
        "are predicted for the graph, which is also what runs."
    )


def _names(calls: Any) -> str:
    names = list(dict.fromkeys(name for name, _ in calls))
    rest = f" and {len(names) - _TOLD_OPERATORS} more" if len(names) > _TOLD_OPERATORS else ""
    return ", ".join(names[:_TOLD_OPERATORS]) + rest
