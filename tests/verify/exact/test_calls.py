"""What a norm is given: its values, or their sum with the residual that it adds them to."""

import pytest

torch = pytest.importorskip("torch")

from flashpatch.verify.exact.calls import recorded  # noqa: E402  needs torch


class FusedNorm(torch.nn.Module):
    """Adds, as most engines' do."""

    def forward(self, x, residual):
        residual += x
        return residual / 2, residual


class CarryingNorm(torch.nn.Module):
    """Hands the residual on, as Cohere's does."""

    def forward(self, x, residual):
        return x / 2, residual


@pytest.mark.parametrize(("kind", "factor"), [(FusedNorm, 4), (CarryingNorm, 1)])
def test_a_residual_counts_where_it_is_added(kind: type, factor: int) -> None:
    model, x = torch.nn.Sequential(kind()), torch.arange(1.0, 7.0).reshape(3, 2)
    with recorded(model) as calls:
        model[0](x.clone(), 3 * x)
    assert torch.equal(calls[0].given, factor * x)


def test_nothing_added_is_a_sum_too() -> None:
    model, residual = torch.nn.Sequential(FusedNorm()), torch.ones(3, 2)
    with recorded(model) as calls:
        model[0](torch.zeros(3, 2), residual.clone())
    assert torch.equal(calls[0].given, residual)
