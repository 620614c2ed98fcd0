import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashstudy.compress.prune import block_mask, magnitude_mask, random_mask
from flashstudy.compress.sparse import block_occupancy, stored_bytes, to_bitmap, to_bsr, to_csr
from flashstudy.compress.stores import PIECE_BYTES, gather_by_table, scatter

shapes = st.tuples(st.integers(0, 9), st.integers(0, 21))


def sparse_weight(shape, density, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(-127, 128, shape, generator=generator)
    return (weight * (torch.rand(shape, generator=generator) < density)).to(dtype)


def tensor_bytes(*tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_a_bitmap_longer_than_a_piece_is_unpacked_without_a_seam():
    weight = sparse_weight((8 * PIECE_BYTES // 512 + 3, 513), 0.5, 0, torch.int8)
    bitmap = to_bitmap(weight)
    assert len(bitmap.bits) > PIECE_BYTES
    assert torch.equal(gather_by_table(bitmap.bits, bitmap.values, weight.numel()).reshape(weight.shape), weight)


@settings(max_examples=60, deadline=None)
@given(shape=shapes, density=st.sampled_from([0.0, 0.1, 0.5, 1.0]), seed=st.integers(0, 999))
def test_a_bitmap_gives_the_weight_back_and_takes_the_bytes_it_says(shape, density, seed):
    weight = sparse_weight(shape, density, seed, torch.int8)
    bitmap = to_bitmap(weight)
    for unpack in (scatter, gather_by_table):
        assert torch.equal(unpack(bitmap.bits, bitmap.values, weight.numel()).reshape(shape), weight)
    assert stored_bytes("bitmap", weight, value_bytes=1).total == tensor_bytes(bitmap.bits, bitmap.values)


@settings(max_examples=60, deadline=None)
@given(shape=shapes, density=st.sampled_from([0.0, 0.3, 0.5, 1.0]), seed=st.integers(0, 999))
def test_both_ways_to_unpack_a_bitmap_agree(shape, density, seed):
    weight = sparse_weight(shape, density, seed, torch.int8)
    bitmap = to_bitmap(weight)
    flat = weight.flatten()
    assert torch.equal(scatter(bitmap.bits, bitmap.values, flat.numel()), flat)
    assert torch.equal(gather_by_table(bitmap.bits, bitmap.values, flat.numel()), flat)


def test_bits_stand_row_by_row_with_the_first_weight_lowest():
    bitmap = to_bitmap(torch.tensor([[5.0, 0, 0, 7], [0, 0, 0, 9]]))
    assert bitmap.bits.tolist() == [0b1000_1001]
    assert bitmap.values.tolist() == [5, 7, 9]


@pytest.mark.parametrize("density", [0.0, 0.2, 1.0])
def test_csr_and_bsr_give_the_weight_back_and_take_the_bytes_they_say(density):
    weight = sparse_weight((16, 24), density, 1)
    csr, bsr = to_csr(weight), to_bsr(weight, (4, 8))
    assert torch.equal(csr.to_dense(), weight) and torch.equal(bsr.to_dense(), weight)
    for name, matrix, block in (("csr", csr, None), ("bsr", bsr, (4, 8))):
        actual = tensor_bytes(matrix.values(), matrix.col_indices(), matrix.crow_indices())
        assert stored_bytes(name, weight, value_bytes=4, block=block).total == actual


def test_stored_bytes_match_the_hand_count():
    mask = torch.zeros(8, 16, dtype=torch.bool)
    mask[0, :4] = True  # 4 of 128 weights, in 2 of the 16 blocks of 2 × 4... the first row of blocks only
    mask[0, 4] = True
    assert stored_bytes("dense", mask, value_bytes=1, scale_bytes=16).total == 128 + 16
    assert stored_bytes("bitmap", mask, value_bytes=1).total == 5 + 16
    assert stored_bytes("csr", mask, value_bytes=4).total == 5 * 4 + (5 + 9) * 4
    assert stored_bytes("bsr", mask, value_bytes=4, block=(2, 4)).total == 2 * 8 * 4 + (2 + 5) * 4
    assert stored_bytes("n_m", mask, value_bytes=2).total == 64 * 2 + 64 * 2 // 8
    assert stored_bytes("masked", mask, value_bytes=4).total == 128 * 4 + 128
    assert stored_bytes("structured", mask, value_bytes=4).total == 1 * 5 * 4 + (1 + 5) * 4  # one row, five columns
    assert stored_bytes("dense", torch.ones(3, 3), value_bytes=0.5).total == 5


def test_half_of_the_int8_weights_in_a_bitmap_cost_five_bits_each():
    mask = magnitude_mask(torch.randn(64, 64), 0.5)
    assert stored_bytes("bitmap", mask, value_bytes=1).total * 8 / mask.numel() == 5


@pytest.mark.parametrize("block", [(1, 4), (4, 4), (2, 8)])
def test_occupancy_of_random_masks_follows_its_law(block):
    mask = random_mask((512, 512), 0.9, torch.Generator().manual_seed(0))
    expected = 1 - 0.9 ** (block[0] * block[1])
    assert block_occupancy(mask, block) == pytest.approx(expected, abs=0.02)


def test_random_ninety_percent_sparsity_empties_no_16x16_block():
    mask = random_mask((512, 512), 0.9, torch.Generator().manual_seed(0))
    assert block_occupancy(mask, (16, 16)) == 1.0  # each is kept with probability 1 - 0.9**256


def test_occupancy_of_a_block_mask_is_its_density():
    mask = block_mask(torch.randn(64, 64), 0.75, (8, 8))
    assert block_occupancy(mask, (8, 8)) == 0.25


def test_bad_formats_and_blocks_are_refused():
    with pytest.raises(ValueError, match="'coo' is not one of dense, masked, bitmap, csr, bsr, n_m, structured"):
        stored_bytes("coo", torch.ones(2, 2), value_bytes=1)
    with pytest.raises(ValueError, match="'bsr' needs a block"):
        stored_bytes("bsr", torch.ones(2, 2), value_bytes=1)
    with pytest.raises(ValueError, match=r"block \(3, 3\) does not divide"):
        block_occupancy(torch.ones(4, 4, dtype=torch.bool), (3, 3))
    with pytest.raises(ValueError, match="does not divide"):
        to_bsr(torch.ones(4, 4), (3, 3))
