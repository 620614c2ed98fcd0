import pytest
import torch

from flashstudy.compress.prune import block_mask, magnitude_mask, n_m_mask, random_mask


def test_the_smallest_weights_go_first():
    weight = torch.tensor([[0.1, -3.0, 0.2], [-0.05, 1.0, 2.0]])
    assert magnitude_mask(weight, 0.5).tolist() == [[False, True, False], [False, True, True]]


@pytest.mark.parametrize("sparsity", [0, 0.1, 0.5, 0.9, 1])
def test_the_share_is_met_exactly_even_when_all_weights_are_equal(sparsity):
    mask = magnitude_mask(torch.full((7, 11), 0.3), sparsity)
    assert int((~mask).sum()) == round(sparsity * 77)


def test_ties_at_the_threshold_do_not_change_the_count(generator):
    weight = torch.randint(-3, 4, (32, 32), generator=generator).float()
    for sparsity in (0.2, 0.5, 0.7):
        mask = magnitude_mask(weight, sparsity)
        assert int((~mask).sum()) == round(sparsity * 1024)
        assert weight[~mask].abs().max() <= weight[mask].abs().min()


def test_magnitude_pruning_keeps_the_most_energy_that_a_mask_of_this_share_can(generator):
    weight = torch.randn(64, 64, generator=generator)
    by_size = (weight * magnitude_mask(weight, 0.5)).norm() ** 2 / weight.norm() ** 2
    at_random = (weight * random_mask((64, 64), 0.5, generator)).norm() ** 2 / weight.norm() ** 2
    # of a normal's energy, what lies beyond its median magnitude 0.6745: 0.5 + 2 · 0.6745 · density(0.6745) = 0.929
    assert by_size == pytest.approx(0.929, abs=0.01)
    assert at_random == pytest.approx(0.5, abs=0.05)


def test_blocks_are_kept_or_dropped_whole_by_their_norm():
    weight = torch.zeros(4, 4)
    weight[:2, :2], weight[:2, 2:], weight[2:, :2], weight[2:, 2:] = 1.0, 4.0, 3.0, 2.0
    mask = block_mask(weight, 0.5, (2, 2))
    assert mask[:2, 2:].all() and mask[2:, :2].all()
    assert not mask[:2, :2].any() and not mask[2:, 2:].any()


def test_blocks_are_judged_by_their_norm_not_their_largest_weight():
    weight = torch.tensor([[1.0, 0, 0.7, 0.7], [0, 0, 0.7, 0.7]])  # squares sum to 1 and to 1.96
    assert block_mask(weight, 0.5, (2, 2))[0].tolist() == [False, False, True, True]


def test_one_large_weight_saves_its_block():
    weight = torch.full((2, 8), 0.1)
    weight[1, 6] = 5
    assert block_mask(weight, 0.75, (2, 2)).nonzero()[:, 1].unique().tolist() == [6, 7]


def test_two_of_four_keeps_the_two_largest_of_each_four(generator):
    assert n_m_mask(torch.tensor([[1.0, -4, 3, 2, 0, 0, 0, 0]]), 2, 4)[0, :4].tolist() == [False, True, True, False]
    mask = n_m_mask(torch.randn(16, 64, generator=generator), 2, 4)
    assert (mask.reshape(16, 16, 4).sum(-1) == 2).all()


def test_random_masks_drop_the_exact_share_and_repeat_with_the_seed():
    first = random_mask((32, 33), 0.9, torch.Generator().manual_seed(3))
    assert int((~first).sum()) == round(0.9 * 32 * 33)
    assert torch.equal(first, random_mask((32, 33), 0.9, torch.Generator().manual_seed(3)))
    assert not torch.equal(first, random_mask((32, 33), 0.9, torch.Generator().manual_seed(4)))


def test_bad_shares_and_blocks_are_refused():
    weight = torch.ones(4, 6)
    with pytest.raises(ValueError, match=r"sparsity 1.5 is not in \[0, 1\]"):
        magnitude_mask(weight, 1.5)
    with pytest.raises(ValueError, match=r"block \(4, 4\) does not divide the shape \(4, 6\)"):
        block_mask(weight, 0.5, (4, 4))
    with pytest.raises(ValueError, match="m 4 does not divide 6"):
        n_m_mask(weight, 2, 4)
    with pytest.raises(ValueError, match="3:2 needs"):
        n_m_mask(weight, 3, 2)
