"""Make lab/src/sqrtdk_lab/head_dims.json: head dimension, width and size of the model families of transformers.

The head dimension is the one that the calls of each family have in benchmarks/results/families.json, the largest where
they differ; width and number of parameters are those of the default config in full depth, built on the meta device.
Most defaults are those of the family's first released model. The lab reads the table, so that it needs no
transformers. A family without a head dimension, or whose default config is not built, is listed with the reason.

    python scripts/head_dims.py    # minutes
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from made import ROOT
from tests.hf.small import LACKING, WIDTH, NotBuiltError, model_classes

SOURCE = ROOT / "benchmarks" / "results" / "families.json"
RESULT = ROOT / "lab" / "src" / "sqrtdk_lab" / "head_dims.json"
# What LACKING sets to make a family small rather than to complete its config; in full size the default stands.
SHRINKS = {"longcat_flash", "granitemoehybrid", "recurrent_gemma", "zamba", "zamba2", "bamba", "lfm2_moe"}


def size_of(model_type: str) -> tuple[int, int]:
    """Return width and number of parameters of the default config."""
    fields = {} if model_type in SHRINKS else LACKING.get(model_type, {})
    config = CONFIG_MAPPING[model_type](**fields)
    width = next((int(value) for name in WIDTH.split() if isinstance(value := getattr(config, name, None), int)), None)
    if width is None:
        raise NotBuiltError("its config names no width")
    with torch.device("meta"):
        model = model_classes(config)[0]._from_config(config)
    return width, sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    """Write the table."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    source = json.loads(SOURCE.read_text(encoding="utf-8"))
    rows: list[list[Any]] = []
    left_out: dict[str, str] = {}
    for entry in source["families"]:
        name = entry["model_type"]
        try:
            dims = [call["head_dim"] for call in entry["calls"] if call["head_dim"] is not None]
            if not dims:
                raise NotBuiltError("no call with a head dimension")
            rows.append([name, max(dims), *size_of(name)])
        except Exception as error:  # a default config may fail in any way; the reason is kept
            left_out[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        print(name, left_out.get(name, rows[-1:]), flush=True)
    versions = {"head_dims": source["versions"]["transformers"], "sizes": transformers.__version__}
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    head = f'{{\n "transformers": {json.dumps(versions)},\n "left_out": {json.dumps(left_out, indent=2)},\n'
    columns = '["model_type", "head_dim", "d_model", "parameters"]'
    RESULT.write_text(f'{head} "columns": {columns},\n "families": [\n{lines}\n ]\n}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
