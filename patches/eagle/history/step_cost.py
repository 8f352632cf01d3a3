"""Learn what a decode step costs: its seconds without drafts, and those that each draft token adds."""

from __future__ import annotations

_WINDOW = 100.0  # steps that are remembered per bucket of batch sizes
_SPREAD = 4.0  # a step that takes so many times what was expected is an outlier
_FIRST_SHARE = 0.05  # of a step's seconds that a draft token is taken to cost before anything was measured
_PRIOR = 4.0  # steps that this first estimate is worth


class StepCost:
    """Fit ``seconds = base + slope * draft tokens`` for each power-of-two bucket of batch sizes."""

    def __init__(self) -> None:
        self._fits: dict[int, _Fit] = {}

    def observe(self, batch_size: int, draft_tokens: int, seconds: float) -> None:
        """Learn from a step over ``batch_size`` requests that verified ``draft_tokens`` in all."""
        bucket = batch_size.bit_length()
        fit = self._fits.get(bucket)
        if fit is None:
            near = min(self._fits, key=lambda other: abs(other - bucket), default=None)
            share = self._fits[near].share if near is not None else _FIRST_SHARE
            fit = self._fits[bucket] = _Fit(seconds / (1 + share * draft_tokens), share)
        fit.observe(draft_tokens, seconds)

    def estimate(self, batch_size: int) -> tuple[float, float] | None:
        """Return (base, slope) in seconds for a batch size; None if no step of any was seen."""
        fit = self._fits.get(batch_size.bit_length())
        if fit is None:
            near = min(self._fits, key=lambda other: abs(other - batch_size.bit_length()), default=None)
            if near is None:
                return None
            fit = self._fits[near]
        return fit.base, fit.share * fit.base


class _Fit:
    """Fit a line through the last steps, weighted exponentially."""

    def __init__(self, base: float, share: float) -> None:
        self.base, self.share = base, share
        self._sums = [0.0] * 5  # of 1, drafts, seconds, drafts squared, drafts times seconds
        self._first = share

    def observe(self, drafts: int, seconds: float) -> None:
        expected = self.base * (1 + self.share * drafts)
        seconds = min(seconds, _SPREAD * expected)
        keep = 1.0 - 1.0 / _WINDOW
        values = (1.0, drafts, seconds, drafts * drafts, drafts * seconds)
        self._sums = [total * keep + value for total, value in zip(self._sums, values, strict=True)]
        count, sum_drafts, sum_seconds, sum_squares, sum_products = self._sums
        mean_drafts, mean_seconds = sum_drafts / count, sum_seconds / count
        spread = sum_squares - sum_drafts * mean_drafts
        product = sum_products - sum_drafts * mean_seconds
        # ridge towards the first share: steps whose drafts are all alike say nothing of the slope
        weight = _PRIOR * max(1.0, mean_drafts * mean_drafts)
        slope = (product + weight * self._first * self.base) / (spread + weight)
        slope = max(slope, 1e-3 * mean_seconds / (1 + mean_drafts))
        self.base = max(mean_seconds - slope * mean_drafts, 0.2 * mean_seconds)
        self.share = slope / self.base
