"""Files that a lane does not import hold none of its tests."""

import pytest
from marked_files import may_match

OF_A_TEST = "@pytest.mark.vllm\ndef test_it(): ..."
OF_THE_FILE = 'pytestmark = pytest.mark.vllm(least="0.31")  # not full'
SEVERAL = "pytestmark = [\n    pytest.mark.verl,\n    pytest.mark.full,\n]\nx = 1"
COMPUTED = "pytest.param(1, marks=[getattr(pytest.mark, name)])"


@pytest.mark.parametrize(
    ("source", "wanted", "expected"),
    [
        ("", "vllm", False),
        ("", "not vllm", True),
        (OF_A_TEST, "vllm and not full", True),
        (OF_A_TEST, "verl", False),
        (OF_A_TEST, "not vllm", True),  # of another test
        (OF_THE_FILE, "vllm", True),
        (OF_THE_FILE, "not vllm and not verl", False),
        (SEVERAL, "verl and not full", False),
        (SEVERAL, "verl", True),
        (SEVERAL, "full or not full", True),
        (SEVERAL + "\n" + OF_A_TEST, "vllm and verl", True),
        ("pytestmark = [pytest.mark.verl]\n" + OF_A_TEST + "\nLIST = [\n]", "verl and not vllm", True),
        (COMPUTED, "sglang", True),
    ],
)
def test_a_file_is_left_out_only_if_no_test_can_match(source, wanted, expected):
    assert may_match(source, wanted) is expected
