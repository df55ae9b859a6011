"""What a step was, from the values before and after it: normalisations, rotations, scale and softcap."""

from sqrtdk.compare.fit.angles import BaseFit as BaseFit
from sqrtdk.compare.fit.angles import base_of as base_of
from sqrtdk.compare.fit.angles import frequencies as frequencies
from sqrtdk.compare.fit.angles import shift_of as shift_of
from sqrtdk.compare.fit.norm import NormFit as NormFit
from sqrtdk.compare.fit.norm import fit_norm as fit_norm
from sqrtdk.compare.fit.rotation import RotationFit as RotationFit
from sqrtdk.compare.fit.rotation import fit_rotation as fit_rotation
from sqrtdk.compare.fit.scale import ScaleFit as ScaleFit
from sqrtdk.compare.fit.scale import fit_scale as fit_scale
from sqrtdk.compare.fit.scale import fit_softcap as fit_softcap
