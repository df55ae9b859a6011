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
from sqrtdk.messages import Message
from sqrtdk.models.checkpoint import CONFIG, PICKLES, how_to_convert
from sqrtdk.models.extras import INSTALL_HINT, import_transformers, quiet_hub

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
    # A stored None is an answer too, namely that only the cache has the model; so `get` would not do.
    names = _asked_ahead[model, revision] if (model, revision) in _asked_ahead else ask(model, revision)
    if weights and names is not None:
        _refuse_pickles(names, model)
    files = TEXT_FILES + (WEIGHT_FILES if weights else []) + (["*.py"] if trust_remote_code else [])
    try:
        return _snapshot(model, revision, files, local=names is None)
    except Exception as error:  # huggingface_hub and its HTTP client raise many kinds of errors
        why = _why(error) if names is not None else Message("errors.model.in_cache", kind=type(error).__name__)
        raise ModelError(
            Message("errors.model.nowhere", model=repr(model), why=why), hint=_hint(model, names is None)
        ) from error


def ask_ahead(model: str, revision: str | None, before: Callable[[], None]) -> None:
    """Ask the hub for a model's files, and reuse the answer in every later `fetch` of this process.

    A program that handles one model calls this first. `ask` describes the arguments and errors.
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
            Message("errors.model.no_name", model=repr(model[:200])),
            hint=Message("errors.hint.model_names"),
        )
    try:
        from huggingface_hub import constants
    except ImportError as error:
        raise MissingExtraError(Message("errors.extras.hub", reason=str(error)), hint=Message(INSTALL_HINT)) from error
    cached = _is_cached(model, revision)
    if constants.HF_HUB_OFFLINE:
        if cached:
            return None
        raise ModelError(
            Message("errors.model.not_cached", model=repr(model)),
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
            Message("errors.model.nowhere", model=repr(model), why=_why(error)), hint=_hint(model, False)
        ) from error


class _NoAnswerError(TimeoutError):
    """The hub did not answer in time; the error's text is ours and may be shown."""


def _why(error: Exception) -> Message:
    """Return the hub's own words, or only the class of a network error, whose text does not help.

    `LocalEntryNotFoundError` counts as a network error: a download whose connection fails raises it.
    """
    from huggingface_hub import errors

    answers = (errors.HfHubHTTPError, errors.HFValidationError)
    if isinstance(error, answers) and not isinstance(error, errors.LocalEntryNotFoundError):
        return Message("errors.model.hub_answer", reason=kind_and_text(error))
    reason = error.args[0] if isinstance(error, _NoAnswerError) else type(error).__name__
    return Message("errors.model.hub_unreachable", reason=reason)


def _file_names(model: str, revision: str | None, seconds: float) -> list[str]:
    """Request the file names in a separate thread, because looking up the host's name has no time limit."""
    from huggingface_hub import HfApi

    answer: Future[list[str]] = Future()

    def request() -> None:
        try:
            repository = HfApi().model_info(model, revision=revision, timeout=seconds)
            answer.set_result([file.rfilename for file in repository.siblings or ()])
        # Whatever the thread raises must reach the caller, who would otherwise wait for the whole time limit.
        except BaseException as error:
            answer.set_exception(error)

    Thread(target=request, daemon=True).start()  # a request that hangs must not keep the program alive
    try:
        return answer.result(seconds)
    except TimeoutError as error:
        if answer.done():  # the request itself timed out
            raise
        raise _NoAnswerError(Message("errors.model.hub_silent", seconds=seconds)) from error


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


def _hint(model: str, offline: bool) -> Message:
    return Message("errors.hint.hub_offline" if offline else "errors.hint.hub", model=repr(model))


def _refuse_pickles(names: list[str], model: str) -> None:
    """Raise before anything is downloaded if a repository has weights, but none in safetensors."""
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles and not any(name.endswith(".safetensors") for name in names):
        raise ModelError(
            Message("errors.weights.pickled_on_hub", model=repr(model), file=repr(pickles[0])),
            hint=Message("errors.hint.look_for_safetensors", convert=how_to_convert(pickles[0])),
        )
