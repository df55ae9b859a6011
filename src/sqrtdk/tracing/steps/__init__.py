"""What can happen to the logits between the product of q and k and the softmax: one frozen class a file.

A step is written into the formula (`write`), listed as a stage of the record (`stage`), and taken off the logits
before the scale is read from them (`undo`).
"""

from sqrtdk.tracing.steps._scaled_by import scaled_by as scaled_by
from sqrtdk.tracing.steps._step import Step as Step
from sqrtdk.tracing.steps.beside import Beside as Beside
from sqrtdk.tracing.steps.bias import Bias as Bias
from sqrtdk.tracing.steps.blocks import Blocks as Blocks
from sqrtdk.tracing.steps.clamp import Clamp as Clamp
from sqrtdk.tracing.steps.hide import Hide as Hide
from sqrtdk.tracing.steps.mix import Mix as Mix
from sqrtdk.tracing.steps.offset import Offset as Offset
from sqrtdk.tracing.steps.power import Power as Power
from sqrtdk.tracing.steps.scale import Scale as Scale
from sqrtdk.tracing.steps.sink import Sink as Sink
from sqrtdk.tracing.steps.softcap import Softcap as Softcap
from sqrtdk.tracing.steps.squares import Squares as Squares
from sqrtdk.tracing.steps.unknown import Unknown as Unknown
