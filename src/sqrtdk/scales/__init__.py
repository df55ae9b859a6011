"""Scale rules: the factor on the score, by name in `SCALES`."""

from collections.abc import Callable

from sqrtdk._leads import says_if_called as _says_if_called
from sqrtdk.scales._adaptive import Learned as Learned
from sqrtdk.scales._adaptive import learned as learned
from sqrtdk.scales._adaptive import log_n as log_n
from sqrtdk.scales._adaptive import yarn as yarn
from sqrtdk.scales._adaptive import yarn_mscale as yarn_mscale
from sqrtdk.scales._constant import disentangled as disentangled
from sqrtdk.scales._constant import dk as dk
from sqrtdk.scales._constant import fixed as fixed
from sqrtdk.scales._constant import layer_index as layer_index
from sqrtdk.scales._constant import none as none
from sqrtdk.scales._constant import sqrt_dk as sqrt_dk
from sqrtdk.scales._constant import temperature as temperature
from sqrtdk.scales._constant import two_sqrt_dk as two_sqrt_dk
from sqrtdk.scales._rule import ScaleRule as ScaleRule
from sqrtdk.scales._rule import Sizes as Sizes
from sqrtdk.scales._rule import sizes as sizes

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

_says_if_called(__name__)
