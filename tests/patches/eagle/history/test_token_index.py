"""Predictions from earlier occurrences of a text's last tokens."""

import random

from flashpatch.patches.eagle.history.token_index import LONGEST_MATCH, MOST_OCCURRENCES, TokenIndex


def _index(*texts: list[int], order: int = 2, capacity: int = 10_000) -> TokenIndex:
    index = TokenIndex(order, capacity)
    for text in texts:
        index.extend(text, 0)
    return index


def test_the_continuation_of_an_earlier_occurrence_is_predicted_and_nothing_else():
    index = _index([1, 2, 3, 4, 5, 6])
    guesses = index.predict([9, 2, 3], most=8)
    assert [guess.token for guess in guesses] == [4, 5, 6]
    assert [guess.match for guess in guesses] == [2, 3, 4]
    assert {(guess.votes, guess.total) for guess in guesses} == {(1, 1)}
    index = _index([1, 2, 3, 4])
    assert index.predict([2, 1], most=4) == []
    assert index.predict([3], most=4) == []  # shorter than the order
    assert index.predict([3, 4], most=4) == []  # what follows is not known yet
    assert TokenIndex(2, 10).predict([1, 2], most=4) == []


def test_the_majority_decides_and_of_equals_the_newest():
    index = _index([1, 2, 3, 7], [1, 2, 4, 8], [1, 2, 3, 9])
    guesses = index.predict([1, 2], most=2)
    assert [(guess.token, guess.votes, guess.total) for guess in guesses] == [(3, 2, 3), (9, 1, 2)]


def test_a_text_that_grows_is_found_while_it_grows():
    text = [1, 2, 3]
    index = _index(text)
    text += [1, 2]
    index.extend(text, 3)
    assert [guess.token for guess in index.predict(text, most=8)] == [3, 1, 2]


def test_the_last_occurrences_are_kept():
    texts = [[1, 2, 100 + number] for number in range(3 * MOST_OCCURRENCES)]
    index = _index(*texts)
    [guess] = index.predict([1, 2], most=1)
    assert guess.token == texts[-1][2] and guess.total == MOST_OCCURRENCES


def test_memory_is_bounded_and_the_part_before_is_still_searched():
    index = TokenIndex(2, capacity=1000)
    for number in range(50):
        index.extend([number, *range(1000, 1100)], 0)
        assert len(index) <= 2 * 1101
    index = TokenIndex(2, capacity=10)
    index.extend([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 0)
    index.extend([11, 12, 13], 0)  # begins a part
    assert index.predict([1, 2], most=1)[0].token == 3
    index.extend(list(range(20, 30)), 0)
    index.extend([50, 51], 0)  # drops the first
    assert index.predict([1, 2], most=1) == [] and index.predict([20, 21], most=1)[0].token == 22


def test_against_a_search_through_all_texts():
    random.seed(3)
    for _ in range(200):
        texts = [[random.randrange(4) for _ in range(12)] for _ in range(2)]
        index = _index(*texts)
        asked = [random.randrange(4) for _ in range(5)]
        matches = []
        for text in texts:
            for place in range(2, len(text)):
                match = 0
                while (
                    match < min(place, len(asked), LONGEST_MATCH)
                    and text[place - 1 - match] == asked[-1 - match]
                ):
                    match += 1
                if match >= 2:
                    matches.append((match, text[place]))
        found = index.predict(asked, most=1)
        assert bool(found) == bool(matches)
        if matches:
            longest = max(match for match, _ in matches)
            votes = [token for match, token in matches if match == longest]
            [guess] = found
            assert (guess.match, guess.total) == (longest, len(votes))
            assert guess.votes == votes.count(guess.token) == max(map(votes.count, votes))
