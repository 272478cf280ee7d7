# Exported from book/13_engine.py by tools/export.py; edit the chapter, not this file.
"""A model's large matrix products on a CPU, from weights laid out for oneDNN once."""

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


class PackedProduct:
    """What `layers` compute of one input, as one product with a packed copy of their weights.

    The first layer that is called computes for all, the others take their shares; one that is
    given something else computes its own from its own weight.
    State: `held`, the weights and biases that were copied, their `versions` and `places`;
    `looks`, views of a few of their numbers, and `probe`, what was seen; `copy`, `bias`;
    `forwards`, what each layer does instead; `given`, the last input, and `shares` of it.
    """

    def __init__(self, *layers: Linear) -> None:
        self.layers, self.sizes = layers, [layer.out_features for layer in layers]
        self.given: Tensor | None = None
        self.shares: Sequence[Tensor] = ()
        self.forwards = [self.forward_of(place) for place in range(len(layers))]
        self.pack()

    def parameters(self) -> list[Parameter]:
        """The weights, then the biases, as the layers have them now."""
        own = [layer._parameters for layer in self.layers]
        found = [each["weight"] for each in own] + [each["bias"] for each in own]
        return [parameter for parameter in found if parameter is not None]

    def pack(self) -> None:
        """Copy the weights into oneDNN's layout."""
        self.held = self.parameters()
        self.versions = [parameter._version for parameter in self.held]
        self.places = [parameter.data_ptr() for parameter in self.held]
        flat = [parameter.detach().view(-1) for parameter in self.held]
        self.looks = [each[:: max(1, len(each) // PROBES)] for each in flat]
        self.probe = torch.cat(self.looks)
        count = len(self.layers)
        weight = torch.cat([parameter.detach() for parameter in self.held[:count]])
        self.bias = torch.cat(flat[count:]) if flat[count:] else None
        self.copy = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS)

    def untouched(self) -> bool:
        """Whether the parameters are those that were copied, and count no change since."""
        for parameter, held, version, place in zip(
            self.parameters(), self.held, self.versions, self.places, strict=True
        ):
            if parameter is not held or parameter._version != version:
                return False
            if parameter.data_ptr() != place:
                return False
        return True

    def renew(self) -> None:
        """Copy again if a parameter is another, or has changed, or shows other numbers.

        Unseen: a change through `.data` of single numbers that are none of those looked at.
        """
        if not (self.untouched() and torch.equal(torch.cat(self.looks), self.probe)):
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


def can_pack(*layers: Any) -> bool:
    """Whether all are as their class made them, in float32, alike, and large together."""
    if not all(type(layer) is Linear and "forward" not in vars(layer) for layer in layers):
        return False
    weights = [layer.weight for layer in layers]
    plain = all(w.dtype == torch.float32 and not w.is_inference() for w in weights)
    alike = len({(layer.in_features, layer.bias is None) for layer in layers}) == 1
    return plain and alike and sum(w.numel() for w in weights) >= PACK_FROM


class PackedProducts:
    """The large products of a model, packed; as many bytes more as their weights have.

    State: `packed`, its PackedProducts, none where PyTorch has no oneDNN, or the model is not
    in float32 on a CPU; `looks` and `probe`, those of all.
    """

    def __init__(self, model: Any) -> None:
        able: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        parts = list(model.modules()) if able and model.device.type == "cpu" else []
        groups: list[list[Any]] = [
            [getattr(part, name, None) for name in names] for part in parts for names in ONE_INPUT
        ]
        self.packed = [PackedProduct(*group) for group in groups if can_pack(*group)]
        done = {layer for product in self.packed for layer in product.layers}
        self.packed += [PackedProduct(p) for p in parts if p not in done and can_pack(p)]
        self.looks = [look for product in self.packed for look in product.looks]
        self.probe = torch.cat(self.looks) if self.looks else None

    def renew(self) -> None:
        """Copy again what has changed, see `PackedProduct.renew`."""
        if self.probe is None or (
            all(product.untouched() for product in self.packed)
            and torch.equal(torch.cat(self.looks), self.probe)
        ):
            return
        for product in self.packed:
            product.renew()
        self.looks = [look for product in self.packed for look in product.looks]
        self.probe = torch.cat(self.looks)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Within this context the model runs packed products, of weights as they are now."""
        self.renew()
        for product in self.packed:
            for layer, forward in zip(product.layers, product.forwards, strict=True):
                vars(layer)["forward"] = forward
        try:
            yield
        finally:
            for product in self.packed:
                product.given, product.shares = None, ()
                for layer in product.layers:
                    del vars(layer)["forward"]
