"""RaggedLayout's arithmetic on small rows, checked by hand."""

from __future__ import annotations

from noria.kernels.layout import RaggedLayout


def test_rows_are_flattened_with_their_slots() -> None:
    layout = RaggedLayout.build([(5, 1, [7, 2]), (2, 3, [1, 9])], decode_rows=1, block_size=4)
    assert layout.query_start.tolist() == [0, 1, 4]
    assert layout.kv_lens.tolist() == [6, 5]
    assert layout.block_table.tolist() == [[7, 2], [1, 9]]
    assert layout.slot_mapping.tolist() == [2 * 4 + 1, 1 * 4 + 2, 1 * 4 + 3, 9 * 4 + 0]
    assert layout.num_rows == 2 and layout.decode_rows == 1


def test_shorter_rows_are_padded_in_the_block_table_only() -> None:
    layout = RaggedLayout.build([(0, 1, [3]), (8, 1, [1, 2, 4])], decode_rows=2, block_size=4)
    assert layout.block_table.tolist() == [[3, 0, 0], [1, 2, 4]]
    assert layout.slot_mapping.tolist() == [12, 16]


def test_no_rows_make_an_empty_layout() -> None:
    layout = RaggedLayout.build([], decode_rows=0, block_size=16)
    assert layout.num_rows == 0 and layout.query_start.tolist() == [0] and layout.slot_mapping.shape == (0,)


def test_groups_of_layers_have_blocks_side_by_side_and_holes_are_not_read() -> None:
    rows = [(9, 1, [-1, 5, 2, 6, 3, 7]), (0, 3, [1, 8])]  # two groups; the first one's first page went back
    layout = RaggedLayout.build(rows, decode_rows=1, block_size=4, num_groups=2)
    assert layout.of(0) is layout and layout.query_start.tolist() == [0, 1, 4]
    assert layout.block_table.tolist() == [[0, 2, 3], [1, 0, 0]]
    assert layout.slot_mapping.tolist() == [3 * 4 + 1, 4, 5, 6]
    other = layout.of(1)
    assert other.block_table.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert other.slot_mapping.tolist() == [7 * 4 + 1, 32, 33, 34] and other.kv_lens is layout.kv_lens
