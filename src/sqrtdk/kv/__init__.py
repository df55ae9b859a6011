"""The cache in fewer bits: what it would do to the attention of a model, computed before anything is served so.

`kv_forecast` runs a model, `forecast_calls` takes calls that were kept. docs/en/kv-cache.md describes both.
"""

from sqrtdk.audit.cache import Blame as Blame
from sqrtdk.audit.cache import CacheCall as CacheCall
from sqrtdk.audit.cache import CacheForecast as CacheForecast
from sqrtdk.audit.cache import HeadError as HeadError
from sqrtdk.audit.cache import KeyHead as KeyHead
from sqrtdk.audit.cache import StoredWay as StoredWay
from sqrtdk.kv.findings import OUTLIER as OUTLIER
from sqrtdk.kv.forecast import forecast_calls as forecast_calls
from sqrtdk.kv.forecast import kv_forecast as kv_forecast
from sqrtdk.kv.formats import FORMATS as FORMATS
