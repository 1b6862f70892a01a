"""The calculus of indices: what a tensor's number at an index is, in letters (to prove) and in numbers (to compute).

`whole` polynomials of sizes and indices · `facts` what follows from their bounds · `sums` the normal form of a number ·
`machine` what definitions are written in · `symbols` runs them over letters · `arrays` over numbers of `fields`. What
proves needs z3 and is imported from its modules; what computes is here.
"""

from meshwright.rewrite.calculus.arrays import Arrays
from meshwright.rewrite.calculus.fields import PRIME, Doubles, NumberField, PrimeField
from meshwright.rewrite.calculus.machine import Arithmetic, IllTypedError, Indexed

__all__ = ["PRIME", "Arithmetic", "Arrays", "Doubles", "IllTypedError", "Indexed", "NumberField", "PrimeField"]
