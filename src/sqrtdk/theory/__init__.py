"""What the mathematics expects: Gaussian logits at finite n, and the ranges of floating dtypes."""

from sqrtdk.theory.gaussian import asymptotic_entropy_nats as asymptotic_entropy_nats
from sqrtdk.theory.gaussian import critical_sigma as critical_sigma
from sqrtdk.theory.gaussian import expected_effective_keys as expected_effective_keys
from sqrtdk.theory.gaussian import expected_entropy_nats as expected_entropy_nats
from sqrtdk.theory.gaussian import expected_peak as expected_peak
from sqrtdk.theory.gaussian import sigma_from_entropy as sigma_from_entropy
from sqrtdk.theory.ranges import largest_finite as largest_finite
from sqrtdk.theory.ranges import overflow_margin as overflow_margin
from sqrtdk.theory.ranges import spacing as spacing
