"""Scale rules: the factor on the score, by name in `SCALES`."""

from collections.abc import Callable

from sqrtdk.scales._disentangled import disentangled as disentangled
from sqrtdk.scales._dk import dk as dk
from sqrtdk.scales._fixed import fixed as fixed
from sqrtdk.scales._layer_index import layer_index as layer_index
from sqrtdk.scales._learned import Learned as Learned
from sqrtdk.scales._learned import learned as learned
from sqrtdk.scales._log_n import log_n as log_n
from sqrtdk.scales._none import none as none
from sqrtdk.scales._rule import ScaleRule as ScaleRule
from sqrtdk.scales._rule import Sizes as Sizes
from sqrtdk.scales._rule import sizes as sizes
from sqrtdk.scales._sqrt_dk import sqrt_dk as sqrt_dk
from sqrtdk.scales._temperature import temperature as temperature
from sqrtdk.scales._two_sqrt_dk import two_sqrt_dk as two_sqrt_dk
from sqrtdk.scales._yarn import yarn as yarn
from sqrtdk.scales._yarn import yarn_mscale as yarn_mscale

SCALES: dict[str, Callable[..., ScaleRule]] = {
    "sqrt_dk": sqrt_dk,
    "none": none,
    "dk": dk,
    "two_sqrt_dk": two_sqrt_dk,
    "fixed": fixed,
    "temperature": temperature,
    "learned": learned,
    "log_n": log_n,
    "yarn": yarn,
    "disentangled": disentangled,
    "layer_index": layer_index,
}
