"""Networks that no library builds, as people write them: plain modules for these checks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Recurrent(nn.Module):
    """A language model over nn.LSTM or nn.GRU."""

    def __init__(self, kind: type, words: int, width: int, layers: int):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.cells = kind(width, width, layers, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words)

    def forward(self, tokens):
        hidden, _ = self.cells(self.embed(tokens))
        return self.head(self.norm(hidden))


def _double(inner: int, outer: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inner, outer, 3, padding=1, bias=False),
        nn.BatchNorm2d(outer),
        nn.ReLU(inplace=True),
        nn.Conv2d(outer, outer, 3, padding=1, bias=False),
        nn.BatchNorm2d(outer),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    def __init__(self, channels: int, depth: int, classes: int = 2):
        super().__init__()
        widths = [channels * 2**i for i in range(depth + 1)]
        self.first = _double(3, widths[0])
        self.down = nn.ModuleList(_double(a, b) for a, b in zip(widths, widths[1:]))
        pairs = list(zip(widths, widths[1:]))[::-1]
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairs)
        self.joined = nn.ModuleList(_double(2 * a, a) for a, _ in pairs)
        self.last = nn.Conv2d(channels, classes, 1)

    def forward(self, image):
        kept = [self.first(image)]
        for block in self.down:
            kept.append(block(F.max_pool2d(kept[-1], 2)))
        y = kept.pop()
        for up, joined in zip(self.up, self.joined):
            y = joined(torch.cat([kept.pop(), up(y)], dim=1))
        return self.last(y)


class _Denoising(nn.Module):
    """A residual block that is told the time: group norms, SiLU, and a shift by channel."""

    def __init__(self, inner: int, outer: int, times: int):
        super().__init__()
        self.norms = nn.ModuleList((nn.GroupNorm(8, inner), nn.GroupNorm(8, outer)))
        self.first, self.second = (nn.Conv2d(n, outer, 3, padding=1) for n in (inner, outer))
        self.shift = nn.Linear(times, outer)
        self.aside = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def forward(self, x, time):
        y = self.first(F.silu(self.norms[0](x)))
        y = y + self.shift(F.silu(time))[:, :, None, None]
        return self.aside(x) + self.second(F.silu(self.norms[1](y)))


class Diffusion(nn.Module):
    """What diffusion models denoise images with: a U-Net of such blocks, attention at its foot."""

    def __init__(self, channels: int, depth: int, times: int):
        super().__init__()
        widths = [channels * 2**i for i in range(depth + 1)]
        pairs = list(zip(widths, widths[1:]))
        self.first, self.last = nn.Conv2d(4, channels, 3, padding=1), nn.Conv2d(channels, 4, 1)
        self.down = nn.ModuleList(_Denoising(a, a, times) for a, _ in pairs)
        self.shrink = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in pairs)
        self.foot = nn.ModuleList(_Denoising(widths[-1], widths[-1], times) for _ in range(2))
        self.norm = nn.GroupNorm(8, widths[-1])
        self.attend = nn.MultiheadAttention(widths[-1], 4, batch_first=True)
        self.grow = nn.ModuleList(nn.Conv2d(b, a, 3, padding=1) for a, b in pairs[::-1])
        self.up = nn.ModuleList(_Denoising(2 * a, a, times) for a, _ in pairs[::-1])
        self.end = nn.GroupNorm(8, channels)

    def forward(self, image, time):
        x, kept = self.first(image), []
        for block, shrink in zip(self.down, self.shrink):
            kept.append(block(x, time))
            x = shrink(kept[-1])
        x = self.foot[0](x, time)
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        x = x + self.attend(tokens, tokens, tokens, need_weights=False)[0].mT.reshape(x.shape)
        x = self.foot[1](x, time)
        for grow, block in zip(self.grow, self.up):
            x = grow(F.interpolate(x, scale_factor=2.0))
            x = block(torch.cat([kept.pop(), x], dim=1), time)
        return self.last(F.silu(self.end(x)))


class Autoencoder(nn.Module):
    """Of vectors: GELU between layers, a sigmoid at the end."""

    def __init__(self, features: int, widths: tuple):
        super().__init__()
        sizes = [features, *widths]
        layers: list = []
        for a, b in [*zip(sizes, sizes[1:]), *zip(sizes[:0:-1], sizes[-2::-1])]:
            layers += [nn.Linear(a, b), nn.GELU()]
        self.layers = nn.Sequential(*layers[:-1], nn.Sigmoid())

    def forward(self, x):
        return self.layers(x)


class ConvolutionalVAE(nn.Module):
    """Gives the image and both halves of the code; the noise is an input."""

    def __init__(self, channels: int, side: int, code: int):
        super().__init__()
        c, self.side = channels, side // 8
        self.encoder = nn.Sequential(
            nn.Conv2d(3, c, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(c, 2 * c, 4, 2, 1),
            nn.BatchNorm2d(2 * c),
            nn.LeakyReLU(0.2),
            nn.Conv2d(2 * c, 4 * c, 4, 2, 1),
            nn.BatchNorm2d(4 * c),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
        )
        self.code = nn.Linear(4 * c * self.side**2, 2 * code)
        self.widen = nn.Linear(code, 4 * c * self.side**2)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(4 * c, 2 * c, 4, 2, 1),
            nn.BatchNorm2d(2 * c),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * c, c, 4, 2, 1),
            nn.BatchNorm2d(c),
            nn.ReLU(),
            nn.ConvTranspose2d(c, 3, 4, 2, 1),
            nn.Tanh(),
        )

    def forward(self, image, noise):
        mean, log_variance = self.code(self.encoder(image)).chunk(2, dim=1)
        code = mean + noise * torch.exp(0.5 * log_variance)
        planes = self.widen(code).unflatten(1, (-1, self.side, self.side))
        return self.decoder(planes), mean, log_variance


class DLRM(nn.Module):
    """Recommendation: dense features, embedding bags, and the products of all pairs."""

    def __init__(self, rows: int, tables: int, width: int, dense: int, bottom: tuple, top: tuple):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = self._perceptron([dense, *bottom, width])
        pairs = (tables + 1) * tables // 2
        self.top = self._perceptron([pairs + width, *top, 1])
        lower = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("rows", lower[0], persistent=False)
        self.register_buffer("columns", lower[1], persistent=False)

    @staticmethod
    def _perceptron(sizes: list) -> nn.Sequential:
        layers: list = []
        for a, b in zip(sizes, sizes[1:]):
            layers += [nn.Linear(a, b), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    def forward(self, dense, sparse):
        x = F.relu(self.bottom(dense))
        each = [x, *(table(sparse[:, i]) for i, table in enumerate(self.tables))]
        vectors = torch.stack(each, dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        pairs = products[:, self.rows, self.columns]
        return torch.sigmoid(self.top(torch.cat([x, pairs], dim=1))).squeeze(1)


class WaveNet(nn.Module):
    """Dilated causal convolutions with gates, residuals and skips."""

    def __init__(self, channels: int, layers: int, cycles: int, classes: int = 256):
        super().__init__()
        self.first = nn.Conv1d(1, channels, 1)
        self.dilations = [2**i for i in range(layers)] * cycles
        self.gates = nn.ModuleList(
            nn.Conv1d(channels, 2 * channels, 2, dilation=d) for d in self.dilations
        )
        self.mixers = nn.ModuleList(nn.Conv1d(channels, 2 * channels, 1) for _ in self.dilations)
        self.last = nn.Sequential(
            nn.ReLU(), nn.Conv1d(channels, channels, 1), nn.ReLU(), nn.Conv1d(channels, classes, 1)
        )

    def forward(self, wave):
        x = self.first(wave)
        skips = 0
        for dilation, gate, mixer in zip(self.dilations, self.gates, self.mixers):
            value, switch = gate(F.pad(x, (dilation, 0))).chunk(2, dim=1)
            residual, skip = mixer(torch.tanh(value) * torch.sigmoid(switch)).chunk(2, dim=1)
            x, skips = x + residual, skips + skip
        return self.last(skips)


class PointNet(nn.Module):
    def __init__(self, widths: tuple, classes: int = 40):
        super().__init__()
        sizes = [3, *widths]
        self.points = nn.ModuleList(
            nn.Sequential(nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU())
            for a, b in zip(sizes, sizes[1:])
        )
        w = widths[-1]
        self.head = nn.Sequential(
            nn.Linear(w, w // 2),
            nn.BatchNorm1d(w // 2),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(w // 2, classes),
        )

    def forward(self, cloud):
        x = cloud.transpose(1, 2)
        for layer in self.points:
            x = layer(x)
        return F.log_softmax(self.head(x.max(dim=2).values), dim=-1)


class GIN(nn.Module):
    """Graph isomorphism network: messages are sums over edges, then a perceptron of each node."""

    def __init__(self, features: int, width: int, layers: int, classes: int = 10):
        super().__init__()
        self.eps = nn.Parameter(torch.zeros(layers))
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(features if i == 0 else width, width),
                nn.BatchNorm1d(width),
                nn.ReLU(),
                nn.Linear(width, width),
                nn.ReLU(),
            )
            for i in range(layers)
        )
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes))

    def forward(self, x, edges):
        for i, block in enumerate(self.blocks):
            messages = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
            x = block((1 + self.eps[i]) * x + messages)
        return self.head(x)


class GCN(nn.Module):
    """Graph convolutions by a dense, normalised adjacency."""

    def __init__(self, features: int, width: int, classes: int, layers: int):
        super().__init__()
        sizes = [features, *[width] * (layers - 1), classes]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))

    def forward(self, adjacency, x):
        for layer in self.layers[:-1]:
            x = F.relu(adjacency @ layer(x))
        return F.log_softmax(adjacency @ self.layers[-1](x), dim=-1)


class Mamba(nn.Module):
    """Selective state spaces, the scan as a loop over positions."""

    def __init__(self, words: int, width: int, layers: int, state: int = 16):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(MambaBlock(width, state) for _ in range(layers))
        self.norm = nn.RMSNorm(width)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return F.linear(self.norm(x), self.embed.weight)


class MambaBlock(nn.Module):
    def __init__(self, width: int, state: int):
        super().__init__()
        inner, self.rank, self.state = 2 * width, max(1, width // 16), state
        self.norm = nn.RMSNorm(width)
        self.enter = nn.Linear(width, 2 * inner, bias=False)
        self.convolution = nn.Conv1d(inner, inner, 4, padding=3, groups=inner)
        self.select = nn.Linear(inner, self.rank + 2 * state, bias=False)
        self.step = nn.Linear(self.rank, inner)
        self.decay = nn.Parameter(torch.arange(1.0, state + 1).log().repeat(inner, 1))
        self.skip = nn.Parameter(torch.ones(inner))
        self.leave = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        value, gate = self.enter(self.norm(x)).chunk(2, dim=-1)
        mixed = self.convolution(value.transpose(1, 2))[..., : x.shape[1]]
        value = F.silu(mixed.transpose(1, 2))
        step, into, out = self.select(value).split([self.rank, self.state, self.state], dim=-1)
        step = F.softplus(self.step(step))
        kept = torch.exp(-step.unsqueeze(-1) * torch.exp(self.decay))
        added = (step * value).unsqueeze(-1) * into.unsqueeze(2)
        state, outputs = torch.zeros_like(added[:, 0]), []
        for t in range(x.shape[1]):
            state = kept[:, t] * state + added[:, t]
            outputs.append((state * out[:, t].unsqueeze(1)).sum(-1))
        y = torch.stack(outputs, dim=1) + value * self.skip
        return self.leave(y * F.silu(gate))


class Perceptron(nn.Module):
    """Of tables: residual layers, each of which adds to what the next one normalises."""

    def __init__(
        self,
        features: int,
        width: int,
        layers: int,
        norm: type = nn.LayerNorm,
        activation: type = nn.GELU,
    ):
        super().__init__()
        self.enter = nn.Linear(features, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(norm(width), nn.Linear(width, width), activation()) for _ in range(layers)
        )
        self.leave = nn.Linear(width, 1)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return self.leave(x)


class Translator(nn.Module):
    """nn.Transformer with a causal target."""

    def __init__(self, words: int, width: int, heads: int, layers: int):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.transformer = nn.Transformer(
            width, heads, layers, layers, 4 * width, dropout=0.1, batch_first=True
        )
        self.head = nn.Linear(width, words)

    def forward(self, source, target):
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], target.device)
        mask = mask.to(self.embed.weight.dtype)
        y = self.transformer(
            self.embed(source), self.embed(target), tgt_mask=mask, tgt_is_causal=True
        )
        return self.head(y)


class CausalEncoder(nn.Module):
    """A language model over nn.TransformerEncoder, tokens in front, as PyTorch's tutorial calls it:
    by a causal mask, without saying that it is one."""

    def __init__(self, words: int, width: int, heads: int, layers: int, longest: int = 512):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.places = nn.Parameter(torch.randn(longest, 1, width) * 0.02)
        self.drop = nn.Dropout(0.1)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.1)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, words)

    def forward(self, tokens):
        length, width = len(tokens), self.embed.embedding_dim
        x = self.drop(self.embed(tokens) * width**0.5 + self.places[:length])
        mask = nn.Transformer.generate_square_subsequent_mask(length, tokens.device)
        return self.head(self.encoder(x, mask.to(x.dtype)))
