"""The noise that sampling and noise-coupled drafting share: counter-based, so it is known before the target runs.

Philox4x32-10 (Salmon et al., SC 2011) with key (seed low word, seed high word) and counter
(token // 4, position, 0, 0); token takes word token % 4 of the block. The 32-bit word r gives
v = (r + 1/2) 2^-32 and gumbel = fp32(-log(-log1p(-v))), computed in fp64. It lies in [-3.14, 22.88].

`ref` and `torch_impl` offer `random_bits(seed, position, token)` and `gumbel(seed, position, token)`; the arguments
broadcast together. The bits are the same everywhere. The Gumbel values agree between torch, numpy and devices unless
fp64 logs that differ in their last place fall on two sides of an fp32 rounding boundary: none of 12.8 million did.
"""

GUMBEL_MAX = 22.88
GUMBEL_MIN = -3.14
