"""Sequences are found in the rows of a padded batch, whatever follows them."""

import torch

from sparrow_trl.monitor.sequences import MonitoredSequence, match_rows


def sequence(prompt, completion):
    k = torch.zeros(len(completion), 2)
    return MonitoredSequence([*prompt, *completion], len(prompt), k.long(), k)


def batch(rows, prompt_width=4, width=6):
    """`(prompt, completion)` rows, padded on both sides with token 1, which is a token of some rows too."""
    ids, mask = [], []
    for prompt, completion in rows:
        left, right = prompt_width - len(prompt), width - len(completion)
        ids.append([1] * left + prompt + completion + [1] * right)
        mask.append([0] * left + [1] * (len(prompt) + len(completion)) + [0] * right)
    return torch.tensor(ids), torch.tensor(mask), width


def test_each_sequence_finds_its_row():
    rows = [([1, 2], [3, 4]), ([2], [3, 4, 5]), ([1, 2], [3, 5]), ([1, 2, 3], [4])]
    sequences = [sequence(*rows[2]), sequence(*rows[0]), sequence(*rows[3])]
    assert match_rows(sequences, *batch(rows)) == [0, 2, 3]
    assert [s.row for s in sequences] == [2, 0, 3]  # rows 0 and 3 differ in nothing but where the prompt ends
    assert [s.row_prompt_length for s in sequences] == [2, 2, 3]


def test_equal_rows_are_shared_out():
    rows = [([2], [3, 4])] * 3
    sequences = [sequence(*rows[0]) for _ in range(2)]
    match_rows(sequences, *batch(rows))
    assert {s.row for s in sequences} == {0, 1}


def test_turns_of_a_tool_are_found_in_the_row_of_their_completion():
    rows = [([2, 3], [9]), ([2, 3], [4, 5, 6, 7, 8])]
    first, second = sequence([2, 3], [4, 5]), sequence([2, 3, 4, 5, 6], [7, 8, 9])  # 6 is the tool's, 9 was cut off
    assert match_rows([first, second], *batch(rows)) == [1]
    assert (first.row, second.row, second.row_prompt_length) == (1, 1, 2)


def test_what_is_in_no_row_has_none():
    rows = [([2, 3], []), ([2, 3], [4])]  # the completion of the first is masked
    gone = sequence([2, 3], [5])
    assert match_rows([gone], *batch(rows)) == []
    assert gone.row is None
    assert match_rows([], *batch(rows)) == []
