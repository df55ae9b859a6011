"""Row statistics of attention logits, and their summaries a head."""

from sqrtdk._leads import says_if_called as _says_if_called
from sqrtdk.stats._partial import within_range as within_range
from sqrtdk.stats.heads import CallStats as CallStats
from sqrtdk.stats.heads import HeadStats as HeadStats
from sqrtdk.stats.heads import Histogram as Histogram
from sqrtdk.stats.heads import call_rows as call_rows
from sqrtdk.stats.heads import call_stats as call_stats
from sqrtdk.stats.heads import call_stats_of_rows as call_stats_of_rows
from sqrtdk.stats.heads import head_stats as head_stats
from sqrtdk.stats.heads import head_stats_from_logits as head_stats_from_logits
from sqrtdk.stats.heads import head_stats_from_qk as head_stats_from_qk
from sqrtdk.stats.request import AuxOutput as AuxOutput
from sqrtdk.stats.request import AuxRequest as AuxRequest
from sqrtdk.stats.rows import LogitSource as LogitSource
from sqrtdk.stats.rows import RowStats as RowStats
from sqrtdk.stats.rows import RowSummary as RowSummary
from sqrtdk.stats.rows import logit_source as logit_source
from sqrtdk.stats.rows import row_stats as row_stats
from sqrtdk.stats.rows import row_summary as row_summary
from sqrtdk.stats.tiles import AttentionRows as AttentionRows
from sqrtdk.stats.tiles import ProductSource as ProductSource
from sqrtdk.stats.tiles import attention_row_stats as attention_row_stats
from sqrtdk.stats.tiles import product_source as product_source

_says_if_called(__name__)
