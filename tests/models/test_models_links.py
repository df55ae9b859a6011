"""What a name in a model directory leads to: its own files, those of its hub cache, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
from transformers import AutoModelForCausalLM

from sqrtdk._check import check
from sqrtdk.errors import ModelError
from sqrtdk.models.load import resolve_model
from sqrtdk.models.options import LoadOptions
from sqrtdk.models.parameters import count_parameters
from tests.hf.families import FAMILIES


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    AutoModelForCausalLM.from_config(FAMILIES["llama"]()).save_pretrained(path)
    return path


@pytest.fixture
def model(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("root:x:0:0\n")
    return path


READ = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "tekken.json",
    "chat_template.jinja",
    "additional_chat_templates/tools.jinja",
    "processor_config.json",
    "preprocessor_config.json",
    "adapter_config.json",
    "modeling_own.py",
    "of no known name",
]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", READ)
def test_a_link_out_of_the_directory_is_refused_unread(model: Path, secret: Path, name: str, static: bool) -> None:
    link = model / name
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(secret)
    with pytest.raises(ModelError, match="is a symbolic link out of the model's directory") as caught:
        check(str(model), static=static)
    assert repr(name) in str(caught.value)
    assert repr(str(secret)) in str(caught.value)
    assert "root:x" not in str(caught.value) + caught.value.hint


def relative(link: Path, secret: Path) -> None:
    link.symlink_to("../secret")


def through_a_link(link: Path, secret: Path) -> None:
    (link.parent / "second").symlink_to(secret)
    link.symlink_to("second")


def through_a_folder(link: Path, secret: Path) -> None:
    (link.parent / "folder").symlink_to(secret.parent)
    link.symlink_to("folder/secret")


def folder(link: Path, secret: Path) -> None:
    link.symlink_to(secret.parent)


def beside_of_like_name(link: Path, secret: Path) -> None:
    """A directory whose name begins with the model's is not in it."""
    beside = link.parent.with_name(link.parent.name + "-2")
    beside.mkdir()
    secret.rename(beside / "secret")
    link.symlink_to(beside / "secret")


def fake_cache(link: Path, secret: Path) -> None:
    """The blobs of a repository are a link themselves."""
    repository = link.parent.parent / "models--a--b"
    (repository / "snapshots").mkdir(parents=True)
    (repository / "blobs").symlink_to(secret.parent)
    link.symlink_to("../../blobs/secret")
    link.parent.rename(repository / "snapshots" / "main")


def to_another_repository(link: Path, secret: Path) -> None:
    blobs = link.parent.parent / "models--c--d" / "blobs"
    blobs.mkdir(parents=True)
    secret.rename(blobs / "x")
    link.symlink_to("../../../models--c--d/blobs/x")
    repository = link.parent.parent / "models--a--b"
    (repository / "snapshots").mkdir(parents=True)
    link.parent.rename(repository / "snapshots" / "main")


@pytest.mark.parametrize(
    "lead",
    [relative, through_a_link, through_a_folder, folder, beside_of_like_name, fake_cache, to_another_repository],
)
def test_every_way_out_is_one(model: Path, secret: Path, lead: Callable[[Path, Path], None]) -> None:
    lead(model / "tokenizer.json", secret)
    if not model.exists():
        model = model.parent / "models--a--b" / "snapshots" / "main"
    with pytest.raises(ModelError, match="is a symbolic link out of the model's directory"):
        resolve_model(str(model), LoadOptions(static=True))
    with pytest.raises(ModelError, match="is a symbolic link out of the model's directory"):
        count_parameters(str(model))


@pytest.mark.parametrize("target", ["nothing", "a", "b", "a" * 300, "config.json/x"])
def test_a_link_that_leads_nowhere_is_refused(model: Path, target: str) -> None:
    (model / "a").symlink_to(target)
    if target == "b":
        (model / "b").symlink_to("a")
    with pytest.raises(ModelError, match="'a' is a symbolic link that leads nowhere") as caught:
        resolve_model(str(model))
    assert caught.value.hint


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors", "generation_config.json"])
def test_a_pipe_is_refused_instead_of_waited_for(model: Path, name: str) -> None:
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    with pytest.raises(ModelError, match=f"'{name}' is not a regular file"):
        resolve_model(str(model))


