"""Bring a Hugging Face repository to a local directory: text files first, safetensors only when they are wanted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sqrtdk.errors import ModelError, kind_and_text
from sqrtdk.models.checkpoint import PICKLES
from sqrtdk.models.extras import import_transformers, quiet_transformers

REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
TEXT_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]
WEIGHT_FILES = ["model.safetensors", "model-*.safetensors"]


def fetch(model: str, *, revision: str | None = None, weights: bool, trust_remote_code: bool = False) -> Path:
    """Download what an audit needs of a hub repository, or find it in the cache, and return its directory.

    `HF_HUB_OFFLINE`, `HF_HOME` and the other settings of huggingface_hub hold. No pickle is ever downloaded, and
    Python files only with `trust_remote_code`.

    Raises:
        ModelError: Not an id, unknown, gated, offline and not cached, or without safetensors weights.
        MissingExtraError: transformers (and with it huggingface_hub) is missing.
    """
    import_transformers()
    import huggingface_hub
    from huggingface_hub import constants

    if not REPO_ID.fullmatch(model) or ".." in model:
        raise ModelError(
            f"{model[:200]!r} is neither a hub id, nor a directory, nor package.module:factory, nor demo[:variant]",
            hint="Give for example gpt2, org/name, ./my-model, my_package.nets:make, or demo.",
        )
    code = ["*.py"] if trust_remote_code else []
    options: dict[str, Any] = {"revision": revision}
    try:
        with quiet_transformers():
            if weights and not constants.HF_HUB_OFFLINE:
                _refuse_pickles(huggingface_hub.HfApi().list_repo_files(model, revision=revision), model)
            directory = huggingface_hub.snapshot_download(model, allow_patterns=TEXT_FILES + code, **options)
            if weights:
                directory = huggingface_hub.snapshot_download(
                    model, allow_patterns=TEXT_FILES + WEIGHT_FILES + code, **options
                )
    except ModelError:
        raise
    except Exception as error:  # huggingface_hub and its HTTP client raise many kinds
        offline = constants.HF_HUB_OFFLINE
        hint = (
            "HF_HUB_OFFLINE is set: unset it, set HF_HOME to a cache that has the model, or give a local directory."
            if offline
            else "Check the id, the revision, your network and, for a gated model, `hf auth login`."
        )
        raise ModelError(
            f"{model!r} is neither a local directory nor a model that the hub gives: {kind_and_text(error)}",
            hint=hint,
        ) from error
    return Path(directory)


def _refuse_pickles(names: list[str], model: str) -> None:
    """Refuse before anything is downloaded when a repository holds weights, but none in safetensors."""
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles and not any(name.endswith(".safetensors") for name in names):
        raise ModelError(
            f"the weights of {model!r} are pickled ({pickles[0]!r}): loading a pickle runs the code inside it",
            hint="Look for a revision in safetensors, or pass --static to audit the config without weights.",
        )
