"""Find which channels can exchange a scale, by running the model instead of knowing names.

A producer is a norm or a linear layer. Its output channels are doubled, following a binary code of their
number, and every linear layer in the block that sees its input channels doubled after the same code is a
consumer: the code says which producer channel feeds which of its inputs (not one to one if key-value heads
are shared). Doubling is exact in floating point, so the test is equality. An exchange is admitted only if the
block's output stays the same, to the bit, when the producer is divided and all consumers multiplied: a norm
that also feeds a router or a residual fails that.

The model is the architecture with as few layers as hold every kind of layer, random weights, in float32.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flashpatch.errors import PatchError
from flashpatch.patches.fp8.calibration.untrusted import PATCH

if TYPE_CHECKING:
    import torch

_VOCABULARY = 64
_TOKENS = 8


@dataclass(frozen=True)
class Exchange:
    """Name the channels of one producer and of the linear layers that consume them.

    Attributes:
        producer: module name: absolute in a model, relative in a block.
        offset: a norm multiplies by ``offset + weight`` (0 for Llama's, 1 for Gemma's); None for a linear
        layer. consumers: names of linear layers.
        index: for consumers that are not fed one to one, the producer channel of each input channel.
    """

    producer: str
    offset: float | None
    consumers: tuple[str, ...]
    index: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def under(self, prefix: str) -> Exchange:
        """Return the same with ``prefix`` before every name."""
        index = {prefix + name: channels for name, channels in self.index.items()}
        return Exchange(prefix + self.producer, self.offset, tuple(prefix + c for c in self.consumers), index)


Signature = frozenset[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Structure:
    """Hold the exchanges per kind of block.

    Attributes:
        lists: names of the module lists that hold the blocks, such as ``model.layers``.
        kinds: the names and shapes of a block's parameters, to the exchanges in it.
        linear: and to the names of its linear layers.
    """

    lists: tuple[str, ...]
    kinds: dict[Signature, tuple[Exchange, ...]]
    linear: dict[Signature, tuple[str, ...]]

    def blocks(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[Exchange, ...]]:
        """Return, by prefix of every block in a checkpoint, the exchanges in it, with absolute names.

        Raises:
            PatchError: a block has parameters or shapes that no block of the architecture has.
        """
        found: dict[str, set[tuple[str, tuple[int, ...]]]] = {}
        for name, shape in shapes.items():
            for path in self.lists:
                number, _, rest = name.removeprefix(f"{path}.").partition(".")
                if name.startswith(f"{path}.") and number.isdecimal():
                    found.setdefault(f"{path}.{number}.", set()).add((rest, shape))
        result = {}
        for prefix, held in sorted(found.items(), key=lambda item: int(item[0].split(".")[-2])):
            if frozenset(held) not in self.kinds:
                nearest = min(self.kinds, key=lambda kind: len(kind ^ held))
                odd = sorted(prefix + name for name, _ in nearest ^ held)
                raise PatchError(
                    f"{prefix[:-1]} is not like the blocks that its config describes: {', '.join(odd[:4])}.",
                    patch=PATCH,
                    advice="Check that config.json belongs to the weights.",
                )
            result[prefix] = tuple(exchange.under(prefix) for exchange in self.kinds[frozenset(held)])
        if not result:
            raise PatchError(
                f"no tensor lies under {', '.join(self.lists)}.",
                patch=PATCH,
                advice="Check that config.json belongs to the weights.",
            )
        return result


def of_directory(path: Any) -> Structure:
    """Return the structure of the architecture that ``path/config.json`` describes.

    Raises:
        PatchError: transformers does not know it, or it has no blocks that can be examined.
    """
    import torch

    try:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            return of_model(_small(path), _VOCABULARY)
    except PatchError:
        raise
    except Exception as error:
        raise PatchError(
            f"the architecture of {path} cannot be examined ({type(error).__name__}: {str(error)[:200]}).",
            patch=PATCH,
            advice="It must be a causal language model that the installed transformers knows.",
        ) from error


def of_model(model: torch.nn.Module, vocabulary: int) -> Structure:
    """Return the structure of a float32 model whose forward takes ``input_ids`` below ``vocabulary``."""
    import torch

    ids = torch.randint(0, vocabulary, (1, _TOKENS))
    lists = {
        name: m for name, m in model.named_modules() if isinstance(m, torch.nn.ModuleList) and _linears(m)
    }
    lists = {name: m for name, m in lists.items() if not any(name.startswith(f"{outer}.") for outer in lists)}
    kinds: dict[Signature, tuple[Exchange, ...]] = {}
    linear: dict[Signature, tuple[str, ...]] = {}
    for module_list in lists.values():
        for block in module_list:
            call = _Call.of(model, block, ids)
            signature = frozenset((name, tuple(p.shape)) for name, p in block.named_parameters())
            exchanges = tuple(_exchanges(block, call))
            if kinds.setdefault(signature, exchanges) != exchanges:
                raise PatchError(
                    "two blocks with the same parameters use them differently.",
                    patch=PATCH,
                    advice="This architecture cannot be profiled.",
                )
            linear[signature] = tuple(_linears(block))
    if not kinds:
        raise PatchError(
            f"{type(model).__name__} has no list of blocks.",
            patch=PATCH,
            advice="This architecture cannot be profiled.",
        )
    return Structure(tuple(lists), kinds, linear)


@dataclass
class _Call:
    """Hold how a block was called, so that it can be called again alone."""

    args: tuple
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, model: torch.nn.Module, block: torch.nn.Module, ids: torch.Tensor) -> _Call:
        import torch

        seen: list[_Call] = []

        def keep(module, args, kwargs):
            seen.append(cls(args, kwargs))

        handle = block.register_forward_pre_hook(keep, with_kwargs=True)
        try:
            with torch.no_grad():
                model(input_ids=ids, use_cache=False)
        finally:
            handle.remove()
        if len(seen) != 1:
            raise PatchError(
                f"{type(block).__name__} was called {len(seen)} times in one forward.",
                patch=PATCH,
                advice="This architecture cannot be profiled.",
            )
        return seen[0]

    def run(self, block: torch.nn.Module) -> torch.Tensor:
        import torch

        with torch.no_grad():
            out = block(*self.args, **self.kwargs)
        return out[0] if isinstance(out, tuple) else out


def _exchanges(block: torch.nn.Module, call: _Call) -> Iterator[Exchange]:
    import torch

    linears = _linears(block)
    plain = _inputs(block, call, linears)
    reference = call.run(block)
    taken: set[str] = set()
    for name, producer in block.named_modules():
        width = _width(producer)
        if width is None:
            continue
        if not _feeds(block, call, producer, linears, plain):
            continue
        codes = {}  # consumer -> number of the producer channel that feeds each input channel, from 1
        for bit in range(width.bit_length()):
            doubled = torch.tensor([2.0 if number >> bit & 1 else 1.0 for number in range(1, width + 1)])
            with _multiplied(producer, doubled):
                now = _inputs(block, call, linears)
            for consumer, before in plain.items():
                code = _doubled(before, now[consumer])
                if code is None:
                    codes[consumer] = None
                elif codes.setdefault(consumer, 0) is not None:
                    codes[consumer] = codes[consumer] + (code.long() << bit)
        fed = {
            c: code for c, code in codes.items() if code is not None and c != name and bool((code > 0).all())
        }
        fed = {c: code - 1 for c, code in fed.items() if int(code.max()) <= width and c not in taken}
        if not fed or not _is_neutral(block, call, producer, fed, linears, reference):
            continue
        taken |= set(fed)
        one_to_one = torch.arange(width)
        index = {c: tuple(i.tolist()) for c, i in fed.items() if not torch.equal(i, one_to_one)}
        yield Exchange(name, _offset(producer), tuple(fed), index)


def _feeds(block, call, producer, linears, plain) -> bool:
    """Return whether doubling all of the producer doubles the whole input of some linear layer: a first, cheap
    test."""
    import torch

    with _multiplied(producer, torch.tensor(2.0)):
        now = _inputs(block, call, linears)
    return any(torch.equal(now[name], 2 * before) for name, before in plain.items())


def _is_neutral(block, call, producer, fed, linears, reference) -> bool:
    """Return whether moving scales from the producer to the consumers leaves the block's output as it was."""
    import torch

    scale = 2.0 ** torch.randint(-3, 4, (_width(producer),))
    with _multiplied(producer, 1 / scale):
        with _each(_multiplied_input(linears[name], scale[index]) for name, index in fed.items()):
            return torch.equal(call.run(block), reference)