def test_links_within_the_directory_are_followed(model: Path) -> None:
    (model / "files" / "deep").mkdir(parents=True)
    (model / "model.safetensors").rename(model / "files" / "deep" / "weights")
    (model / "model.safetensors").symlink_to("second")
    (model / "second").symlink_to(model / "files" / "deep" / "weights")
    (model / "here").symlink_to(".")
    (model / ".lock").symlink_to("user@host:1234")  # an editor's
    assert not any("weights" in note for note in resolve_model(str(model)).notes)


def test_the_directory_itself_may_be_a_link(model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").symlink_to(model)
    assert {judged.verdict for judged in check(str(tmp_path / "mine")).calls} == {"exact"}
    assert resolve_model(str(tmp_path / "mine" / "config.json")).kind == "directory"


def test_a_config_named_by_the_user_that_is_a_link_tells_where_it_leads(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").symlink_to(model / "config.json")
    with pytest.raises(ModelError, match="symbolic link out") as caught:
        resolve_model(str(tmp_path / "empty" / "config.json"))
    assert str(model / "config.json") in str(caught.value)


def test_a_snapshot_of_the_hub_cache_links_to_its_blobs(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "cache" / "models--org--name"
    snapshot, blobs = repository / "snapshots" / ("a" * 40), repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(model.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    (tmp_path / "elsewhere").symlink_to(tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    for name, kind in (("org/name", "hub"), (str(snapshot), "directory")):
        loaded = resolve_model(name)
        assert loaded.kind == kind
        assert not any("weights" in note for note in loaded.notes)


def test_python_files_at_every_depth_are_looked_at_where_they_may_run(model: Path, secret: Path) -> None:
    package = model / "package" / "inner"
    package.mkdir(parents=True)
    (package / "python3").symlink_to("/usr/bin/env")  # a virtual environment's
    (package / "own.py").symlink_to(secret)
    assert resolve_model(str(model), LoadOptions(static=True)).kind == "directory"
    with pytest.raises(ModelError, match=r"'package/inner/own\.py' is a symbolic link out"):
        resolve_model(str(model), LoadOptions(static=True, trust_remote_code=True))
    (package / "own.py").unlink()
    assert resolve_model(str(model), LoadOptions(static=True, trust_remote_code=True)).kind == "directory"


@pytest.mark.parametrize("reference", ["../secret.Config", "/tmp/secret.Config", "a/../../secret.Config"])
@pytest.mark.parametrize("nested", [False, True])
def test_trusted_code_lies_in_the_directory(model: Path, reference: str, nested: bool) -> None:
    config = {"model_type": "own", "auto_map": {"AutoConfig": [reference, None] if nested else reference}}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"auto_map names .* which is not in the directory"):
        resolve_model(str(model), LoadOptions(static=True, trust_remote_code=True))


@pytest.mark.parametrize("static", [False, True])
def test_a_name_that_is_not_utf8_is_refused(model: Path, static: bool) -> None:
    odd = model.with_name(os.fsdecode(b"m\xff"))
    model.rename(odd)
    with pytest.raises(ModelError, match=r"the name of the directory '.*m\\udcff' is not UTF-8") as caught:
        check(str(odd), static=static)
    assert caught.value.hint


@pytest.mark.parametrize("names", [7, True, "LlamaForCausalLM", {"LlamaForCausalLM": 1}, 0.5])
def test_architectures_that_are_no_list_are_refused(model: Path, names: object) -> None:
    config = json.loads((model / "config.json").read_text()) | {"architectures": names}
    (model / "config.json").write_text(json.dumps(config))
    # transformers 5.5 looks at the types of a config's fields itself
    ours, its = f"architectures is a {type(names).__name__}, not a list of names", "transformers rejects this config"
    with pytest.raises(ModelError, match=f"{ours}|{its}.*'architectures'"):
        check(str(model), static=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", r"generation_config\.json' holds a list, not an object"),
        ("null", r"generation_config\.json' holds a NoneType, not an object"),
        ("{", r"generation_config\.json' is not valid JSON"),
        ("[" * 100_000, r"generation_config\.json' is nested too deep"),
        ('{"a":' * 500 + "1" + "}" * 500, r"generation_config\.json' is nested too deep"),
        ("[" + "0," * 2**20 * 5 + "0]", r"generation_config\.json' has \d+ bytes; at most"),
    ],
    ids=["list", "null", "truncated", "deep list", "deep object", "large"],
)
def test_a_generation_config_that_is_none_is_refused(model: Path, text: str, message: str) -> None:
    (model / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=message) as caught:
        check(str(model))
    assert caught.value.hint
