"""What every verb shows fits a terminal of 80 columns, and no word of it is cut."""

from pathlib import Path

import pytest

from tests.monitor.watched_runs import write_sick
from tests.report.terminal_text import check_fits
from tests.support.lab_here import of_installed
from tests.support.program import called

CONFIG = '{"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 64}'
VERBS = {  # with what stands in its tables, and would be cut where a column is too narrow
    "check demo:unscaled": "blocks.0-2.attention softmax(rope(q).rope(k) missing saturated",
    "check demo:twice --static --fail-on never": "blocks.0-2.attention twice saturated",
    "kv demo --cache-dtype int8 --fail-on never": "blocks.0.attention exact saturated",
    "kv demo": "format fp8_e4m3 tensor q8_0 block health ok",
    "kv demo --lang zh-CN": "格式 fp8_e4m3 tensor 键改变 输出偏差 良好",
    "check --static config.json config.json --fail-on never": "config.json:",
    "diff demo demo:unscaled": "blocks.1-2.attention explained allowed",
    "params": "gpt2-medium cross-attention 12,079,595,520 31.9%",
    "params gpt2-xl": "self-attention 491,827,200 d_model^2",
    "params demo": "blocks.0-2.attention DemoAttention 196,608 128x128",
    "env": "transformers platform compiler",
    "check demo:unscaled --baseline kept.json": "changed: blocks.0-2.attention",
    "lab list": "seed-code-shapes dimensions S4",
    "lab list --lang zh-CN": "seed-code-shapes softmax S4",
    "lab show grad-norm": "grad-norm saturates Control",
    "lab show grad-norm --lang zh-CN": "grad-norm softmax",
    "lab run init-scaling --quick": "depends Decided numpy Report",
    "lab run init-scaling --quick --lang zh-CN": "视条件而定 判定依据 报告",
    "watch show a": "max_logit alarms critical",
    "watch compare a b": "alarms critical",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config, a baseline, and two runs."""
    folder = tmp_path_factory.mktemp("columns")
    (folder / "config.json").write_text(CONFIG)
    write_sick(folder / "a")
    write_sick(folder / "b")
    assert called("check", "demo", "--baseline", "kept.json", "--update", cwd=folder).returncode == 0
    return folder


@pytest.mark.sampled(5)
@pytest.mark.parametrize("command", of_installed(VERBS))
def test_a_verb_fits_80_columns_and_cuts_no_word(command: str, folder: Path) -> None:
    done = called(*command.split(), cwd=folder, COLUMNS="80")
    assert done.returncode <= 1, done.stderr
    check_fits(done.stdout, 80)
    assert not set(VERBS[command].split()) - {word.strip(";,") for word in done.stdout.split()}
