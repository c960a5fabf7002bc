"""Matrices as products of two thin ones, by one step of subspace iteration. Pure.

    P = M Q;   P := P orthonormalized;   Q := M^T P;   M ~ P Q^T

Source: Vogels et al., "PowerSGD: practical low-rank gradient compression for distributed
optimization", NeurIPS 2019. Arrays are float32 and contiguous. Q is stored transposed.

`project` may add in any order. The others do the same operations on every processor, in the same
order and without contraction, so all ranks get equal bits from equal bytes.
"""

import numpy as np

from ringreduce.vocabulary.compiled import jit

# Below this part of a column, what is left after taking out those before it is rounding.
_ROUNDING = 1e-6
_ROWS = 64


def project(matrix: np.ndarray, left: np.ndarray, across: np.ndarray, down: np.ndarray) -> None:
    """Add `left` to `matrix`, both of shape (n, m), and set `down` to the sum times `across`.

    `across` is Q transposed, of shape (r, m); `down` is P, of shape (n, r).
    """
    # As many rows at a time as stay in the cache.
    for first in range(0, len(matrix), _ROWS):
        rows = slice(first, first + _ROWS)
        matrix[rows] += left[rows]
        np.matmul(matrix[rows], across.T, out=down[rows])


@jit
def orthonormalize(down):
    """Make the columns of `down`, of shape (n, r), orthonormal; one that depends on others zero.

    By modified Gram-Schmidt, twice, since once leaves columns that were nearly parallel so.
    """
    rows, columns = down.shape
    column = np.empty(rows, np.float64)
    for k in range(columns):
        before = 0.0
        for i in range(rows):
            column[i] = down[i, k]
            before += column[i] * column[i]
        for _ in range(2):
            for other in range(k):
                dot = 0.0
                for i in range(rows):
                    dot += column[i] * down[i, other]
                for i in range(rows):
                    column[i] -= dot * down[i, other]
        after = 0.0
        for i in range(rows):
            after += column[i] * column[i]
        factor = 0.0
        if after > before * _ROUNDING * _ROUNDING:
            factor = 1.0 / np.sqrt(after)
        for i in range(rows):
            down[i, k] = column[i] * factor


@jit
def project_back(matrix, down, across):
    """Set `across`, of shape (r, m), to the transpose of `matrix`, (n, m), times `down`, (n, r)."""
    across[:] = 0
    for i in range(matrix.shape[0]):
        row = matrix[i]
        for k in range(across.shape[0]):
            target, factor = across[k], down[i, k]
            for j in range(row.size):
                target[j] += factor * row[j]


@jit
def replace(matrix, left, down, across):
    """Set `matrix` to `down` times `across`, and `left` to what that takes from it."""
    product = np.empty(matrix.shape[1], np.float32)
    for i in range(matrix.shape[0]):
        row, rest = matrix[i], left[i]
        product[:] = 0
        for k in range(across.shape[0]):
            other, factor = across[k], down[i, k]
            for j in range(product.size):
                product[j] += factor * other[j]
        for j in range(product.size):
            rest[j] = row[j] - product[j]
        for j in range(product.size):
            row[j] = product[j]
