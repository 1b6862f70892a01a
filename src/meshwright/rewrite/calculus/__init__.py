"""The calculus of indices: what a tensor's number at an index is, in letters (to prove) and in numbers (to compute).

`whole` polynomials of sizes and indices, and the interface for definitions · `facts` what follows from their bounds
· `sums` the normal form of a number · `symbols` runs definitions over letters · `arrays` over numbers of `fields`.
Proofs need z3 and are imported from their modules; computation is exported here.
"""

from meshwright.rewrite.calculus.arrays import Arrays
from meshwright.rewrite.calculus.fields import PRIME, Doubles, NumberField, PrimeField
from meshwright.rewrite.calculus.whole import Arithmetic, IllTypedError, Indexed

__all__ = ["PRIME", "Arithmetic", "Arrays", "Doubles", "IllTypedError", "Indexed", "NumberField", "PrimeField"]
