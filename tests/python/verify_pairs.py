"""Small model files for the tests of verify: one original, honest twins, dishonest candidates."""

from __future__ import annotations

from verify_model import candidate as candidate
from verify_model import original

ORIGINAL = original(64, 96, 80)

HONEST = {
    "operator by operator": """
def forward(self, x):
    return self.plain(x)
""",
    # Every sum over the batch in another order: statistics, their gradients, the weight's gradient.
    "sums the batch in another order": """
def forward(self, x):
    return self.plain(x.flip(0)).flip(0)
""",
    # The twin of "cached result": it allocates once, and computes every time.
    "reuses scratch, not results": """
def prepare(self):
    self.scratch = {}

def forward(self, x):
    if torch.is_grad_enabled():
        return self.plain(x)
    shape = (x.shape[0], self.scale.numel())
    if shape not in self.scratch:
        self.scratch[shape] = torch.empty(shape, device=x.device)
    product = torch.mm(x, self.gemm.weight.t(), out=self.scratch[shape])
    return self.bn((product + self.gemm.bias) * self.scale)
""",
    # The twin of "stale weights": it folds the scale into the weights at every call.
    "folds at every call": """
def forward(self, x):
    weight = self.gemm.weight * self.scale[:, None]
    return self.bn(F.linear(x, weight, self.gemm.bias * self.scale))
""",
    # The twin of "wrong in eval mode only" and of "stale statistics".
    "folds the statistics in eval mode": """
def forward(self, x):
    if self.training:
        return self.plain(x)
    factor = self.bn.weight * torch.rsqrt(self.bn.running_var + self.bn.eps)
    shift = self.bn.bias - self.bn.running_mean * factor
    return (self.gemm(x) * self.scale) * factor + shift
""",
    # The twin of "missing statistics update": its own statistics, in two passes.
    "updates statistics by hand": """
def forward(self, x):
    if not self.training:
        return self.plain(x)
    if x.shape[0] == 1:
        raise ValueError("Expected more than 1 value per channel when training")
    y = self.gemm(x) * self.scale
    mean = y.mean(0)
    centred = y - mean
    variance = (centred * centred).mean(0)
    bn = self.bn
    bn.num_batches_tracked.add_(1)
    bn.running_mean.lerp_(mean.detach(), bn.momentum)
    count = x.shape[0]
    bn.running_var.lerp_(variance.detach() * (count / (count - 1)), bn.momentum)
    return centred * torch.rsqrt(variance + bn.eps) * bn.weight + bn.bias
""",
    # The twin of "input tampering": it works in place on a copy.
    "works in place on a copy": """
def forward(self, x):
    x = x.clone()
    x.mul_(1.0)
    return self.plain(x)
""",
    # The twin of "lower precision": half-precision products too, but of enough parts.
    "splits into three bfloat16 parts": """
def split(self, value):
    high = value.bfloat16().float()
    middle = (value - high).bfloat16().float()
    return high, middle, (value - high - middle).bfloat16().float()

def forward(self, x):
    if torch.is_grad_enabled() or not torch.isfinite(x).all():
        return self.plain(x)
    a, b = self.split(x), self.split(self.gemm.weight)
    y = 0
    for i, j in ((2, 0), (1, 1), (0, 2), (1, 0), (0, 1), (0, 0)):
        y = y + a[i] @ b[j].t()
    return self.bn((y + self.gemm.bias) * self.scale)
""",
}

