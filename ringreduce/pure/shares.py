"""How the rows of a global batch are divided among ranks that compute at different speeds. Pure."""

from collections.abc import Sequence

# The sum of weights made of measured times; integers, so that no rank rounds differently.
_SCALE = 1 << 20
_NOISE = 0.05  # ranks whose times differ by less than this count as equally fast: it is noise


def apportion(count: int, weights: Sequence[int]) -> list[int]:
    """The rows of each rank in a batch of `count`, in proportion to `weights`, which are above 0.

    By largest remainders, of equal ones the first. They add up to `count`, and each rank has a row
    if there are enough. What is above that minimum differs from the exact proportion by less than 1
    row, unless other ranks needed their minimum.
    """
    total, size = sum(weights), len(weights)
    exact = [divmod(count * weight, total) for weight in weights]
    rows = [rounded for rounded, _ in exact]
    by_remainder = sorted(range(size), key=lambda rank: (-exact[rank][1], rank))
    for rank in by_remainder[: count - sum(rows)]:
        rows[rank] += 1
    if count >= size:
        for rank in range(size):
            if rows[rank] == 0:
                # Where a row less changes a rank's work the least.
                rows[max(range(size), key=rows.__getitem__)] -= 1
                rows[rank] = 1
    return rows


def weights_of(shares: Sequence[float]) -> tuple[int, ...]:
    """Integer weights in the proportion of `shares`, which are finite and above 0."""
    largest = max(shares)
    return tuple(max(1, round(_SCALE * (share / largest))) for share in shares)


def weights_of_times(seconds: Sequence[float]) -> tuple[int, ...]:
    """Weights of ranks that need so many seconds for a row; equal if they are equally fast."""
    times = [max(time_s, 1e-9) for time_s in seconds]
    if max(times) <= min(times) * (1 + _NOISE):
        return (1,) * len(times)
    return weights_of([min(times) / time_s for time_s in times])
