# Exported from book/13_engine.py by tools/export.py; edit the chapter, not this file.
"""A model's large matrix products on a CPU, from weights laid out for oneDNN once."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Parameter
from torch.nn import functional as F

PACK_FROM = 1 << 18  # weights of a product from which on packing pays
TYPICAL_ROWS = 32  # the batch that the layout is chosen for; others are right too
PROBES = 16  # numbers of a parameter that are compared before each step
ONE_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # as models name them
ONE_AT_A_TIME = threading.RLock()  # a model's layers are the same in all threads


def state_of(parameter: Parameter | None) -> tuple[Any, ...]:
    """What tells whether a parameter is still the one it was, save its numbers."""
    if parameter is None:
        return ()
    return id(parameter), parameter._version, parameter.data_ptr(), parameter.stride()


class PackedProduct:
    """What `layers` compute of one input, as one product with a packed copy of their weights.

    The first layer that is called computes for all, the others take their shares; one that is
    given something else computes its own from its own weight.
    State: `held`, the weights and biases that were copied, and the `states` they were in;
    `looks`, views of a few of their numbers, and `probe`, what was seen; `copy`, `bias`;
    `forwards`, what each layer does instead; `given`, the last input, and `shares` of it.
    """

    def __init__(self, *layers: Linear) -> None:
        self.layers, self.sizes = layers, [layer.out_features for layer in layers]
        self.given: Tensor | None = None
        self.shares: Sequence[Tensor] = ()
        self.forwards = [self.forward_of(place) for place in range(len(layers))]
        self.pack()

    def parameters(self) -> list[Parameter | None]:
        """The weights, then the biases, as the layers have them now."""
        own = [layer._parameters for layer in self.layers]
        return [each.get("weight") for each in own] + [each.get("bias") for each in own]

    def pack(self) -> None:
        """Copy the weights into oneDNN's layout."""
        self.held, count = self.parameters(), len(self.layers)
        self.states = [state_of(parameter) for parameter in self.held]
        data = [parameter.detach() for parameter in self.held if parameter is not None]
        flat = [each.view(-1) for each in data]
        self.looks = [each[:: max(1, len(each) // PROBES)] for each in flat]
        self.probe = bits_of(self.looks)
        self.bias = torch.cat(data[count:]) if data[count:] else None
        self.copy = torch.ops.mkldnn._reorder_linear_weight(torch.cat(data[:count]), TYPICAL_ROWS)

    def untouched(self) -> bool:
        """Whether the parameters are those that were copied, and count no change since."""
        return [state_of(parameter) for parameter in self.parameters()] == self.states

    def renew(self) -> None:
        """Copy again if a parameter is another, or has changed, or shows other numbers.

        Unseen: a change through `.data` of single numbers that are none of those looked at.
        """
        if not (self.untouched() and torch.equal(bits_of(self.looks), self.probe)):
            self.pack()

    def __call__(self, x: Tensor) -> Tensor:
        """The product of x [..., in_features] with all weights, [..., sum of out_features]."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.copy, self.bias, "none", [], ""
        )
        return product

    def forward_of(self, place: int) -> Callable[[Tensor], Tensor]:
        """What the layer at `place` does while its product is packed."""
        if len(self.layers) == 1:
            return self

        def first(x: Tensor) -> Tensor:
            self.given, self.shares = x, torch.split(self(x), self.sizes, -1)
            return self.shares[0]

        def other(x: Tensor) -> Tensor:
            layer = self.layers[place]
            if x is not self.given:
                return F.linear(x, layer.weight, layer.bias)
            return self.shares[place]

        return other if place else first


def bits_of(looks: Sequence[Tensor]) -> Tensor:
    """The numbers of `looks` as int32, so that NaN equals itself."""
    return torch.cat(list(looks)).view(torch.int32)


def can_pack(*layers: Any) -> bool:
    """Whether all are as their class made them, in float32, alike, and large together."""
    if not all(type(layer) is Linear and "forward" not in vars(layer) for layer in layers):
        return False
    found = [p for layer in layers for p in layer._parameters.values() if p is not None]
    plain = all(p.dtype == torch.float32 and p.is_contiguous() for p in found)
    plain &= not any(p.is_inference() or p.device.type != "cpu" for p in found)
    alike = len({(layer.in_features, layer.bias is None) for layer in layers}) == 1
    size = sum(layer.out_features * layer.in_features for layer in layers)
    return plain and alike and len(found) >= len(layers) and size >= PACK_FROM


class PackedProducts:
    """The large products of a model, packed; as many bytes more as their weights have.

    State: `packed`, its PackedProducts, none where PyTorch has no oneDNN, or the weights are
    not in float32 on a CPU; `looks` and `probe`, those of all.  One thread at a time.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.pack()

    def pack(self) -> None:
        """Find the products as the model is now, and copy their weights."""
        able: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        parts = list(self.model.modules()) if able else []
        groups: list[list[Any]] = [
            [getattr(part, name, None) for name in names] for part in parts for names in ONE_INPUT
        ]
        self.packed, done = list[PackedProduct](), set[Linear]()
        for group in [*groups, *([part] for part in parts)]:
            if can_pack(*group) and len({*group} - done) == len(group):
                self.packed.append(PackedProduct(*group))
                done.update(group)
        self.looks = [look for product in self.packed for look in product.looks]
        self.probe = bits_of(self.looks) if self.looks else None

    def renew(self) -> None:
        """Pack again if anything has changed, see `PackedProduct.renew`."""
        if self.probe is not None and not (
            all(product.untouched() for product in self.packed)
            and torch.equal(bits_of(self.looks), self.probe)
        ):
            self.pack()

    @contextmanager
    def on(self) -> Iterator[None]:
        """Within this context the model runs packed products, of weights as they are now."""
        with ONE_AT_A_TIME:
            self.renew()
            pairs = [pair for product in self.packed
                     for pair in zip(product.layers, product.forwards, strict=True)]  # fmt: skip
            before = [vars(layer).get("forward") for layer, _ in pairs]
            for layer, forward in pairs:
                vars(layer)["forward"] = forward
            try:
                yield
            finally:
                for (layer, _), former in zip(pairs, before, strict=True):
                    del vars(layer)["forward"]
                    if former is not None:
                        vars(layer)["forward"] = former
                for product in self.packed:
                    product.given, product.shares = None, ()
