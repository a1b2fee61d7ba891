"""Networks as torchvision, timm and transformers build them, and some of our own: each with its
inputs, at a real size, and at a small one for CPUs, with fewer blocks of the same kinds. All are
randomly initialised."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import own_networks as own
import torch
from torch import nn


@dataclass(frozen=True)
class Network:
    """build(small) and inputs(small) make it; `library` must be importable for that, "" is none.
    Inputs are a tuple, or a dictionary of keywords."""

    name: str
    library: str
    build: Callable[[bool], nn.Module]
    inputs: Callable[[bool], tuple | dict]

    def missing(self) -> str:
        if not self.library or importlib.util.find_spec(self.library):
            return ""
        return f"{self.library} is not here"


# Inputs ------------------------------------------------------------------------------------------


def images(batch: int, side: int, small_side: int = 64, small_batch: int = 4) -> Callable:
    def make(small: bool) -> tuple:
        rows, size = (small_batch, small_side) if small else (batch, side)
        return (torch.randn(rows, 3, size, size),)

    return make


def tokens(batch: int, length: int, words: int, small_length: int = 16, count: int = 1) -> Callable:
    def make(small: bool) -> tuple:
        rows, size = (2, small_length) if small else (batch, length)
        return tuple(torch.randint(0, 100 if small else words, (rows, size)) for _ in range(count))

    return make


def sentences(batch: int, length: int, words: int) -> Callable:
    def make(small: bool) -> dict:
        names = ("input_ids", "decoder_input_ids")
        return dict(zip(names, tokens(batch, length, words, count=2)(small)))

    return make


def normal(large: tuple, small: tuple) -> Callable:
    """large, small: the shapes of all inputs."""

    def make(is_small: bool) -> tuple:
        return tuple(torch.randn(*shape) for shape in (small if is_small else large))

    return make


# Builders ----------------------------------------------------------------------------------------


def vision(name: str, small: Callable | None = None, **options) -> Network:
    """small(torchvision.models): the small network, where the real one would take too long."""
    side, small_side = options.pop("side", 224), options.pop("small_side", 64)
    batch = options.pop("batch", 32)

    def build(is_small: bool) -> nn.Module:
        from torchvision import models

        if is_small and small:
            return small(models)
        return getattr(models, name)(weights=None, **options)

    return Network(name, "torchvision", build, images(batch, side, small_side))


def few_resnet_blocks(models, **options) -> nn.Module:
    return models.ResNet(models.resnet.Bottleneck, [2, 1, 1, 1], num_classes=10, **options)


def narrow_classifier(models, name: str) -> nn.Module:
    """As it is, but for the classifier, which holds nearly all weights."""
    made = getattr(models, name)(weights=None)
    inner = next(part.in_features for part in made.classifier if isinstance(part, nn.Linear))
    layers = [nn.Linear(inner, 32), nn.ReLU(True), nn.Dropout(), nn.Linear(32, 10)]
    made.classifier = nn.Sequential(*layers)
    return made


def few_mobile_blocks(models) -> nn.Module:
    blocks = [[1, 16, 1, 1], [6, 24, 2, 2], [6, 32, 2, 2]]
    return models.MobileNetV2(10, inverted_residual_setting=blocks)


def few_convnext_blocks(models) -> nn.Module:
    settings = ((24, 48, 2), (48, 96, 2), (96, None, 1))
    return models.ConvNeXt([models.convnext.CNBlockConfig(*s) for s in settings], 0.1)


_SWIN_SMALL = ([4, 4], 48, [2, 2], [2, 4], [4, 4])


def few_swin_blocks(models) -> nn.Module:
    return models.SwinTransformer(*_SWIN_SMALL, stochastic_depth_prob=0.2)


def few_swin_v2_blocks(models) -> nn.Module:
    parts = models.swin_transformer
    second = {
        "block": parts.SwinTransformerBlockV2,
        "downsample_layer": parts.PatchMergingV2,
    }
    return models.SwinTransformer(*_SWIN_SMALL, stochastic_depth_prob=0.2, **second)


def inception(small: bool) -> nn.Module:
    import torchvision

    # The head beside the trunk asks for planes that small images do not have.
    return torchvision.models.inception_v3(weights=None, init_weights=False, aux_logits=not small)


def googlenet(small: bool) -> nn.Module:
    import torchvision

    return torchvision.models.googlenet(weights=None, init_weights=False, aux_logits=not small)


def vit(small: bool) -> nn.Module:
    import torchvision

    if not small:
        return torchvision.models.vit_b_16(weights=None)
    return torchvision.models.VisionTransformer(64, 16, 3, 3, 96, 192)


def timm_model(name: str, small: dict, batch: int = 32) -> Network:
    def build(is_small: bool) -> nn.Module:
        import timm

        return timm.create_model(name, pretrained=False, **(small if is_small else {}))

    return Network(name, "timm", build, images(batch, 224))


def mixer(small: bool) -> nn.Module:
    import timm

    if small:
        return timm.models.mlp_mixer.MlpMixer(10, 64, num_blocks=2, embed_dim=96)
    return timm.create_model("mixer_b16_224", pretrained=False)


def gated_mixer(small: bool) -> nn.Module:
    import timm

    if not small:
        return timm.create_model("gmlp_s16_224", pretrained=False)
    parts = timm.models.mlp_mixer
    blocks = {"block_layer": parts.SpatialGatingBlock, "mlp_layer": parts.GatedMlp}
    return parts.MlpMixer(10, 64, num_blocks=2, embed_dim=96, mlp_ratio=6, **blocks)


def convmixer(small: bool) -> nn.Module:
    from timm.models.convmixer import ConvMixer

    if small:
        return ConvMixer(48, 2, kernel_size=5, patch_size=7, num_classes=10)
    return ConvMixer(768, 32, kernel_size=7, patch_size=7, act_layer=nn.ReLU)


def language(name: str, model: str, config: str, real: dict, small: dict, inputs: Callable):
    """A model of transformers without a cache of keys and values."""

    def build(is_small: bool) -> nn.Module:
        import transformers

        settings = {"use_cache": False, **real, **(small if is_small else {})}
        return getattr(transformers, model)(getattr(transformers, config)(**settings))

    return Network(name, "transformers", build, inputs)


def plain(name: str, build: Callable, inputs: Callable) -> Network:
    return Network(name, "", build, inputs)


_LLAMA = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
_BERT_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 100,
}


def recommender(small: bool) -> nn.Module:
    if small:
        return own.DLRM(100, 5, 16, 13, (32, 24), (48, 24))
    return own.DLRM(100_000, 26, 128, 13, (512, 256), (1024, 1024, 512, 256))


def recommender_inputs(small: bool) -> tuple:
    rows, tables, words = (8, 5, 100) if small else (8192, 26, 100_000)
    return torch.randn(rows, 13), torch.randint(0, words, (rows, tables, 4))


def graph_inputs(small: bool) -> tuple:
    nodes, edges, features = (40, 160, 16) if small else (20_000, 200_000, 128)
    return torch.randn(nodes, features), torch.randint(0, nodes, (2, edges))


def dense_graph_inputs(small: bool) -> tuple:
    nodes, features = (40, 24) if small else (4096, 1024)
    adjacency = (torch.rand(nodes, nodes) < 8 / nodes).float() + torch.eye(nodes)
    return adjacency / adjacency.sum(1, keepdim=True), torch.randn(nodes, features)


NETWORKS: tuple[Network, ...] = (
    vision("resnet50", few_resnet_blocks),
    vision("alexnet", lambda models: narrow_classifier(models, "alexnet"), batch=128),
    vision("vgg16", lambda models: narrow_classifier(models, "vgg11")),
    vision("densenet121", lambda models: models.DenseNet(16, (2, 2, 2), 32)),
    vision("mobilenet_v2", few_mobile_blocks, batch=64),
    vision("mobilenet_v3_large", lambda models: models.mobilenet_v3_small(), batch=64),
    vision("efficientnet_b0"),
    Network("inception_v3", "torchvision", inception, images(32, 299, 96)),
    Network("googlenet", "torchvision", googlenet, images(32, 224)),
    vision("squeezenet1_1", batch=64),
    vision("shufflenet_v2_x1_0", batch=64),
    vision(
        "resnext50_32x4d", lambda models: few_resnet_blocks(models, groups=32, width_per_group=4)
    ),
    vision("regnet_y_8gf", lambda models: models.regnet_y_400mf()),
    vision("convnext_tiny", few_convnext_blocks),
    Network("vit_b_16", "torchvision", vit, images(32, 224)),
    vision("swin_t", few_swin_blocks),
    vision("swin_v2_t", few_swin_v2_blocks, side=256),
    timm_model("maxvit_tiny_rw_224", {"img_size": 64, "depths": (1, 1), "embed_dim": (32, 64)}),
    Network("mixer_b16_224", "timm", mixer, images(32, 224)),
    timm_model("deit_small_patch16_224", {"img_size": 64, "depth": 2}),
    Network("gmlp_s16_224", "timm", gated_mixer, images(32, 224)),
    Network("convmixer", "timm", convmixer, images(16, 224)),
    language("bert_base", "BertModel", "BertConfig", {}, _BERT_SMALL, tokens(16, 256, 30000)),
    language(
        "timesformer",
        "TimesformerModel",
        "TimesformerConfig",
        {},
        {
            "image_size": 32,
            "patch_size": 8,
            "num_frames": 4,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
        },
        normal(((4, 8, 3, 224, 224),), ((2, 4, 3, 32, 32),)),
    ),
    language(
        "gpt2",
        "GPT2LMHeadModel",
        "GPT2Config",
        {},
        {"n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 100},
        tokens(8, 512, 50000),
    ),
    language(
        "llama",
        "LlamaForCausalLM",
        "LlamaConfig",
        _LLAMA,
        {**_BERT_SMALL, "num_key_value_heads": 2},
        tokens(8, 512, 32000),
    ),
    language(
        "t5_small",
        "T5Model",
        "T5Config",
        {"num_layers": 6},
        {
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 128,
            "num_heads": 4,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "vocab_size": 100,
        },
        sentences(16, 256, 32000),
    ),
    plain(
        "lstm",
        lambda small: own.Recurrent(nn.LSTM, *((100, 32, 2) if small else (10_000, 1024, 2))),
        tokens(64, 64, 10_000),
    ),
    plain(
        "gru",
        lambda small: own.Recurrent(nn.GRU, *((100, 32, 2) if small else (10_000, 1024, 2))),
        tokens(64, 64, 10_000),
    ),
    plain(
        "unet",
        lambda small: own.UNet(*((8, 3) if small else (64, 4))),
        images(8, 256, 32, 2),
    ),
    plain(
        "diffusion",
        lambda small: own.Diffusion(*((16, 2, 24) if small else (128, 3, 512))),
        normal(((16, 4, 64, 64), (16, 512)), ((2, 4, 16, 16), (2, 24))),
    ),
    plain(
        "autoencoder",
        lambda small: own.Autoencoder(*((48, (32, 16, 8)) if small else (4096, (2048, 1024, 256)))),
        normal(((4096, 4096),), ((12, 48),)),
    ),
    plain(
        "vae",
        lambda small: own.ConvolutionalVAE(*((8, 32, 16) if small else (64, 64, 256))),
        normal(((256, 3, 64, 64), (256, 256)), ((6, 3, 32, 32), (6, 16))),
    ),
    plain("dlrm", recommender, recommender_inputs),
    plain(
        "wavenet",
        lambda small: own.WaveNet(*((8, 5, 1) if small else (128, 10, 3))),
        normal(((8, 1, 8192),), ((2, 1, 64),)),
    ),
    plain(
        "pointnet",
        lambda small: own.PointNet((16, 32, 64) if small else (64, 128, 1024)),
        normal(((64, 2048, 3),), ((6, 40, 3),)),
    ),
    plain(
        "gin",
        lambda small: own.GIN(*((16, 24, 3) if small else (128, 512, 5))),
        graph_inputs,
    ),
    plain(
        "gcn",
        lambda small: own.GCN(*((24, 32, 7, 3) if small else (1024, 512, 64, 4))),
        dense_graph_inputs,
    ),
    plain(
        "mamba",
        lambda small: own.Mamba(*((100, 16, 1) if small else (10_000, 512, 4))),
        tokens(8, 64, 10_000, small_length=6),
    ),
    plain(
        "perceptron",
        lambda small: own.Perceptron(*((24, 32, 4) if small else (256, 1024, 50))),
        normal(((4096, 256),), ((10, 24),)),
    ),
    plain(
        "translator",
        lambda small: own.Translator(*((100, 32, 4, 2) if small else (10_000, 512, 8, 6))),
        tokens(32, 128, 10_000, count=2),
    ),
    plain(
        "causal_encoder",
        lambda small: own.CausalEncoder(*((100, 32, 4, 2) if small else (10_000, 512, 8, 6))),
        tokens(128, 32, 10_000),
    ),
)


def named(name: str) -> Network:
    return next(network for network in NETWORKS if network.name == name)
