"""``sidco``: about the k = ceil(ratio * n) largest elements, by a limit that is estimated without sorting.

After Abdelmoniem et al., "An Efficient Statistical-based Gradient Compression Technique for Distributed
Training Systems" (SIDCo, MLSys 2021): the magnitudes are taken as exponential, which gives the limit that a
share of them reaches; since they are not, a stage keeps at most a quarter, and the next one fits the survivors'
excess over the last limit. The paper adapts the number of stages over training steps. A codec keeps no state, so
here the fit counts: on a sample, each stage starts from the survivors that the last one really left, stages are
added while too many remain, and one that went too far is taken back between the last two limits, until about
twice the share is left. One pass over the tensor takes the elements that reach that limit; the last stages count
all of those, so that the share is right within a tenth whatever the sample missed.

With ``fit=pareto`` the excess x over the last limit is taken as generalised Pareto: a share (1 - k x / alpha)^(1 / k)
exceeds x, where the moments give, with the mean mu and the variance var of x, k = (mu^2 / var - 1) / 2 and alpha =
mu (mu^2 / var + 1) / 2. Tails may then be lighter or heavier than exponential ones, whose k is zero. mu^2 / var above
64 counts as 64.

If no limit finds 0.8 k to 1.25 k elements (many equal magnitudes), or the sample misled so much that the pass
took fewer or over twenty times as many, exactly the k largest are sent as by ``topk``, lower indices first among
equals. So a tensor of one value sends its first k elements. Zeros are never sent, even where fewer than k elements
are not zero. NaN and infinities are always sent, but for those that would make more than 1.25 k.

The sample is all of up to 4,096 elements, else groups of 32 neighbours at places that depend on n and k only: as
many as hold 32 of those sent, from 2,048 elements to a 32nd of the tensor. With ``stages`` given, whose limit is
not corrected afterwards, it is all of up to 32,768 elements, else as many as hold 512, from 16,384 to an eighth.
Sums are in double, in 16 lanes; in them, magnitudes below 2^-100 count as zero (for float64 below 2^-400, and above
2^400 as 2^400). ``kernels/include/hybridcomp/sparse.hpp`` fixes all of that.

The payload is that of :mod:`~hybridcomp.codecs.sparse.base`.
"""

from __future__ import annotations

from typing import Any

from hybridcomp import native
from hybridcomp.arrays import Flat
from hybridcomp.codecs import checks
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.sparse.base import RatioCodec
from hybridcomp.codecs.table import register

FITS = ("exponential", "pareto")  # in the order of the kernels' numbers
MOST_STAGES = 16


@register
class SIDCoCodec(RatioCodec):
    """Codec with a statistical threshold.

    Args:
        ratio: share of the elements that is aimed at; above 0, at most 1.
        values: codec of the sent values, as for ``topk``.
        stages: number of fits. 0: as many as it takes; 1 to 16: the paper's, whatever number of elements they find
            up to 1.25 k (if more, the k largest). A rule's ``adapt = "sidco"`` changes it as training goes on.
        fit: distribution that magnitudes are taken to have, ``exponential`` or ``pareto``.
    """

    name = "sidco"
    wire_id = 18
    examples = (
        "sidco:ratio=0.02",
        "sidco:ratio=0.4,values=fp16,stages=3",
    )
    seldom = frozenset({"stages", "fit"})

    def __init__(
        self, ratio: float = 0.001, values: str | Codec = "none", stages: int = 0, fit: str = FITS[0]
    ) -> None:
        super().__init__(ratio, values)
        self._stages = checks.integer("stages", stages, 0, MOST_STAGES)
        self._fit = checks.choice("fit", fit, FITS)

    @property
    def stages(self) -> int:
        """Return the number of fits that are made; 0: as many as it takes."""
        return self._stages

    @property
    def fit(self) -> str:
        """Return the distribution that magnitudes are taken to have."""
        return self._fit

    @property
    def distribution(self) -> int:
        """Return the kernels' number of the distribution in :attr:`fit`."""
        return FITS.index(self._fit)

    @property
    def params(self) -> dict[str, Any]:
        return {
            "ratio": self._ratio,
            "values": self._values.spec,
            "stages": self._stages,
            "fit": self._fit,
        }

    def most(self, n: int) -> int:
        return int(native.kernels().sparse_sidco_most(n, self.k(n)))

    @property
    def selection(self) -> dict[str, Any] | None:
        by = super().selection
        return by and {**by, "stages": self._stages, "distribution": self.distribution}

    def select(self, src: Flat) -> Any:
        how = (self.k(src.size), self._stages, self.distribution)
        return native.kernels().sparse_sidco(src.data, src.dtype, *how)

    def limit(self, src: Flat) -> float:
        """Return the limit that the fits of at least one stage give, before the elements that reach it are counted.

        Args:
            src: array of at least one element.

        Returns:
            The magnitude; infinity where more than the share of the elements is not finite.
        """
        how = (self.k(src.size), self._stages, self.distribution)
        return float(native.kernels().sparse_sidco_limit(src.data, src.dtype, *how))
