"""Downloads a Hugging Face repository: text files, and safetensors only if weights are wanted.

Before any download, the program asks the hub once for the repository's file names, with a time limit. Without a network
this fails at once, whereas the library would retry for half a minute.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any

from sqrtdk.errors import MissingExtraError, ModelError, kind_and_text
from sqrtdk.models.checkpoint import CONFIG, PICKLES, how_to_convert
from sqrtdk.models.extras import HINT, import_transformers, quiet_hub

REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
TEXT_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]
WEIGHT_FILES = ["model.safetensors", "model-*.safetensors"]
_asked_ahead: dict[tuple[str, str | None], list[str] | None] = {}  # answers to `ask_ahead`


def fetch(model: str, *, revision: str | None = None, weights: bool, trust_remote_code: bool = False) -> Path:
    """Download the files that an audit needs, or find them in the cache, and return their directory.

    `HF_HUB_OFFLINE`, `HF_HOME` and the other settings of huggingface_hub apply. Pickles are never downloaded, and
    Python files only with `trust_remote_code`.

    Raises:
        ModelError: The id is invalid, unknown, gated, offline and not cached, or has no safetensors weights.
        MissingExtraError: transformers (and with it huggingface_hub) is missing.
    """
    import_transformers()
    names = _asked_ahead[model, revision] if (model, revision) in _asked_ahead else ask(model, revision)
    if weights and names is not None:
        _refuse_pickles(names, model)
    files = TEXT_FILES + (WEIGHT_FILES if weights else []) + (["*.py"] if trust_remote_code else [])
    try:
        return _snapshot(model, revision, files, local=names is None)
    except Exception as error:  # huggingface_hub and its HTTP client raise many kinds of errors
        why = f"a model that the cache holds ({type(error).__name__})" if names is None else _why(error)
        raise ModelError(
            f"{model!r} is neither a local directory nor {why}", hint=_hint(model, names is None)
        ) from error


def ask_ahead(model: str, revision: str | None, before: Callable[[], None]) -> None:
    """Ask the hub, and reuse the answer in every later `fetch` of this process, for a program that handles one model.

    See `ask` for the arguments and errors.
    """
    _asked_ahead[model, revision] = ask(model, revision, before)


def ask(model: str, revision: str | None = None, before: Callable[[], None] = lambda: None) -> list[str] | None:
    """Return the names of a repository's files, or None if the hub gives none but the cache has the model.

    Args:
        model: A hub id.
        revision: Branch, tag or commit.
        before: Called before the hub is asked about a model that is not in the cache.

    Raises:
        ModelError: The id is invalid; or the model is not cached and the hub does not have it, can't be reached, or
            does not answer within `HF_HUB_ETAG_TIMEOUT` seconds (10 if unset).
        MissingExtraError: huggingface_hub is missing.
    """
    if not REPO_ID.fullmatch(model) or ".." in model:
        raise ModelError(
            f"{model[:200]!r} is neither a hub id, nor a directory, nor package.module:factory, nor demo[:variant]",
            hint="Give for example gpt2, org/name, ./my-model, my_package.nets:make, or demo.",
        )
    try:
        from huggingface_hub import constants
    except ImportError as error:
        raise MissingExtraError(f"huggingface_hub can't be imported: {error}", hint=HINT) from error
    cached = _is_cached(model, revision)
    if constants.HF_HUB_OFFLINE:
        if cached:
            return None
        raise ModelError(
            f"{model!r} is neither a local directory nor a model in the cache, and the hub is not asked",
            hint=_hint(model, True),
        )
    if not cached:
        before()
    try:
        return _file_names(model, revision, constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:  # huggingface_hub and its HTTP client raise many kinds of errors
        if cached:
            return None
        raise ModelError(
            f"{model!r} is neither a local directory nor {_why(error)}", hint=_hint(model, False)
        ) from error


class _NoAnswerError(TimeoutError):
    """The hub did not answer in time; the error's text is ours and may be shown."""


def _why(error: Exception) -> str:
    """Return the hub's own words, or only the class of a network error, whose text does not help.

    `LocalEntryNotFoundError` counts as a network error: a download whose connection fails raises it.
    """
    from huggingface_hub import errors

    answers = (errors.HfHubHTTPError, errors.HFValidationError)
    if isinstance(error, answers) and not isinstance(error, errors.LocalEntryNotFoundError):
        return f"a model that the hub gives: {kind_and_text(error)}"
    reason = str(error) if isinstance(error, _NoAnswerError) else type(error).__name__
    return f"a model in the cache, and the hub can't be reached ({reason})"


def _file_names(model: str, revision: str | None, seconds: float) -> list[str]:
    """Request the file names in a separate thread, because looking up the host's name has no time limit."""
    from huggingface_hub import HfApi

    answer: Future[list[str]] = Future()

    def request() -> None:
        try:
            repository = HfApi().model_info(model, revision=revision, timeout=seconds)
            answer.set_result([file.rfilename for file in repository.siblings or ()])
        except BaseException as error:
            answer.set_exception(error)

    Thread(target=request, daemon=True).start()  # a request that hangs must not keep the program alive
    try:
        return answer.result(seconds)
    except TimeoutError as error:
        if answer.done():  # the request itself timed out
            raise
        raise _NoAnswerError(f"no answer within {seconds} s (HF_HUB_ETAG_TIMEOUT)") from error


def _is_cached(model: str, revision: str | None) -> bool:
    try:
        return (_snapshot(model, revision, [CONFIG], local=True) / CONFIG).is_file()
    except Exception:  # huggingface_hub has several kinds of errors for a missing entry
        return False


def _snapshot(model: str, revision: str | None, files: list[str], *, local: bool) -> Path:
    import huggingface_hub

    options: dict[str, Any] = {"revision": revision, "local_files_only": local}
    with quiet_hub():
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=files, **options))


def _hint(model: str, offline: bool) -> str:
    here = f"{model!r} does not exist here: check the path."
    if offline:
        return f"{here} HF_HUB_OFFLINE is set: for a hub id unset it, or set HF_HOME to a cache that has the model."
    return f"{here} For a hub id check the revision, your network and, for a gated model, `hf auth login`."


def _refuse_pickles(names: list[str], model: str) -> None:
    """Raise before anything is downloaded if a repository has weights, but none in safetensors."""
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles and not any(name.endswith(".safetensors") for name in names):
        raise ModelError(
            f"the weights of {model!r} are pickled ({pickles[0]!r}): loading a pickle runs the code inside it",
            hint=f"Look for a revision in safetensors, or download them. {how_to_convert(pickles[0])}",
        )
