"""The stand-in operators that verify by sampling, alone: do tokens follow the target's exact distribution?

Seeds are fixed, so a test repeats itself. For seeds drawn anew, right operators would fail each chi-square below with
probability `ALARM`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch")

from chi_square import chance_of_samples  # noqa: E402
from eagle_reference import filtered  # noqa: E402

sampling = pytest.importorskip("sgl_kernel.sampling")
tree = pytest.importorskip("sgl_kernel.tree")

pytestmark = pytest.mark.sglang(least="0.5.21")

ALARM = 1e-4
TIMES, VOCABULARY = 10_000, 7
LARGEST_COIN = 1 - 2**-24

Outcomes = dict[tuple[int, ...], float]


@dataclass
class Drafted:
    """A tree of draft tokens: the parent and the token of each node; node 0 is the root."""

    above: tuple[int, ...]
    tokens: tuple[int, ...]

    def children(self, node: int) -> list[int]:
        return [one for one in range(1, len(self.above)) if self.above[one] == node]

    def links(self) -> tuple[torch.Tensor, torch.Tensor]:
        """First child and next sibling of each node; -1 for none."""
        first, after = torch.full((2, len(self.above)), -1)
        for node in range(len(self.above)):
            numbers = self.children(node)
            if numbers:
                first[node] = numbers[0]
            for one, two in zip(numbers, numbers[1:]):
                after[one] = two
        return first, after


CHAIN = Drafted(above=(0, 0, 1, 2), tokens=(0, 3, 1, 5))
TREE = Drafted(above=(0, 0, 0, 0, 1, 1, 2, 5, 5), tokens=(0, 3, 6, 1, 2, 4, 0, 5, 3))
FULL = pytest.mark.full
SHAPES = pytest.mark.parametrize("drafted", [CHAIN, TREE], ids=["chain", "tree"])


def target(drafted: Drafted, temperature: float = 1.0) -> torch.Tensor:
    """The target's probabilities after each node, [nodes, vocabulary]."""
    noise = torch.Generator().manual_seed(5)
    logits = 1.5 * torch.randn(len(drafted.above), VOCABULARY, generator=noise)
    return (logits / temperature).softmax(-1)


def verify(drafted: Drafted, probs: torch.Tensor, times: int = TIMES, greedy: bool = False, **more: float):
    """Tokens that each of ``times`` requests gets from one verification of the same tree."""
    nodes = len(drafted.above)
    noise = torch.Generator().manual_seed(11)
    first, after = drafted.links()
    predicts = torch.zeros(times * nodes, dtype=torch.int32)
    accepted = torch.full((times, nodes), -1, dtype=torch.int32)
    counts = torch.empty(times, dtype=torch.int32)
    given = (
        torch.tensor(drafted.tokens).expand(times, -1),
        torch.arange(times * nodes).view(times, -1),
        first.expand(times, -1),
        after.expand(times, -1),
    )
    if greedy:
        choices = probs.argmax(-1).expand(times, -1)
        tree.verify_tree_greedy_cpu(predicts, accepted, counts, *given, choices)
    else:
        probs = probs.expand(times, -1, -1)
        coins = torch.rand(times, nodes + 1, generator=noise).clamp(max=LARGEST_COIN)
        sampling.tree_speculative_sampling_target_only_cpu(
            predicts, accepted, counts, *given, coins[:, :nodes], coins[:, nodes], probs, None, **more
        )
    return [tuple(predicts[path[: n + 1].long()].tolist()) for path, n in zip(accepted, counts.tolist())]


def outcomes(drafted: Drafted, probs: torch.Tensor) -> Outcomes:
    """Every result of one verification with its probability, by definition.

    A token drawn from the target goes on where it was drafted, and is the last one where not.
    """

    def walk(node: int, path: tuple[int, ...], mass: float) -> Iterator[tuple[tuple[int, ...], float]]:
        drafts = {drafted.tokens[one]: one for one in drafted.children(node)}
        for token, p in enumerate(probs[node].double().tolist()):
            if token in drafts:
                yield from walk(drafts[token], (*path, token), mass * p)
            else:
                yield (*path, token), mass * p

    found = dict(walk(0, (), 1.0))
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-5)
    return found


@SHAPES
@pytest.mark.parametrize("temperature", [pytest.param(0.4, marks=FULL), 1.0, pytest.param(2.5, marks=FULL)])
def test_tokens_follow_the_target(drafted: Drafted, temperature: float) -> None:
    probs = target(drafted, temperature)
    assert chance_of_samples(verify(drafted, probs), outcomes(drafted, probs)) > ALARM


