"""Changes to a model: QK-clip, a scale moved into weights, an entropy floor, sigma-reparametrisation."""

from sqrtdk._leads import says_if_called as _says_if_called
from sqrtdk.repair.clip import ClipRecord as ClipRecord
from sqrtdk.repair.clip import LogitMaxima as LogitMaxima
from sqrtdk.repair.clip import clip_ as clip_
from sqrtdk.repair.clip import qk_clip_ as qk_clip_
from sqrtdk.repair.fold import FoldRecord as FoldRecord
from sqrtdk.repair.fold import fold_scale_ as fold_scale_
from sqrtdk.repair.hook import QKClip as QKClip
from sqrtdk.repair.plan import plan_of as plan_of
from sqrtdk.repair.reparam import SigmaReparam as SigmaReparam
from sqrtdk.repair.reparam import entropy_floor as entropy_floor
from sqrtdk.repair.reparam import sigma_reparam as sigma_reparam
from sqrtdk.repair.rows import CallPlan as CallPlan

_says_if_called(__name__)
