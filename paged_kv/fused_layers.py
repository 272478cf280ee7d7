# Exported from book/14_at_full_speed.py by tools/export.py; edit the chapter, not this file.
"""Fewer, larger operations: products with one input merged, small ones fused by torch.compile."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch.nn import Linear, Parameter
from torch.nn import functional as F
from transformers import AttentionInterface

from paged_kv.guest_attention import HOST_NAME, host_attention
from paged_kv.guest_check import Probe, largest
from paged_kv.hf_adapter import PagedModel

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Siblings:
    """Linear layers that are given the same input, as one product.

    The first one called computes all and keeps the others' shares until they are called.  A
    sibling called with another input computes its own, so the model stays usable by itself.
    State: `parts`, whose weights are now views of `weight`, [sum of out_features, in_features].
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts, self.sizes = list(parts), [part.out_features for part in parts]
        self.weight = torch.cat([part.weight.detach() for part in parts])
        self.bias: Tensor | None = None
        if parts[0].bias is not None:
            self.bias = torch.cat([part.bias.detach() for part in parts])
        self.given: Tensor | None = None
        self.shares: Sequence[Tensor] = ()
        for place, own in enumerate(torch.split(self.weight, self.sizes)):
            parts[place].weight = Parameter(own, requires_grad=False)
            parts[place].forward = self.forward_of(place)

    def forward_of(self, place: int) -> Callable[[Tensor], Tensor]:
        """What the sibling at `place` does from now on."""

        def first(x: Tensor) -> Tensor:
            self.given = x
            self.shares = torch.split(F.linear(x, self.weight, self.bias), self.sizes, -1)
            return self.shares[0]

        def other(x: Tensor) -> Tensor:
            if not torch.compiler.is_compiling() and x is not self.given:
                return F.linear(x, self.parts[place].weight, self.parts[place].bias)
            return self.shares[place]

        return other if place else first

    def part_again(self) -> None:
        """Let each compute its own again; the weights stay together in memory."""
        self.given, self.shares = None, ()
        for part in self.parts:
            del part.forward


def merge_siblings(model: Any) -> list[Siblings]:
    """Merge the products that `SIBLINGS` names, wherever a module of `model` has them all."""
    merged = []
    for module in model.modules():
        for names in SIBLINGS:
            parts: list[Any] = [getattr(module, name, None) for name in names]
            if all(type(p) is Linear and "forward" not in vars(p) for p in parts):
                if len({p.bias is None for p in parts}) == 1:
                    merged.append(Siblings(parts))
    return merged


def decoder_layers(model: Any) -> list[Any]:
    """The layers of `model`: its list of modules that is as long as its config says."""
    lists = [part for part in model.modules() if isinstance(part, torch.nn.ModuleList)]
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    return next((list(part) for part in lists if len(part) == count), [])


def compiled_call(layer: Any) -> Any:
    """What `layer` would do when called, if it were compiled; it is not."""
    layer.compile(dynamic=True)
    call, layer._compiled_call_impl = layer._compiled_call_impl, None
    return call


@cache
def opaque_attention() -> Any:
    """`host_attention`, into which torch.compile does not look."""
    hidden: Any = torch.compiler.disable(host_attention)  # type: ignore[no-untyped-call]
    return hidden


class FusedLayers:
    """A guest's layers with merged products, and all that lies between them and attention fused.

    State
        moved   how far the logits of the check at load moved; None if the model does not
                compile, or they moved by more than that check allows: then nothing is fused.
    Outside of `on` the model is what it was, save that products stay merged.
    """

    def __init__(self, guest: PagedModel) -> None:
        self.layers, self.moved = decoder_layers(guest.model), None
        self.calls: list[Any] = []
        with torch.inference_mode():
            plain = Probe(guest.model, guest.attention).hosted()
        merged = merge_siblings(guest.model)
        self.calls = [compiled_call(layer) for layer in self.layers]
        with torch.inference_mode():
            try:
                with self.on():
                    fused = Probe(guest.model, guest.attention).hosted()
                apart = [a - b for a, b in zip(fused, plain, strict=True)]
                moved = largest(apart, guest.model.dtype)
            except Exception:  # a compiler of so many parts fails in more ways than can be named
                moved = float("inf")
        if moved <= guest.report.tolerance:
            self.moved = moved
            return
        self.calls = []
        for siblings in merged:
            siblings.part_again()

    @contextmanager
    def on(self) -> Iterator[None]:
        """Within this context the layers run fused."""
        if self.calls:
            AttentionInterface.register(HOST_NAME, opaque_attention())
        for layer, call in zip(self.layers, self.calls, strict=False):
            layer._compiled_call_impl = call
        try:
            with dynamo_config.patch(recompile_limit=64):
                yield
        finally:
            for layer in self.layers:
                layer._compiled_call_impl = None
