"""What a step was, from the values before and after it: normalisations, rotations, scale and softcap."""

from sqrtdk.compare.infer.fit.norm import NormFit as NormFit
from sqrtdk.compare.infer.fit.norm import fit_norm as fit_norm
from sqrtdk.compare.infer.fit.scale import USUAL_SOFTCAPS as USUAL_SOFTCAPS
from sqrtdk.compare.infer.fit.scale import fit_scale as fit_scale
from sqrtdk.tracing.probe.rotation import fit_rotation as fit_rotation
