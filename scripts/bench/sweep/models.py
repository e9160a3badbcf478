"""The architectures of transformers and timm: their names, small models of them, and inputs."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sweep.configs import VOCABULARY, small_config

CALLS = 4
"""Different inputs for each model; the seed of an input is its number."""

TOKENS = 10
MAX_PARAMETERS = 40_000_000
TIMM_PARAMETERS = 120_000_000

SIZES = (
    *("test_", "atto", "femto", "pico", "nano", "zepto", "xxs", "xs", "tiny", "_t_", "micro", "mini", "small", "_s"),
    *("_b0", "_050", "_18", "_50"),
)
"""Parts of names of small models, smallest first."""


class UnbuildableError(Exception):
    """A model that the sweep cannot build, or that fails under plain python; the message says why."""


def names_of(library: str) -> list[str]:
    """The architectures of a library: text models of transformers, the smallest model of each family of timm."""
    return _text_models() if library == "transformers" else _timm_models()


def _text_models() -> list[str]:
    from transformers.models.auto import modeling_auto as auto

    tables = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM")
    text = {name for table in tables for name in getattr(auto, f"MODEL_FOR_{table}_MAPPING_NAMES")}
    return sorted(text & set(auto.MODEL_MAPPING_NAMES))


def _timm_models() -> list[str]:
    timm = import_timm()
    families = {module: timm.list_models(module=module) for module in timm.list_modules()}
    return sorted({smallest(names) for names in families.values() if names})


def smallest(names: Iterable[str]) -> str:
    """The name that promises the smallest model: by the words of SIZES, then the shortest."""

    def rank(name: str) -> tuple[int, int, str]:
        return next((place for place, word in enumerate(SIZES) if word in f"{name}_"), len(SIZES)), len(name), name

    return min(names, key=rank)


def import_timm() -> Any:
    """The module timm. Effect: declares operators of torchvision, whose build for CUDA cannot load its own."""
    if not _libraries:
        library = torch.library.Library("torchvision", "FRAGMENT")
        _libraries.append(library)
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import timm

    return timm


_libraries: list[Any] = []
"""Kept alive: an operator disappears with its library."""


def build(library: str, name: str) -> nn.Module:
    """A small model in eval mode. Raises: UnbuildableError."""
    try:
        model = _build_text(name) if library == "transformers" else _build_timm(name)
    except UnbuildableError:
        raise
    except Exception as error:
        raise UnbuildableError(f"cannot be built: {first_line(error)}") from error
    return model.eval()


def _build_text(name: str) -> nn.Module:
    from transformers import AutoConfig, AutoModel
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[name] if name in CONFIG_MAPPING else type(AutoConfig.for_model(name))
    config = small_config(config_class, name)
    with torch.device("meta"):
        _check_size(AutoModel.from_config(config), MAX_PARAMETERS)
    torch.manual_seed(0)
    return AutoModel.from_config(config)


def _build_timm(name: str) -> nn.Module:
    timm = import_timm()
    with torch.device("meta"):
        _check_size(timm.create_model(name), TIMM_PARAMETERS)
    torch.manual_seed(0)
    return timm.create_model(name)


def _check_size(model: nn.Module, limit: int) -> None:
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > limit:
        raise UnbuildableError(f"not small: {count / 1e6:.0f} million parameters")


def inputs_of(library: str, model: nn.Module, number: int, *, cache: bool) -> dict[str, Any]:
    """The keyword arguments of the call `number`; the images of timm have the name `x`, or that of the model."""
    torch.manual_seed(number)
    parameters = inspect.signature(model.forward).parameters
    if library == "timm":
        size = getattr(model, "pretrained_cfg", {}).get("input_size", (3, 224, 224))
        return {next(iter(parameters)): torch.randn(1, *size)}
    return _text_inputs(parameters, cache=cache)


def _text_inputs(parameters: Mapping[str, object], *, cache: bool) -> dict[str, Any]:
    values: dict[str, Any] = {"input_ids": torch.randint(4, VOCABULARY, (2, TOKENS))}
    if "attention_mask" in parameters:
        values["attention_mask"] = torch.ones(2, TOKENS, dtype=torch.long)
    if "decoder_input_ids" in parameters:
        values["decoder_input_ids"] = torch.randint(4, VOCABULARY, (2, TOKENS - 2))
    if "bbox" in parameters:
        values["bbox"] = torch.zeros(2, TOKENS, 4, dtype=torch.long)
    if "use_cache" in parameters:
        values["use_cache"] = cache
    return values


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors of a result, in order: those of mappings, sequences and caches of keys and values too."""
    if isinstance(value, Tensor):
        return [value.detach()]
    if isinstance(value, Mapping):
        return [tensor for each in value.values() for tensor in tensors_in(each)]
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in tensors_in(each)]
    return [tensor for each in _cached(value) for tensor in tensors_in(each)]


def _cached(value: Any) -> list[object]:
    """What a cache of transformers holds: two caches, or keys and values of its layers; nothing for other objects."""
    pair = [getattr(value, f"{name}_attention_cache", None) for name in ("self", "cross")]
    layers = getattr(value, "layers", None) if not any(pair) else None
    if isinstance(layers, list):
        return [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
    return [each for each in pair if each is not None]


def first_line(error: BaseException) -> str:
    """Type and first line of an error, at most 160 characters."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:160]
