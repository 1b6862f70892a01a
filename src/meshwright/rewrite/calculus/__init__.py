"""The element of a tensor at an index, as a symbolic formula (for proofs) or as a number (for trials).

Symbols for sizes, indices and attributes are called **letters**. Modules:

* `whole`: polynomials in letters, and `Arithmetic`, the interface that operator definitions use;
* `facts`: bounds of letters, and what follows from them;
* `sums`: the normal form of an element;
* `symbols`: `Arithmetic` on letters, for proofs;
* `arrays`: `Arithmetic` on numbers, for trials; `fields`: the numbers.

This package exports only what computes; modules for proofs need z3 and are imported directly.
"""

from meshwright.rewrite.calculus.arrays import Arrays
from meshwright.rewrite.calculus.fields import PRIME, Doubles, NumberField, PrimeField
from meshwright.rewrite.calculus.whole import Arithmetic, IllTypedError, Indexed

__all__ = ["PRIME", "Arithmetic", "Arrays", "Doubles", "IllTypedError", "Indexed", "NumberField", "PrimeField"]
