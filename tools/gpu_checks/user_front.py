"""What modules do in their forward, seen from outside: optimised, they must still do it.

python user_front.py [--device cuda|cpu]

Each case changes something between calls (a shape, a value in a config, state that the module
keeps) or rests on something that a compiler is tempted to burn in. One line each, PASS or FAIL;
exit status 1 after a FAIL. Warnings are allowed: a call may be left to PyTorch, as long as it is
right.
"""

from __future__ import annotations

import sys
import types

import ingot
import torch
from torch import nn
from user_support import Verdicts, arguments, close, quiet

WIDTH, ROWS = 256, 128


class Linear(nn.Module):
    """The common part: one linear layer, and whatever `settle` adds."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.settle()

    def settle(self) -> None:
        pass

    def forward(self, x):
        return torch.relu(self.layer(x)) * 2


class ReadsAShape(Linear):
    def forward(self, x, other):
        return torch.relu(self.layer(x)) * other.shape[1]


class BranchesOnRows(Linear):
    def settle(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        y = self.layer(x)
        return torch.relu(self.norm(y) + 1 if x.size(0) > 1 else y)


class Squeezes(Linear):
    def forward(self, x):
        return torch.relu(self.layer(x)).squeeze() * 2


class ReadsAConfig(Linear):
    def settle(self) -> None:
        self.config = types.SimpleNamespace(scale=2.0)
        self.table = {"shift": [0.5]}

    def forward(self, x):
        return torch.relu(self.layer(x)) * self.config.scale + self.table["shift"][0]


FACTOR = 2.0


class ReadsAGlobal(Linear):
    def forward(self, x):
        return torch.relu(self.layer(x)) * FACTOR


class KeepsState(Linear):
    def settle(self) -> None:
        self.hidden: torch.Tensor | None = None

    def forward(self, x):
        before = 0 if self.hidden is None else self.hidden
        self.hidden = torch.tanh(self.layer(x).mean(0) + before)
        return torch.relu(self.layer(x)) + self.hidden


class ReturnsAFreshTensor(Linear):
    def forward(self, x):
        return torch.relu(self.layer(x)), torch.zeros(WIDTH, device=x.device)


class ClampsToInfinity(Linear):
    def forward(self, x):
        return torch.relu(self.layer(x)).clamp(0, float("inf"))


class ScalesByABuffer(Linear):
    def settle(self) -> None:
        self.requires_grad_(False)
        self.register_buffer("gains", torch.ones(WIDTH, requires_grad=True))

    def forward(self, x):
        return torch.relu(self.layer(x)) * self.gains


class WithoutAWeight(nn.Module):
    """Its weight is made by somebody else, who wants its gradient."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        del self.layer.weight

    def forward(self, x):
        return torch.relu(self.layer(x)) * 2


class Front:
    def __init__(self, device: str) -> None:
        self.device = device
        self.x = torch.randn(ROWS, WIDTH, device=device)

    def twins(self, cls: type, training: bool = False):
        module = cls().to(self.device).train(training)
        return module, ingot.optimize(module)

    # Each returns whether all was well, or that and a remark.

    def shape_of_an_input(self):
        module, ours = self.twins(ReadsAShape)
        return all(
            close(ours(self.x, self.x[:, :n]), module(self.x, self.x[:, :n])) for n in (3, 3, 7, 1)
        )

    def one_row_by_a_branch(self):
        module, ours = self.twins(BranchesOnRows)
        return all(close(ours(self.x[:n]), module(self.x[:n])) for n in (ROWS, 1, 2, ROWS))

    def one_row_squeezed(self):
        module, ours = self.twins(Squeezes)
        return all(close(ours(self.x[:n]), module(self.x[:n])) for n in (ROWS, 1, 2))

    def config_changed(self):
        module, ours = self.twins(ReadsAConfig)
        good = close(ours(self.x), module(self.x)) and close(ours(self.x), module(self.x))
        module.config.scale = 3.0
        good &= close(ours(self.x), module(self.x))
        module.table["shift"][0] = -4.0
        return good and close(ours(self.x), module(self.x))

    def global_changed(self):
        module, ours = self.twins(ReadsAGlobal)
        good = close(ours(self.x), module(self.x)) and close(ours(self.x), module(self.x))
        globals()["FACTOR"] = 5.0
        good &= close(ours(self.x), module(self.x))
        globals()["FACTOR"] = 2.0
        return good

    def state_in_an_attribute(self):
        return self._with_state(None)

    def state_in_a_tensor_attribute(self):
        return self._with_state(torch.zeros(WIDTH, device=self.device))

    def _with_state(self, first):
        module, other = KeepsState().to(self.device), KeepsState().to(self.device)
        other.load_state_dict(module.state_dict())
        module.hidden = other.hidden = first
        ours = ingot.optimize(other)
        return all(close(ours(self.x), module(self.x)) for _ in range(4))

    def fresh_result(self):
        _, ours = self.twins(ReturnsAFreshTensor)
        ours(self.x)[1].add_(5)
        return ours(self.x)[1].abs().sum().item() == 0

    def infinite_bound(self):
        module, ours = self.twins(ClampsToInfinity)
        return close(ours(self.x), module(self.x))

    def default_device(self):
        """Compiled as ever; or a warning says why not."""
        import warnings

        _, ours = self.twins(Linear)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.set_default_device(self.device)
            try:
                ours(self.x)
                ours(self.x)
            finally:
                torch.set_default_device(None)
        return bool(ours.ingot_report()["programs"] or said)

    def gradient_of_a_buffer(self):
        module, ours = self.twins(ScalesByABuffer)
        module.gains.requires_grad_()  # a buffer that was moved without gradients has none
        with torch.enable_grad():
            ours(self.x).sum().backward()
            got = module.gains.grad.clone()
            module.gains.grad = None
            module(self.x).sum().backward()
        return close(got, module.gains.grad)

    def gradient_of_a_generated_weight(self):
        module = WithoutAWeight().to(self.device)
        weight = torch.randn(WIDTH, WIDTH, device=self.device, requires_grad=True)
        module.layer.weight = weight
        ours = ingot.optimize(module)
        with torch.enable_grad():
            return ours(self.x).requires_grad and module(self.x).requires_grad

    def hook_added_later(self):
        module, ours = self.twins(Linear)
        ours(self.x)
        module.layer.register_forward_hook(lambda part, args, result: result + 1)
        return close(ours(self.x), module(self.x))

    def weight_replaced(self):
        module, ours = self.twins(Linear)
        ours(self.x)
        module.layer.weight = nn.Parameter(torch.randn_like(module.layer.weight))
        good = close(ours(self.x), module(self.x))
        module.layer.weight.data = torch.randn_like(module.layer.weight)
        return good and close(ours(self.x), module(self.x))

    def frozen_and_thawed(self):
        """Parameters whose gradients were switched off and on again."""
        module, ours = self.twins(Linear)
        with torch.enable_grad():
            module.requires_grad_(False)
            ours(self.x)
            module.requires_grad_(True)
            ours(self.x).sum().backward()
        return module.layer.weight.grad is not None


CASES = [name for name in vars(Front) if not name.startswith("_") and name != "twins"]


def main() -> int:
    given = arguments(__doc__)
    quiet()
    verdicts, front = Verdicts(), Front(given.device)
    with torch.no_grad():
        for name in CASES:
            verdicts.attempt(name.replace("_", " "), getattr(front, name))
    return verdicts.end()


if __name__ == "__main__":
    sys.exit(main())