def _width(module: torch.nn.Module) -> int | None:
    """Return the number of output channels of a norm or linear layer; None for anything else."""
    import torch

    if isinstance(module, torch.nn.Linear):
        return module.out_features
    weight = getattr(module, "weight", None)
    if isinstance(weight, torch.nn.Parameter) and weight.dim() == 1 and not list(module.children()):
        return weight.numel()
    return None


def _offset(norm: torch.nn.Module) -> float | None:
    """Return what a norm adds to its weight before it multiplies; None for a linear layer.

    Raises:
        PatchError: its output is not proportional to an offset weight.
    """
    import torch

    if isinstance(norm, torch.nn.Linear):
        return None
    x = torch.randn(4, norm.weight.numel())
    weight, bias = norm.weight.data, getattr(norm, "bias", None)
    shift = 0.0 if bias is None else bias.data
    try:
        outs = []
        for value in (0.0, 1.0, 2.0):
            norm.weight.data = torch.full_like(weight, value)
            with torch.no_grad():
                outs.append(norm(x) - shift)
    finally:
        norm.weight.data = weight
    slope = outs[1] - outs[0]
    offset = float((outs[0] * slope).sum() / (slope * slope).sum())
    if not torch.allclose(outs[2] - outs[1], slope, atol=1e-4) or min(abs(offset), abs(offset - 1)) > 1e-3:
        raise PatchError(
            f"the norm {type(norm).__name__} does not multiply by its weight.",
            patch=PATCH,
            advice="This architecture cannot be profiled.",
        )
    return float(round(offset))


