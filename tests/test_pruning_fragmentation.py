import pytest
import torch

from flashstudy.studies import pruning_fragmentation as study
from tests import smoke

NAME = "pruning_fragmentation"


def test_smoke_run_times_every_format_and_scores_every_pattern():
    result = smoke.check_rows(NAME, ["time_ratio", "mbu", "stored_bytes", "index_bytes", "delta_nll_nats"])
    sparsities = smoke.run(NAME).provenance["parameters"]["sparsities"]
    timed = study.table(result)
    assert len(timed) == len(sparsities) * len(study.FORMATS)
    assert (timed.mbu > 0).all() and (timed.mbu <= 1.0).all(), "nothing reads faster than the fastest reader"
    scored = result[result.delta_nll_nats.notna()]
    assert set(scored.pattern) == {"unstructured", "block"} and len(scored) == 2 * len(sparsities)


def test_stored_bytes_of_half_the_weights_match_hand_counts():
    timed = study.table(smoke.run(NAME).result)
    half = timed[timed.sparsity == 0.5].set_index("sparse_format")
    n, rows = 1024 * 4096, 1024  # the key projection of llama3-8b
    assert half.stored_bytes["csr"] == n // 2 * 8 + (rows + 1) * 4  # value and column of each kept weight, row pointers
    assert half.stored_bytes["bitmap"] == n // 2 + n // 8 + 2 * rows  # int8 values, one bit a place, a scale a row
    assert half.stored_bytes["bsr"] == n // 2 * 4 + n // 2 // 256 * 4 + (rows // 16 + 1) * 4
    assert half.stored_bytes["dense"] == n * 4
    assert half.compression["csr"] < 1.0, "half of the weights in CSR take more bytes than all of them dense"


def test_random_masks_leave_no_block_empty_and_block_masks_do():
    timed = study.table(smoke.run(NAME).result)
    half = timed[timed.sparsity == 0.5].set_index("sparse_format")
    assert half.occupancy["csr"] == 1.0  # 1 - 0.5^256
    assert half.occupancy["bsr"] == pytest.approx(0.5, abs=1e-4)


def test_pruning_more_costs_more():
    scored = smoke.run(NAME).result.dropna(subset=["delta_nll_nats"]).sort_values("sparsity")
    for _, line in scored.groupby("pattern"):
        assert line.delta_nll_nats.is_monotonic_increasing and line.delta_nll_nats.iloc[-1] > 0.5


def test_claims_get_numbers():
    judged = smoke.check_verdicts(NAME, {"bandwidth_dense", "bandwidth_sparse", "block_latency", "block_compression"})
    # 8 bytes a kept weight in CSR, 4 + 4/256 in 16x16 blocks: BSR compresses about twice as well
    assert judged.estimate["block_compression"] == pytest.approx(1.99, abs=0.01)
    assert judged.mechanism_here["block_compression"] == "supported"


def test_random_blocks_are_whole_and_as_many_as_asked():
    mask = study._random_blocks((64, 128), 0.75, 16, torch.Generator().manual_seed(0))
    blocks = mask.reshape(4, 16, 8, 16).float().mean(dim=(1, 3))
    assert set(blocks.flatten().tolist()) == {0.0, 1.0} and blocks.sum() == 8
    with pytest.raises(ValueError, match=r"block 24 does not divide the shape \(64, 128\)"):
        study._random_blocks((64, 128), 0.5, 24, torch.Generator())


def test_sparsity_of_one_and_unknown_shapes_are_refused():
    with pytest.raises(ValueError, match="sparsities"):
        study.Params(sparsities=[1.0])
    with pytest.raises(ValueError, match="'llama-99b' is not one of"):
        study.Params(shape="llama-99b")
