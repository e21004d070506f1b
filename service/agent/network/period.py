"""The length and the bytes of a job's iterations, from a sampled byte counter (Crux 5).

Training is periodic, so the spectrum of its traffic's rate has peaks at the iteration's frequency
and its multiples. The fundamental itself may be weak, because an iteration has its own bursts. The
period is therefore first taken from the autocorrelation, which is the Fourier transform of the
power spectrum and adds up all multiples. It is then refined by the power of the multiples together.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

import numpy as np

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.base.tables import Floats

MIN_SAMPLES = 32
MIN_PERIODS = 3
"""The number of periods that must have been seen."""

_NEAR = 0.85  # of the best peak: the first peak above it is the period, later ones are multiples
_HARMONICS = 12
_GRID = 201


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficPeriod:
    """An iteration that was found.

    ``confidence`` is the correlation with the signal one period later, at most 1.
    """

    period_s: float
    bytes: float
    confidence: float


def find_period(
    times_s: Floats, counts: Floats, *, least_confidence: float = 0.3
) -> TrafficPeriod | None:
    """Return the iteration that a byte counter shows, or None if nothing is regular.

    ``times_s`` rise, and ``counts`` are the counter's values at these times. A counter that falls
    has been reset. At least three periods must be present, with two samples each.

    Raises:
        InvalidInput: too few samples, or times that do not rise.
    """
    rate, step_s = resample_rate(times_s, counts)
    # Remove the trend, which hides the period. A constant rate has no period at all.
    mean = float(rate.mean())
    wave = _detrended(rate)
    if mean <= 0 or float(np.abs(wave).max()) <= 1e-9 * mean:
        return None
    correlation = autocorrelation(wave)
    lag = _first_peak(correlation)
    noise = 4 / np.sqrt(len(wave))  # of the largest correlation of the same amount of noise
    if lag is None or correlation[lag] < max(least_confidence, noise):
        return None
    # The lag is a whole number of steps; the spectrum gives the period more exactly.
    steps = _refined(wave, lag)
    # A partial iteration at the end would bias the mean.
    whole = round(len(rate) // steps * steps)
    mean = float(rate[:whole].mean())
    return TrafficPeriod(
        period_s=steps * step_s,
        bytes=mean * steps * step_s,
        confidence=min(1.0, float(correlation[lag])),
    )


def resample_rate(times_s: Floats, counts: Floats) -> tuple[Floats, float]:
    """Return bytes per second on an even grid, and its step in seconds."""
    times, values = np.asarray(times_s, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    if times.ndim != 1 or times.shape != values.shape or len(times) < MIN_SAMPLES:
        raise InvalidInput("counts", f"must be at least {MIN_SAMPLES} samples, each with its time")
    gaps = np.diff(times)
    if not (np.isfinite(times).all() and np.isfinite(values).all() and (gaps > 0).all()):
        raise InvalidInput(
            "times_s", "must be finite numbers that rise, and the counts must be finite"
        )
    grown = np.diff(values)
    grown = np.where(grown < 0, values[1:], grown)
    total = np.concatenate([[0.0], np.cumsum(grown)])
    step_s = float(times[-1] - times[0]) / (len(times) - 1)
    grid = times[0] + step_s * np.arange(len(times))
    rate: Floats = np.diff(np.interp(grid, times, total)) / step_s
    return rate, step_s


def autocorrelation(wave: Floats) -> Floats:
    """Return the correlation of ``wave`` (mean 0) with itself at each lag.

    Lags range up to a third of the wave's length.
    """
    count = len(wave)
    power = np.abs(np.fft.rfft(wave, 2 * count)) ** 2
    lags = count // MIN_PERIODS + 1
    raw = np.fft.irfft(power)[:lags] / (count - np.arange(lags))
    found: Floats = raw / raw[0]
    return found


def _detrended(rate: Floats) -> Floats:
    at = np.arange(len(rate)) - (len(rate) - 1) / 2
    centred = rate - rate.mean()
    found: Floats = centred - at * (centred @ at) / (at @ at)
    return found


def _first_peak(correlation: Floats) -> int | None:
    """Return the first lag past the fall from lag 0 whose peak is near the highest, or None."""
    below = np.flatnonzero(correlation <= 0)
    if not len(below):
        return None
    inner = correlation[1:-1]
    peaks = np.flatnonzero((inner >= correlation[:-2]) & (inner > correlation[2:])) + 1
    peaks = peaks[peaks > max(1, below[0])]
    if not len(peaks):
        return None
    near = correlation[peaks] >= _NEAR * correlation[peaks].max()
    return int(peaks[near][0])


def _refined(wave: Floats, lag: int) -> float:
    """Return the period in steps near ``lag`` whose frequency's multiples carry the most power."""
    count = len(wave)
    periods = np.linspace(lag - 1.0, lag + 1.0, _GRID)
    first = np.exp(-2j * np.pi * np.outer(1 / periods, np.arange(count)))
    phase = first.copy()
    power = np.abs(phase @ wave) ** 2
    for _ in range(1, min(_HARMONICS, lag // 2)):
        phase *= first
        power += np.abs(phase @ wave) ** 2
    return float(periods[int(power.argmax())])


def main() -> None:
    """Read times and counts as JSON from standard input; write the iteration found, or null.

    ``sampling`` runs this in a separate process.
    """
    times_s, counts = json.load(sys.stdin)
    found = find_period(np.array(times_s), np.array(counts, np.float64))
    plain = None
    if found is not None:
        plain = {
            "period_s": found.period_s,
            "sent_bytes": found.bytes,
            "confidence": found.confidence,
        }
    sys.stdout.write(json.dumps(plain))


if __name__ == "__main__":
    main()