def _linears(module: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    import torch

    return {name: m for name, m in module.named_modules() if isinstance(m, torch.nn.Linear)}


def _inputs(block, call: _Call, linears) -> dict[str, torch.Tensor]:
    """Return the input of every linear layer, as float32 [tokens, channels]; those called not once are left out."""
    seen: dict[str, list[torch.Tensor]] = {}
    handles = [
        module.register_forward_pre_hook(lambda _, args, name=name: seen.setdefault(name, []).append(args[0]))
        for name, module in linears.items()
    ]
    try:
        call.run(block)
    finally:
        for handle in handles:
            handle.remove()
    return {name: x[0].reshape(-1, x[0].shape[-1]) for name, x in seen.items() if len(x) == 1}


def _doubled(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor | None:
    """Return, as bool [channels], which have doubled everywhere, the others being the same; None if neither is so."""
    import torch

    twice, same = (after == 2 * before).all(0), (after == before).all(0)
    undecided = twice & same  # all zero: nothing can be said about such a channel
    return None if bool(undecided.any()) or not bool((twice | same).all()) else torch.as_tensor(twice)


@contextmanager
def _multiplied(module: torch.nn.Module, by: torch.Tensor) -> Iterator[None]:
    handle = module.register_forward_hook(lambda _module, _args, out: out * by)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _multiplied_input(module: torch.nn.Module, by: torch.Tensor) -> Iterator[None]:
    handle = module.register_forward_pre_hook(lambda _module, args: (args[0] * by, *args[1:]))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _each(managers: Iterator) -> Iterator[None]:
    from contextlib import ExitStack

    with ExitStack() as stack:
        for manager in managers:
            stack.enter_context(manager)
        yield


def _small(path: Any) -> torch.nn.Module:
    """Return the architecture with few layers, a small vocabulary, and random float32 weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = copy.deepcopy(AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False))
    text = config.get_text_config()
    if hasattr(text, "quantization_config"):
        del text.quantization_config
    kinds: Sequence[Any] = getattr(text, "layer_types", None) or ["one"]
    count = next(n for n in range(1, len(kinds) + 1) if set(kinds[:n]) == set(kinds))
    text.num_hidden_layers = count
    if getattr(text, "layer_types", None):
        text.layer_types = list(kinds[:count])
    text.vocab_size = _VOCABULARY
    for token in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(text, token, 0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter.data, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter.data, std=parameter.shape[-1] ** -0.5)
    return model
