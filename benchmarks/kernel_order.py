"""How often a larger product takes less time than a smaller one, as measured and as predicted."""

from harness import make_row, parse_options, publish

from meshwright.cost.kernels import shipped_model
from meshwright.cost.kernels.fit import split_parts
from meshwright.cost.kernels.model import MIN_ROWS
from meshwright.validation.datasets import load_records
from meshwright.validation.kernel_order import next_larger, share_of_falls, share_of_false_falls
from meshwright.validation.kernels import kinds


def main() -> int:
    options = parse_options(__doc__)
    rows = []
    for part in split_parts(load_records("kernels").where(op="matmul"), kinds()):
        pairs = next_larger(part.sizes)
        if len(part.seconds) < MIN_ROWS or not len(pairs):
            continue
        predicted = shipped_model().predict(part.kernel, part.sizes).seconds
        ours, measured = (share_of_falls(seconds, pairs) for seconds in (predicted, part.seconds))
        false = share_of_false_falls(predicted, part.seconds, pairs)
        name = f"{part.kernel.device.name}, {part.kernel.dtype}, {part.kernel.family}, {len(pairs)} pairs"
        rows.append(make_row(f"{name}: falls", 100 * ours, "%", baseline=100 * measured, target=100 * measured))
        rows.append(make_row(f"{name}: falls that were not measured", 100 * false, "%"))
    return publish("kernel_order", rows, options)


if __name__ == "__main__":
    raise SystemExit(main())
