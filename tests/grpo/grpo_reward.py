"""A reward with something to learn from the first step on: the share of digits in an answer."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return sum(letter.isdigit() for letter in solution_str) / max(len(solution_str), 1)
