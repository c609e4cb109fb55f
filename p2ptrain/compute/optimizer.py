"""The optimizers that ``optimizer.name`` chooses. All work on flat arrays (``compute.flat``).

Muon (Jordan et al., https://kellerjordan.github.io/posts/muon, ``torch.optim.Muon``) updates each matrix of the hidden
layers by its momentum, whose singular values a Newton-Schulz iteration makes about equal. Its updates are scaled to the
size of AdamW's (arXiv 2502.16982), so both use one learning rate and one weight decay. AdamW updates the rest: the
embeddings, the output layer, norms, biases, and stacks of matrices, such as those of experts. A matrix has one array of
momentum, instead of two moments. The iteration needs whole matrices, so it cannot update the rows of a shard.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from p2ptrain.compute.device import flushed_denormals, one_thread
from p2ptrain.compute.flat import FlatAdamW, FlatModel, OptimizerSpec, trained_parameters


class FlatMuon(FlatAdamW):
    """Muon for the matrices of hidden layers, AdamW for the rest. ``state`` has the momentum of the former, one after
    the other, and the moments of the latter."""

    def __init__(
        self, flat: FlatModel, spec: OptimizerSpec, parameters: Tensor | None = None, *, keeps: bool = True
    ) -> None:
        names, parameters = hidden_matrices(flat.model), flat.parameters if parameters is None else parameters
        matrices = [segment for segment in flat.segments if len(segment.shape) >= 2]
        rest = [slice(item.offset, item.offset + item.numel) for item in matrices if item.name not in names]
        super().__init__(flat, spec, parameters, keeps=keeps, matrices=rest)
        hidden = [segment for segment in matrices if segment.name in names]
        views = [
            self._updated(*(flat.view(array, item.name) for array in (parameters, self._clipped))) for item in hidden
        ]
        sizes = [segment.numel for segment in hidden]
        self.state["momentum_buffer"] = parameters.new_zeros(sum(sizes))
        muon = torch.optim.Muon(
            [{"params": views, "decays": True}], lr=spec.lr, momentum=spec.momentum, adjust_lr_fn="match_rms_adamw"
        )
        for view, momentum in zip(views, torch.split(self.state["momentum_buffer"], sizes), strict=True):
            muon.state[view] = {"momentum_buffer": momentum.view(view.shape)}
        self._optimizers.append(muon)


class FlatSgd:
    """Stochastic gradient descent without momentum, so without a state. Matrices decay as with AdamW."""

    def __init__(
        self, flat: FlatModel, spec: OptimizerSpec, parameters: Tensor | None = None, *, keeps: bool = True
    ) -> None:
        self._parameters = flat.parameters if parameters is None else parameters
        self._decayed_numel = flat.decayed_numel
        self.state: dict[str, Tensor] = {}

    def apply(self, gradients: Tensor, *, step: int, lr: float, scale: float, weight_decay: float) -> None:
        with one_thread(), flushed_denormals():  # as ``FlatAdamW``
            self._parameters[: self._decayed_numel].mul_(1 - lr * weight_decay)
            torch.add(self._parameters, gradients, alpha=-lr * scale, out=self._parameters)

    def reset(self) -> None:
        """Does nothing: there is no state."""


FlatOptimizer = FlatAdamW | FlatSgd
OPTIMIZERS: dict[str, type[FlatOptimizer]] = {"adamw": FlatAdamW, "muon": FlatMuon, "sgd": FlatSgd}


def make_optimizer(
    flat: FlatModel, spec: OptimizerSpec, parameters: Tensor | None = None, *, keeps: bool = True
) -> FlatOptimizer:
    """The optimizer that ``spec`` names. Arguments as of ``FlatAdamW``."""
    return OPTIMIZERS[spec.name](flat, spec, parameters, keeps=keeps)


def hidden_matrices(model: nn.Module) -> set[str]:
    """Names of the parameters that train and that Muon updates."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    others = (module for module in model.modules() if isinstance(module, nn.Embedding) or module is head)
    apart = {id(parameter) for module in others for parameter in module.parameters()}
    named = trained_parameters(model).items()
    return {name for name, parameter in named if parameter.ndim == 2 and id(parameter) not in apart}
