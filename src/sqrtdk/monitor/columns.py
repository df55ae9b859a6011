"""The columns of a run's records: three literal tables, from which all schemas are made.

Null means "not measured". Statistics are over the rows of a head at one sampled step; a row is one query of one batch
element. Rows that see no key, or hold a NaN or an infinity, are counted and left out of everything else.
"""

from __future__ import annotations

from dataclasses import dataclass

TYPES = ("int64", "int32", "float64", "bool", "string")


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Attributes:
        name: of the column; the same name has the same type in every table.
        type: one of `TYPES`, in Arrow's words.
        unit: of its numbers; "" if it holds none.
        meaning: in one sentence.
        nullable: whether a value may be missing.
    """

    name: str
    type: str
    unit: str
    meaning: str
    nullable: bool = False


def _measure(name: str, unit: str, meaning: str) -> Column:
    return Column(name, "float64", unit, meaning, nullable=True)


_STEP_COLUMN = Column("step", "int64", "step", "number of the training step")

HEAD_COLUMNS = (
    _STEP_COLUMN,
    Column("site", "string", "", "module path of the attention"),
    Column("index", "int32", "call", "0-based count of the attentions at this site within the step"),
    Column("head", "int32", "head", "0-based number of the query head"),
    Column("rows", "int64", "rows", "rows that were looked at, all of those below included"),
    Column("blind_rows", "int64", "rows", "rows that see no key"),
    Column("nan_rows", "int64", "rows", "rows with a NaN or plus infinite logit"),
    Column("inf_rows", "int64", "rows", "rows whose visible logits are all minus infinity"),
    _measure("keys", "keys", "mean over rows of the visible keys"),
    _measure("max_logit", "logits", "largest logit: signed, scaled, after bias, visible keys only"),
    _measure("max_logit_p50", "logits", "median over rows of the row's largest logit"),
    _measure("max_logit_p95", "logits", "95th percentile over rows of the row's largest logit"),
    _measure("min_logit", "logits", "least logit of a visible key"),
    _measure("max_abs_logit", "logits", "largest absolute logit"),
    _measure("mean_logit", "logits", "mean logit of the visible keys"),
    _measure("std_logit", "logits", "root of the mean variance within a row"),
    _measure("row_offset", "logits", "largest absolute mean of a row"),
    _measure("entropy_nats", "nats", "mean over rows of the entropy of the weights"),
    _measure("entropy_p05", "nats", "5th percentile over rows of the entropy"),
    _measure("entropy_p50", "nats", "median over rows of the entropy"),
    _measure("entropy_p95", "nats", "95th percentile over rows of the entropy"),
    _measure("entropy_fraction", "1", "mean over rows of entropy / log(visible keys); rows of one key are left out"),
    _measure("effective_keys", "keys", "mean over rows of 1 / sum p^2"),
    _measure("peak", "1", "mean over rows of the largest weight"),
    _measure("peak_max", "1", "largest weight of any row"),
    _measure("saturated", "1", "fraction of the rows of more than one key whose largest weight is above .99"),
    _measure("jacobian_norm", "1", "mean over rows of the Frobenius norm of diag(p) - p p^T"),
    _measure(
        "max_product",
        "products",
        "largest |q . k| of a visible key before any scale, those that q and k were multiplied by before included; "
        "behind a norm it is of the normalised",
    ),
    _measure(
        "stored_product",
        "products",
        "largest |q . k| of any key as the code stored it, factors of q and k in it; of a fused kernel there is none",
    ),
    _measure("query_nonfinite", "numbers", "numbers of q, of all heads together, that are NaN or infinite"),
    _measure("key_nonfinite", "numbers", "numbers of k, of all heads together, that are NaN or infinite"),
    _measure("scale_ratio", "1", "effective scale times sqrt(head dimension); 1 is the textbook value"),
    _measure(
        "query_grad_p50",
        "loss per unit of q",
        "median over rows of the size of dL/dq: root of its mean square over channels",
    ),
    _measure("query_grad_p95", "loss per unit of q", "95th percentile over rows of the same"),
    _measure("query_grad_max", "loss per unit of q", "largest of the same"),
    _measure(
        "key_grad_p50",
        "loss per unit of k",
        "median over keys of the size of dL/dk: root of its mean square over channels",
    ),
    _measure("key_grad_p95", "loss per unit of k", "95th percentile over keys of the same"),
    _measure("key_grad_max", "loss per unit of k", "largest of the same, of a key"),
    _measure("query_grad_nonfinite", "rows", "rows whose dL/dq holds NaN or infinity, in none of those above"),
    _measure("key_grad_nonfinite", "rows", "rows of k whose dL/dk does"),
)

STEP_COLUMNS = (
    _STEP_COLUMN,
    Column("sampled", "bool", "", "whether the step was one to be measured"),
    _measure("loss", "loss", "as the training loop gave it"),
    Column("time", "float64", "s", "when the step ended, in seconds since the epoch"),
    Column("how", "string", "", '"as is", "eager", or "not measured: " and the reason', nullable=True),
    Column("message_id", "string", "", "id of the sentence in `how`; null: it is none of the catalogue", nullable=True),
    Column("values", "string", "", "its values, a JSON object", nullable=True),
    Column("calls", "int32", "calls", "attentions that were measured"),
    Column(
        "unmeasured",
        "int32",
        "entries",
        "attentions without statistics, and what could not be measured besides; alarms of that name say what and why",
    ),
    _measure("learning_rate", "1", "of the weights that give q and k, at a sampled step"),
    _measure("relative_step", "1", "largest change of such a weight in a sampled step, divided by its size before"),
)

ALARM_COLUMNS = (
    _STEP_COLUMN,
    Column("site", "string", "", "module path of the attention; null: of the whole model", nullable=True),
    Column("index", "int32", "call", "as in heads; null: of all calls", nullable=True),
    Column("head", "int32", "head", "as in heads; null: of all heads", nullable=True),
    Column("name", "string", "", "name of the rule"),
    Column("severity", "string", "", "note, warn, fail or critical"),
    Column("value", "float64", "that of the rule", "what was measured", nullable=True),
    Column("bar", "float64", "that of the rule", "what it passed", nullable=True),
    Column("source", "string", "", "where the bar comes from"),
    Column("text", "string", "", "the alarm in a sentence"),
    Column("message_id", "string", "", "id of that sentence; null: it is none of the catalogue", nullable=True),
    Column("values", "string", "", "its values, a JSON object", nullable=True),
    Column("source_id", "string", "", "id of the sentence in `source`", nullable=True),
)

COLUMNS_BY_TABLE = {"heads": HEAD_COLUMNS, "steps": STEP_COLUMNS, "alarms": ALARM_COLUMNS}
# columns that older versions did not write, in the order in which they came
LATER = (("message_id", "values", "source_id"), ("learning_rate", "relative_step"))
