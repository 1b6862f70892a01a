"""The calculus of indices: the value of a tensor at an index, as a formula (to prove) or as a number (to compute).

Symbols for sizes and indices are called **letters**.

`whole` polynomials of sizes and indices, and the interface for definitions · `facts` what follows from their bounds
· `sums` the normal form of a number · `symbols` runs definitions over letters · `arrays` over numbers of `fields`.
Proofs need z3 and are imported from their modules; computation is exported here.
"""

from meshwright.rewrite.calculus.arrays import Arrays
from meshwright.rewrite.calculus.fields import PRIME, Doubles, NumberField, PrimeField
from meshwright.rewrite.calculus.whole import Arithmetic, IllTypedError, Indexed

__all__ = ["PRIME", "Arithmetic", "Arrays", "Doubles", "IllTypedError", "Indexed", "NumberField", "PrimeField"]
