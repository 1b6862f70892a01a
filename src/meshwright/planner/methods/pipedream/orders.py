"""Orders of a profile's layers, for graphs with too many states, and the number of those states.

An order passes through one state per layer. Few bytes are on the frontier if branches are finished one after the other;
so besides the order of the profile itself, one order continues with the layer that became ready last, and one with the
layer that leaves the least to keep.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.planner.methods.pipedream.profile import Profile


def find_orders(profile: Profile) -> Iterator[list[int]]:
    """Yield orders in which each layer follows those that it reads; each starts with the first layer."""
    yield list(range(len(profile.names)))
    yield _walk(profile, by_bytes=False)
    yield _walk(profile, by_bytes=True)


def _walk(profile: Profile, *, by_bytes: bool) -> list[int]:
    """Return an order that continues with the layer that became ready last or, by bytes, adds the least to keep."""
    readers = profile.readers
    missing = [len(sources) for sources in profile.reads]
    unread = [len(items) for items in readers]
    # The step since which a layer is ready; another source is started only if nothing else is ready.
    ready = {layer: -1 for layer, count in enumerate(missing) if count == 0}
    order: list[int] = []

    def preference(layer: int) -> tuple[float, int, int]:
        freed = sum(float(profile.activation_bytes[source]) for source in profile.reads[layer] if unread[source] == 1)
        return (float(profile.activation_bytes[layer]) - freed if by_bytes else 0.0, -ready[layer], layer)

    while ready:
        layer = 0 if not order else min(ready, key=preference)
        del ready[layer]
        order.append(layer)
        for source in profile.reads[layer]:
            unread[source] -= 1
        for reader in readers[layer]:
            missing[reader] -= 1
            if missing[reader] == 0:
                ready[reader] = len(order)
    return order


def count_states(profile: Profile) -> int:
    """Return the number of sets of layers that contain all that they read, and the first layer.

    It is an upper bound of the number of states. Layers are decided one after the other; only decided layers with
    undecided readers still matter.
    """
    readers = profile.readers
    unread = [len(items) for items in readers]
    counts = {frozenset[int](): 1}
    for layer in list(find_orders(profile))[1]:
        grown: dict[frozenset[int], int] = {}
        done = {source for source in profile.reads[layer] if unread[source] == 1}
        for source in profile.reads[layer]:
            unread[source] -= 1
        for members, count in counts.items():
            choices = [members] if layer else []
            if members.issuperset(profile.reads[layer]):
                choices.append(members | {layer} if readers[layer] else members)
            for chosen in choices:
                kept = chosen - done
                grown[kept] = grown.get(kept, 0) + count
        counts = grown
    return sum(counts.values())