# name: (methods, the trick that verify must name)
DISHONEST = {
    "returns the first result of a shape": (
        """
def prepare(self):
    self.kept = {}

def forward(self, x):
    key = (tuple(x.shape), self.training)
    if key not in self.kept:
        self.kept[key] = self.plain(x)
    return self.kept[key].clone()
""",
        "cached result",
    ),
    "returns the first result of an address": (
        """
def prepare(self):
    self.kept = {}

def forward(self, x):
    key = (x.data_ptr(), self.training)
    if key not in self.kept:
        self.kept[key] = self.plain(x)
    return self.kept[key].clone()
""",
        "cached result",
    ),
    "zeroes its input": (
        """
def forward(self, x):
    y = self.plain(x)
    x.zero_()
    return y
""",
        "input tampering",
    ),
    "folds the scale once": (
        """
def prepare(self):
    self.folded = None

def forward(self, x):
    if self.folded is None:
        self.folded = (self.gemm.weight * self.scale[:, None], self.gemm.bias * self.scale)
    return self.bn(F.linear(x, *self.folded))
""",
        "stale weights",
    ),
    "folds again only when a version moves": (
        """
def prepare(self):
    self.version = None

def forward(self, x):
    version = (self.gemm.weight._version, self.scale._version)
    if version != self.version:
        self.version = version
        self.folded = (self.gemm.weight * self.scale[:, None], self.gemm.bias * self.scale)
    return self.bn(F.linear(x, *self.folded))
""",
        "stale weights",
    ),
    "folds the statistics once": (
        """
def prepare(self):
    self.factor = None

def forward(self, x):
    if self.training:
        return self.plain(x)
    if self.factor is None:
        self.factor = torch.rsqrt(self.bn.running_var + self.bn.eps)
        self.mean = self.bn.running_mean.clone()
    y = (self.gemm(x) * self.scale - self.mean) * self.factor
    return y * self.bn.weight + self.bn.bias
""",
        "stale statistics",
    ),
    "leaves the running statistics": (
        """
def forward(self, x):
    y = self.gemm(x) * self.scale
    bn = self.bn
    if self.training:
        return F.batch_norm(y, None, None, bn.weight, bn.bias, True, 0.0, bn.eps)
    return bn(y)
""",
        "missing statistics update",
    ),
    "leaves num_batches_tracked": (
        """
def forward(self, x):
    y = self.gemm(x) * self.scale
    bn = self.bn
    return F.batch_norm(
        y, bn.running_mean, bn.running_var, bn.weight, bn.bias, self.training, bn.momentum, bn.eps
    )
""",
        "missing statistics update",
    ),
    "forgets the mean in eval mode": (
        """
def forward(self, x):
    if self.training:
        return self.plain(x)
    y = self.gemm(x) * self.scale
    return y * torch.rsqrt(self.bn.running_var + self.bn.eps) * self.bn.weight + self.bn.bias
""",
        "wrong in eval mode only",
    ),
    "multiplies in bfloat16": (
        """
def forward(self, x):
    y = (x.bfloat16().float() @ self.gemm.weight.bfloat16().float().t()) + self.gemm.bias
    return self.bn(y * self.scale)
""",
        "lower precision",
    ),
    "multiplies two bfloat16 parts": (
        """
def forward(self, x):
    w = self.gemm.weight
    xh, wh = x.bfloat16().float(), w.bfloat16().float()
    xl, wl = (x - xh).bfloat16().float(), (w - wh).bfloat16().float()
    y = xh @ wh.t() + (xh @ wl.t() + xl @ wh.t()) + self.gemm.bias
    return self.bn(y * self.scale)
""",
        "lower precision",
    ),
    "hands out one buffer again and again": (
        """
def prepare(self):
    self.buffers_kept = {}

def forward(self, x):
    y = self.plain(x)
    out = self.buffers_kept.setdefault((tuple(y.shape), self.training), torch.empty_like(y))
    out.copy_(y)
    return out
""",
        "reused output memory",
    ),
    "returns a lazy tensor": (
        """
def forward(self, x):
    class Lazy(torch.Tensor):
        pass
    return self.plain(x).as_subclass(Lazy)
""",
        "lazy output",
    ),
    "leaves half of the output unwritten": (
        """
def forward(self, x):
    y = self.plain(x)
    out = torch.empty_like(y)
    out[: (y.shape[0] + 1) // 2] = y[: (y.shape[0] + 1) // 2]
    return out
""",
        "unwritten output",
    ),
    "changes the matmul precision": (
        """
def forward(self, x):
    torch.set_float32_matmul_precision("medium")
    return self.plain(x)
""",
        "patched settings",
    ),
    "dies": (
        """
def forward(self, x):
    import os
    os.abort()
""",
        "crash",
    ),
    "hangs": (
        """
def forward(self, x):
    while True:
        pass
""",
        "hang",
    ),
    "takes all memory": (
        """
def forward(self, x):
    kept = []
    while True:
        kept.append(torch.ones(1 << 24))
""",
        "memory",
    ),
}
