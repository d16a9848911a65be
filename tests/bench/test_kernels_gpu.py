"""The bench of the Triton kernels, its sums and one small batch of it; and that it needs a GPU."""

from __future__ import annotations

import pytest
import torch

from bench.kernels_gpu import BATCHES, Batch, error_of, main, prepare


def test_bytes_and_operations_of_a_batch() -> None:
    batch = Batch("", [3], [(2, 2)], (4, 2, 8))
    assert batch.num_bytes(2) == 2 * (3 + 4) * 2 * 8 * 2
    assert batch.num_operations() == 4 * (3 + 3 + 4) * 4 * 8


def test_a_small_batch_is_as_exact_as_it_says() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    prepared = prepare(Batch("", [40, 1], [(3, 5)], (4, 2, 32)), device, torch.float32, most_layers=1)
    assert error_of(prepared) < 1e-5
    assert len({batch.name for batch in BATCHES}) == len(BATCHES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["kernels_gpu"])
    with pytest.raises(SystemExit, match="torch sees no CUDA device"):
        main()
