// What Python wrote into the page: words, controls, sizes of the draws, dtypes and the shipped table.
const data = JSON.parse(document.getElementById("data").textContent);

// The formulas of `sqrtdk.scales` and `sqrtdk.theory` for components of mean 0, in the same order and to the same digits.
// Each is tested against Python.
const theory = (() => {
  const { table, dtypes } = data;

  // -- scales: the factor on the product, by d_k, number of keys and the rule's parameter

  const SCALES = {
    sqrt_dk: (d) => 1 / Math.sqrt(d),
    none: () => 1,
    dk: (d, n, alpha) => alpha / d,
    two_sqrt_dk: (d) => 0.5 / Math.sqrt(d),
    fixed: (d, n, value) => value,
    log_n: (d, n, s) => Math.log(n) * (s / Math.sqrt(d)),
    yarn: (d, n, mscale) => (mscale * mscale) / Math.sqrt(d),
    disentangled: (d, n, terms) => 1 / Math.sqrt(d * terms),
    layer_index: (d, n, layer) => 1 / ((layer + 1) * Math.sqrt(d)),
  };
  const scale = (rule, d, n, parameter) => SCALES[rule](d, n, parameter);
  const std = (d, factor, queryVariance, keyVariance) => Math.sqrt(factor * factor * d * queryVariance * keyVariance);

  // -- the softmax of n Gaussian logits: the table's splines, as in sqrtdk/theory/_table.py

  const POWER_BEYOND = { entropy: 1, peak: 1, jacobian: 0.5 };
  const columns = new Map();
  const along = new Map();

  // Slopes of the cubic spline through the points: flat or not-a-knot at the left, not-a-knot at the right.
  function spline(x, y, flat) {
    const h = x.slice(1).map((b, i) => b - x[i]);
    const rise = y.slice(1).map((b, i) => (b - y[i]) / h[i]);
    let both = h[0] + h[1];
    const upper = [flat ? 0 : both / h[1]];
    const right = [flat ? 0 : ((h[0] + 2 * both) * h[1] * rise[0] + h[0] ** 2 * rise[1]) / (both * h[1])];
    for (let i = 1; i < h.length; i += 1) {
      const diagonal = 2 * (h[i - 1] + h[i]) - h[i] * upper[i - 1];
      right.push((3 * (h[i] * rise[i - 1] + h[i - 1] * rise[i]) - h[i] * right[i - 1]) / diagonal);
      upper.push(h[i - 1] / diagonal);
    }
    const [last, before] = [h.length - 1, h.length - 2];
    both = h[last] + h[before];
    const end = (h[last] ** 2 * rise[before] + (2 * both + h[last]) * h[before] * rise[last]) / both;
    const slopes = [(end - both * right[last]) / (h[before] - both * upper[last])];
    for (let i = last; i >= 0; i -= 1) slopes.push(right[i] - upper[i] * slopes[slopes.length - 1]);
    return slopes.reverse();
  }

  function cubic(x, y, d, at) {
    let i = 0;
    while (i < x.length - 2 && x[i + 1] <= at) i += 1;
    const h = x[i + 1] - x[i];
    const t = (at - x[i]) / h;
    const s = 1 - t;
    return (1 + 2 * t) * s * s * y[i] + t * t * (1 + 2 * s) * y[i + 1] + h * t * s * (s * d[i] - t * d[i + 1]);
  }

  function column(quantity, n) {
    const key = `${quantity} ${n}`;
    if (!columns.has(key)) {
      const logs = table.n.map(Math.log);
      if (!along.has(quantity)) along.set(quantity, table.sigma.map((_, j) => {
        const values = table[quantity].map((row) => Math.log(row[j]));
        return [values, spline(logs, values, false)];
      }));
      const values = along.get(quantity).map(([points, slopes]) => cubic(logs, points, slopes, Math.log(n)));
      columns.set(key, [values, spline(table.sigma.map(Math.asinh), values, quantity !== "peak")]);
    }
    return columns.get(key);
  }

  function ratio(quantity, n, sigma) {
    const [values, slopes] = column(quantity, n);
    const last = table.sigma[table.sigma.length - 1];
    if (sigma > last) return Math.exp(values[values.length - 1] - POWER_BEYOND[quantity] * Math.log(sigma / last));
    return Math.exp(cubic(table.sigma.map(Math.asinh), values, slopes, Math.asinh(sigma)));
  }

  const capped = (quantity, n, sigma) => Math.min(1, ratio(quantity, n, sigma)) * Math.log(n);
  const entropy = (n, sigma) => capped("entropy", n, sigma);
  const peak = (n, sigma) => Math.exp(-capped("peak", n, sigma));
  const jacobian = (n, sigma) => (ratio("jacobian", n, sigma) * Math.sqrt(n - 1)) / n;

  // -- tails of a sum of d products of standard normals, as in sqrtdk/theory/_inversion.py with A = B = 0

  const PATH_STEP = 0.05;
  const LEAN = Math.tan((25 * Math.PI) / 180);
  const BISECTIONS = 60;
  const PATH_DECADES = 20;

  // log P(X > excess): the trapezoid rule on a hyperbola through the saddle point of e^{K(t) - t x} / t.
  function logAbove(d, excess) {
    if (!Number.isFinite(excess)) return excess > 0 ? -Infinity : 0;
    if (excess < 0) return Math.log1p(-Math.min(1, Math.exp(logAbove(d, -excess))));
    const [c, rest] = crossing(d, excess);
    const beta = Math.min(c, rest);
    const reach = Math.sqrt(Math.expm1(Math.min(700, (2 * PATH_DECADES * Math.log(10)) / d)));
    const steps = Math.ceil(Math.asinh(Math.max(1, reach) / beta) / PATH_STEP);
    let [vertex, total] = [0, 0];
    for (let i = 0; i <= steps; i += 1) {
      const [sinh, cosh] = [Math.sinh(i * PATH_STEP), Math.cosh(i * PATH_STEP)];
      const [ox, oy] = [beta * LEAN * (cosh - 1), beta * sinh];
      const [tx, ty] = [c + ox, oy];
      const [sx, sy] = [tx * tx - ty * ty, 2 * tx * ty];
      let [real, angle] = [0, 0]; // of log(1 - t^2)
      if (Math.hypot(sx, sy) < 0.25) {
        real = 0.5 * Math.log1p(sx * sx + sy * sy - 2 * sx);
        angle = Math.atan2(-sy, 1 - sx);
      } else {
        const [ux, uy, vx, vy] = [rest - ox, -oy, 1 + tx, ty];
        const [px, py] = [ux * vx - uy * vy, ux * vy + uy * vx];
        real = Math.log(Math.hypot(px, py));
        angle = Math.atan2(py, px);
      }
      const [ex, ey] = [-0.5 * d * real - excess * tx, -0.5 * d * angle - excess * ty];
      if (i === 0) vertex = ex;
      const [gx, gy] = [beta * LEAN * sinh, beta * cosh]; // dt / ds
      const size = tx * tx + ty * ty;
      const [qx, qy] = [(gx * tx + gy * ty) / size, (gy * tx - gx * ty) / size];
      const term = Math.exp(ex - vertex) * (Math.cos(ey) * qy + Math.sin(ey) * qx);
      total += i === 0 ? 0.5 * term : term;
    }
    total *= PATH_STEP / Math.PI;
    return Math.min(0, vertex + (total > 0 ? Math.log(total) : 0));
  }

  function crossing(d, excess) {
    let [low, high] = [-100, 100];
    for (let i = 0; i < BISECTIONS; i += 1) {
      const middle = (low + high) / 2;
      const [c, rest] = [1 / (1 + Math.exp(-middle)), 1 / (1 + Math.exp(middle))];
      if ((d * c) / (rest * (1 + c)) < excess) low = middle;
      else high = middle;
    }
    const least = Math.min(0.5, 1 / Math.sqrt(d));
    const c = 1 / (1 + Math.exp(-low));
    return c > least ? [c, 1 / (1 + Math.exp(low))] : [least, 1 - least];
  }

  // P(low <= z <= high) of logits whose unit is |scale| sqrt(vq vk).
  function probabilityWithin(d, unit, low, high) {
    if (unit === 0) return low <= 0 && 0 <= high ? 1 : 0;
    const above = (x) => Math.exp(logAbove(d, x / unit));
    if (low >= 0) return above(low) - above(high);
    if (high <= 0) return above(-high) - above(-low);
    return Math.max(0, 1 - above(-low) - above(high));
  }

  // -- ranges of dtypes, as in sqrtdk/theory/ranges.py

  const SURE = Math.log(40);
  const [NODES, NODE_STEP] = [40, 0.08];
  const maxima = new Map();

  function spacing(value, dtype) {
    const { max, eps, tiny } = dtypes[dtype];
    const size = Math.max(Math.abs(value), tiny);
    if (size > max) return Infinity;
    let exponent = Math.floor(Math.log2(size)); // log2 rounds to a whole number just below a power of two
    if (2 ** exponent > size) exponent -= 1;
    return eps * 2 ** exponent;
  }

  const logBeyond = (d, x) => Math.min(0, logAbove(d, x) + Math.LN2);
  function anyBeyond(d, pairs, x) {
    const share = Math.exp(logBeyond(d, x));
    return share === 1 ? 1 : -Math.expm1(pairs * Math.log1p(-share));
  }

  // The expected largest |q . k| of the pairs, in units of sqrt(vq vk): int_0^inf 1 - (1 - T(x))^N dx.
  function expectedMax(d, pairs) {
    const key = `${d} ${pairs}`;
    if (maxima.has(key)) return maxima.get(key);
    const reached = (logNumber) => {
      const over = (x) => Math.log(pairs) + logBeyond(d, x) - logNumber;
      if (over(0) <= 0) return 0;
      let [low, high] = [0, Math.sqrt(d)];
      while (over(high) > 0) high *= 2;
      while (high - low > 1e-4 * high) {
        const middle = (low + high) / 2;
        if (over(middle) > 0) low = middle;
        else high = middle;
      }
      return high;
    };
    const [low, high] = [reached(SURE), reached(-SURE * 10)];
    let total = 0;
    for (let k = -NODES; k <= NODES; k += 1) {
      const inner = (Math.PI / 2) * Math.sinh(k * NODE_STEP);
      const x = (low + high) / 2 + ((high - low) / 2) * Math.tanh(inner);
      total += (anyBeyond(d, pairs, x) * Math.cosh(k * NODE_STEP)) / Math.cosh(inner) ** 2;
    }
    const found = low + ((total * NODE_STEP * Math.PI) / 4) * (high - low);
    maxima.set(key, found);
    return found;
  }

  // What a dtype makes of n^2 products, whose unit is sqrt(vq vk) times the scale if they are stored after it.
  function forecast(d, pairs, unit, dtype) {
    const largest = unit * expectedMax(d, pairs);
    const limit = dtypes[dtype].max;
    const overflow = unit === 0 ? 0 : anyBeyond(d, pairs, (limit + spacing(limit, dtype) / 2) / unit);
    return { largest, limit, margin: largest === 0 ? Infinity : limit / largest, overflow, step: spacing(largest, dtype) };
  }

  return { SCALES, scale, std, entropy, peak, jacobian, logAbove, probabilityWithin, spacing, expectedMax, forecast };
})();
