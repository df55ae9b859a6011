"""The mathematics behind the scale.

Moments and distribution of the logits, the softmax of Gaussian logits at finite n and in the limit, bounds, ranges of
floating dtypes, and the costs of attention.
"""

from sqrtdk.theory.asymptotic import asymptotic_entropy_nats as asymptotic_entropy_nats
from sqrtdk.theory.asymptotic import asymptotic_jacobian_norm as asymptotic_jacobian_norm
from sqrtdk.theory.asymptotic import asymptotic_log_effective_keys as asymptotic_log_effective_keys
from sqrtdk.theory.asymptotic import asymptotic_peak as asymptotic_peak
from sqrtdk.theory.bounds import entropy_lower_bound_nats as entropy_lower_bound_nats
from sqrtdk.theory.bounds import logit_bound as logit_bound
from sqrtdk.theory.bounds import logit_radius as logit_radius
from sqrtdk.theory.bounds import max_logit_bounds as max_logit_bounds
from sqrtdk.theory.costs import AttentionMemory as AttentionMemory
from sqrtdk.theory.costs import attention_flops as attention_flops
from sqrtdk.theory.costs import attention_memory_bytes as attention_memory_bytes
from sqrtdk.theory.costs import kv_cache_bytes as kv_cache_bytes
from sqrtdk.theory.costs import projection_flops as projection_flops
from sqrtdk.theory.costs import visible_pairs as visible_pairs
from sqrtdk.theory.gaussian import critical_sigma as critical_sigma
from sqrtdk.theory.gaussian import expected_effective_keys as expected_effective_keys
from sqrtdk.theory.gaussian import expected_entropy_nats as expected_entropy_nats
from sqrtdk.theory.gaussian import expected_jacobian_norm as expected_jacobian_norm
from sqrtdk.theory.gaussian import expected_peak as expected_peak
from sqrtdk.theory.inverse import scale_from_entropy as scale_from_entropy
from sqrtdk.theory.inverse import sigma_from_entropy as sigma_from_entropy
from sqrtdk.theory.parameters import Terms as Terms
from sqrtdk.theory.parameters import multi_head_terms as multi_head_terms
from sqrtdk.theory.products import LogitDistribution as LogitDistribution
from sqrtdk.theory.products import Moments as Moments
from sqrtdk.theory.products import dot_product_moments as dot_product_moments
from sqrtdk.theory.products import logit_distribution as logit_distribution
from sqrtdk.theory.ranges import RangeForecast as RangeForecast
from sqrtdk.theory.ranges import largest_finite as largest_finite
from sqrtdk.theory.ranges import overflow_margin as overflow_margin
from sqrtdk.theory.ranges import range_forecast as range_forecast
from sqrtdk.theory.ranges import spacing as spacing
