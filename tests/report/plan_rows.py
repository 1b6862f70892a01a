"""Rows of `Plans.rows`, made up."""


def plan_row(place, **changes):
    """One plan on 8 devices; ``changes`` replace its values."""
    row = {
        "place": place,
        "num_devices": 8,
        "num_stages": 2,
        "num_positions": 2,
        "replicas": [4, 4],
        "tensor": 1,
        "sequence_parallel": False,
        "has_own_placements": False,
        "context": 1,
        "expert": 1,
        "zero": 0,
        "shard_size": 0,
        "recompute": "none",
        "offload": "none",
        "num_microbatches": 16,
        "microbatch_size": 2,
        "schedule": "1f1b",
        "step_time_s": 0.5,
        "step_interval_s": [0.4, 0.75],
        "samples_per_s": 64.0,
        "tokens_per_s": 65536.0,
        "mfu_share": 0.42,
        "reserved_memory_bytes": 3 * 2**30,
        "bubble_share": 0.25,
    }
    return row | changes
