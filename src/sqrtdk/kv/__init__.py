"""A cache in fewer bits: its effect on the attention of a model, computed before anything is served with it.

`kv_forecast` runs a model, `forecast_calls` takes kept calls. docs/en/kv-cache.md describes both.
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
