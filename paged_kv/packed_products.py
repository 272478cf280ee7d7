# Exported from book/13_engine.py by tools/export.py; edit the chapter, not this file.
"""A model's large matrix products on a CPU, from weights laid out for oneDNN once."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear

PACK_FROM = 1 << 18  # weights of a layer from which on packing pays
TYPICAL_ROWS = 32  # the batch that the layout is chosen for; others are right too
PROBES = 16  # weights of a layer that are compared before each step


class PackedProduct:
    """What `layer` computes, from a packed copy of its weight.

    State: `weight`, the parameter that was copied; `version`, its count of changes; `probe`, a
    few of its values; `copy`.
    """

    def __init__(self, layer: Linear) -> None:
        self.layer = layer
        self.pack()

    def pack(self) -> None:
        """Copy the weight into oneDNN's layout."""
        self.weight, self.version = self.layer.weight, self.layer.weight._version
        self.probe = self.look().clone()
        data = self.weight.detach()
        self.copy = torch.ops.mkldnn._reorder_linear_weight(data, TYPICAL_ROWS)

    def look(self) -> Tensor:
        """A few values from all over the weight: a view."""
        flat = self.layer.weight.detach().view(-1)
        return flat[:: max(1, len(flat) // PROBES)]

    def renew(self) -> None:
        """Copy again if the weight is another, or has changed, or shows other values.

        Unseen: a change through `.data` of single values that are none of those looked at.
        """
        weight = self.layer.weight
        same = weight is self.weight and weight._version == self.version
        if not (same and torch.equal(self.look(), self.probe)):
            self.pack()

    def __call__(self, x: Tensor) -> Tensor:
        """The product of x [..., in_features], with the weight as it was copied."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.copy, self.layer.bias, "none", [], ""
        )
        return product


class PackedProducts:
    """The large products of a model, packed; as many bytes more as their weights have.

    State: `packed`, one a layer; empty where PyTorch has no oneDNN, or the model is not in
    float32 on a CPU.
    """

    def __init__(self, model: Any) -> None:
        able: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        able &= model.device.type == "cpu"
        layers = [part for part in model.modules() if type(part) is Linear] if able else []
        self.packed = [PackedProduct(layer) for layer in layers if can_pack(layer)]

    @contextmanager
    def on(self) -> Iterator[None]:
        """Within this context the model runs packed products, of weights as they are now."""
        for product in self.packed:
            product.renew()
            product.layer.forward = product  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            for product in self.packed:
                del product.layer.forward


def can_pack(layer: Linear) -> bool:
    """Whether it is large, in float32, as its class made it, and tells of changes."""
    weight, own = layer.weight, "forward" not in vars(layer)
    large = weight.numel() >= PACK_FROM and weight.dtype == torch.float32
    return large and own and not weight.is_inference()