@SHAPES
@pytest.mark.parametrize(
    ("top_k", "top_p"),
    [pytest.param(3, 1.0, marks=FULL), pytest.param(VOCABULARY, 0.7, marks=FULL), (4, 0.8)],
)
def test_tokens_follow_the_filtered_target(drafted: Drafted, top_k: int, top_p: float) -> None:
    """Some drafts are filtered out, and must never be accepted."""
    probs = target(drafted)
    wanted = torch.tensor([filtered(row, top_k, top_p) for row in probs.double().tolist()])
    assert any(wanted[above, token] == 0 for above, token in list(zip(drafted.above, drafted.tokens))[1:])
    nodes = len(probs)
    given = sampling.top_k_renorm_prob_cpu(probs, torch.full((nodes,), top_k))
    given = sampling.top_p_renorm_prob_cpu(given, torch.full((nodes,), top_p))
    assert torch.allclose(given, wanted.float(), atol=1e-6)
    assert chance_of_samples(verify(drafted, given), outcomes(drafted, wanted)) > ALARM


@SHAPES
@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.5])
def test_greedy_verification_would_be_noticed(drafted: Drafted, temperature: float) -> None:
    probs = target(drafted, temperature)
    seen = verify(drafted, probs, greedy=True)
    assert len(set(seen)) == 1
    assert chance_of_samples(seen, outcomes(drafted, probs)) < 1e-100


@SHAPES
def test_a_last_token_from_the_whole_target_would_be_noticed(
    drafted: Drafted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was rejected must leave the distribution that the last token is drawn from."""
    probs = target(drafted)
    draw = sampling._draw

    def from_whole(left: torch.Tensor, coin: float) -> int:
        """Give the rejected tokens their mass again, whichever node the distribution is of."""
        for row in probs.double():
            same = left > 0
            if torch.allclose(left[same], (row / row.sum())[same]):
                return draw(row, coin)
        raise AssertionError("of no node")

    monkeypatch.setattr(sampling, "_draw", from_whole)
    assert chance_of_samples(verify(drafted, probs), outcomes(drafted, probs)) < 1e-30


@SHAPES
def test_a_greedy_request_in_a_sampled_batch_gets_its_greedy_tokens(drafted: Drafted) -> None:
    """SGLang gives greedy requests top_k 1; equal logits are no reason to differ."""
    probs = target(drafted)
    probs[:, 2] = probs[:, 4] = probs.amax(-1)
    one = sampling.top_k_renorm_prob_cpu(probs, torch.ones(len(probs)))
    assert verify(drafted, one, 50) == verify(drafted, probs, 50, greedy=True)


def test_each_row_has_its_own_filter() -> None:
    row = target(CHAIN)[:1]
    probs, top_ks = row.expand(3, -1), torch.tensor([1, 4, 1 << 30])
    top_ps = torch.tensor([1.0, 0.6, 1.0])
    found = sampling.top_p_renorm_prob_cpu(sampling.top_k_renorm_prob_cpu(probs, top_ks), top_ps)
    values = row[0].double().tolist()
    wanted = [filtered(values, k, p) for k, p in ((1, 2.0), (4, 0.6), (VOCABULARY, 2.0))]
    assert torch.allclose(found, torch.tensor(wanted).float(), atol=1e-6)


@pytest.mark.parametrize("coin", [0.0, LARGEST_COIN])
def test_no_coin_brings_a_token_without_mass(coin: float) -> None:
    """Also where rounding keeps a row's sum away from 1."""
    probs = torch.tensor([[0, 0.7, 0.3 - 1e-6, 0], [0, 0, 1 - 1e-6, 0], [1 - 1e-6, 0, 0, 0]])
    drafted = Drafted(above=(0, 0, 0), tokens=(0, 0, 2))
    first, after = (links[None] for links in drafted.links())
    predicts, accepted = torch.zeros(3, dtype=torch.int32), torch.full((1, 3), -1, dtype=torch.int32)
    count, coins = torch.empty(1, dtype=torch.int32), torch.full((1, 3), coin)
    given = (torch.tensor([drafted.tokens]), torch.arange(3)[None], first, after)
    sampling.tree_speculative_sampling_target_only_cpu(
        predicts, accepted, count, *given, coins, coins[:, 0], probs[None], None
    )
    tokens = predicts[accepted[0, : int(count) + 1].long()].tolist()
    assert tokens == ([2, 0] if coin == 0 else [1])


def test_lower_thresholds_accept_more() -> None:
    """As SGLang documents its options: tokens above the one are accepted, chances are divided by the other."""
    probs = torch.tensor([[0.4, 0.25, 0.35], [1.0, 0, 0]])
    drafted = Drafted(above=(0, 0), tokens=(0, 1))
    assert set(verify(drafted, probs, 200, threshold_single=0.25)) == {(1, 0)}
    seen = verify(drafted, probs, threshold_acc=0.5)
    wanted = {(1, 0): 0.5, (0,): 0.5 * 0.4 / 0.75, (2,): 0.5 * 0.35 / 0.75}
    assert chance_of_samples(seen, wanted) > ALARM
