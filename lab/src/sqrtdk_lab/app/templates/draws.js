// Random queries, keys and values, and what is measured of their attention. Every vector has random numbers of its own,
// and a smaller d_k takes its first components: so a slider moves the rows that are seen, and draws no others.
const rows = (() => {
  const { sets: SETS, queries: QUERIES, value_dim: VALUE_DIM, largest_dim: LARGEST_DIM, bins: BINS } = data.sizes;
  const [QUERY, KEY, VALUE, UPSTREAM] = [1, 2, 3, 4]; // streams

  // sfc32 of PractRand (C. Doty-Humphrey); 15 steps mix the seed.
  function generator(seed, stream, set, index) {
    let [a, b, c, counter] = [seed | 0, (stream * SETS + set) | 0, index | 0, 1];
    const next = () => {
      const t = (((a + b) | 0) + counter) | 0;
      counter = (counter + 1) | 0;
      a = b ^ (b >>> 9);
      b = (c + (c << 3)) | 0;
      c = (c << 21) | (c >>> 11);
      c = (c + t) | 0;
      return t >>> 0;
    };
    for (let i = 0; i < 15; i += 1) next();
    return next;
  }

  const uniform = (next) => (next() + 0.5) / 2 ** 32;
  function normal(next, into, from, count) {
    for (let i = 0; i < count; i += 2) { // Box and Muller
      const size = Math.sqrt(-2 * Math.log(uniform(next)));
      const angle = 2 * Math.PI * uniform(next);
      into[from + i] = size * Math.cos(angle);
      if (i + 1 < count) into[from + i + 1] = size * Math.sin(angle);
    }
  }
  const each = (draw) => (next, into, from, count) => {
    for (let i = 0; i < count; i += 1) into[from + i] = draw(next);
  };
  // Of variance 1.
  const COMPONENTS = {
    normal,
    uniform: each((next) => Math.sqrt(12) * (uniform(next) - 0.5)),
    signs: each((next) => (next() & 1 ? 1 : -1)),
    Laplace: each((next) => (next() & 1 ? 1 : -1) * -Math.log(uniform(next)) * Math.SQRT1_2),
  };

  function vectors(seed, stream, set, count, dim, draw) {
    const into = new Float32Array(count * dim);
    for (let index = 0; index < count; index += 1) draw(generator(seed, stream, set, index), into, index * dim, dim);
    return into;
  }

  // A draw is kept as long as seed and distribution are the same; for more keys it is made anew, and begins the same.
  let kept = null;
  function drawn({ seed, components, keys }) {
    const of = `${seed} ${components}`;
    if (!kept || kept.of !== of || kept.drawnKeys < keys) {
      const draw = COMPONENTS[components];
      const sets = [...Array(SETS).keys()];
      kept = {
        of,
        drawnKeys: keys,
        queries: sets.map((set) => vectors(seed, QUERY, set, QUERIES, LARGEST_DIM, draw)),
        keys: sets.map((set) => vectors(seed, KEY, set, keys, LARGEST_DIM, draw)),
        pulls: sets.map((set) => pulls(seed, set, keys)),
      };
    }
    if (kept.count !== keys) Object.assign(kept, { count: keys, products: new Map() });
    return kept;
  }

  // v_j . g_i: what a weight of the row does to L = output . g, with g of length 1.
  function pulls(seed, set, keys) {
    const value = vectors(seed, VALUE, set, keys, VALUE_DIM, normal);
    const upstream = vectors(seed, UPSTREAM, set, QUERIES, VALUE_DIM, normal);
    const into = new Float64Array(QUERIES * keys);
    for (let i = 0; i < QUERIES; i += 1) {
      const g = upstream.subarray(i * VALUE_DIM, (i + 1) * VALUE_DIM);
      const length = Math.sqrt(g.reduce((sum, one) => sum + one * one, 0));
      for (let j = 0; j < keys; j += 1) into[i * keys + j] = dot(g, 0, value, j * VALUE_DIM, VALUE_DIM) / length;
    }
    return into;
  }

  function dot(a, i, b, j, count) {
    let sum = 0;
    for (let at = 0; at < count; at += 1) sum += a[i + at] * b[j + at];
    return sum;
  }

  // q . k of unit variances, (queries, keys), of one set.
  function products(draw, d, set) {
    const at = `${d} ${set}`;
    if (!draw.products.has(at)) {
      const into = new Float64Array(QUERIES * draw.count);
      for (let i = 0; i < QUERIES; i += 1) for (let j = 0; j < draw.count; j += 1) {
        into[i * draw.count + j] = dot(draw.queries[set], i * LARGEST_DIM, draw.keys[set], j * LARGEST_DIM, d);
      }
      draw.products.set(at, into);
    }
    return draw.products.get(at);
  }

  // The logits of one row: scale, then softcap.
  function logits(settings, factor, d, set, row) {
    const draw = drawn(settings);
    const from = products(draw, d, set);
    const unit = factor * Math.sqrt(settings.query_variance * settings.key_variance);
    const into = new Float64Array(settings.keys);
    const cap = settings.softcap;
    for (let j = 0; j < settings.keys; j += 1) {
      const z = unit * from[row * draw.count + j];
      into[j] = cap === null ? z : cap * Math.tanh(z / cap);
    }
    return into;
  }

  // Weights of a row and what is derived from them. What cancels near one-hot is summed without the largest weight.
  function statistics(z) {
    const n = z.length;
    let [top, mean] = [0, 0];
    for (let j = 0; j < n; j += 1) {
      if (z[j] > z[top]) top = j;
      mean += z[j] / n;
    }
    const weights = new Float64Array(n);
    let [rest, spread] = [0, 0];
    for (let j = 0; j < n; j += 1) {
      weights[j] = Math.exp(z[j] - z[top]);
      if (j !== top) rest += weights[j];
      spread += (z[j] - mean) ** 2;
    }
    const total = 1 + rest;
    let [below, squares] = [0, 0]; // sum p (max - z); sum p^2 without the largest
    for (let j = 0; j < n; j += 1) {
      weights[j] /= total;
      below += weights[j] * (z[top] - z[j]);
      if (j !== top) squares += weights[j] ** 2;
    }
    const [most, all] = [weights[top], squares + weights[top] ** 2];
    let jacobian = most ** 2 * ((rest / total) ** 2 + squares);
    for (let j = 0; j < n; j += 1) if (j !== top) {
      const square = weights[j] ** 2;
      jacobian += square * ((1 - weights[j]) ** 2 + all - square);
    }
    return {
      weights, max: z[top], peak: most, std: Math.sqrt(spread / n), entropy: Math.log1p(rest) + below,
      effective: 1 / all, jacobian,
    };
  }

  // |dL/dq| of one row: sum_j dL/dz_j dz_j/dq.
  function gradient(settings, factor, d, set, row, z, weights) {
    const draw = drawn(settings);
    const [pull, key] = [draw.pulls[set], draw.keys[set]];
    const n = settings.keys;
    let output = 0;
    for (let j = 0; j < n; j += 1) output += weights[j] * pull[row * draw.drawnKeys + j];
    const sum = new Float64Array(d);
    for (let j = 0; j < n; j += 1) {
      const slope = settings.softcap === null ? 1 : 1 - (z[j] / settings.softcap) ** 2;
      const share = weights[j] * (pull[row * draw.drawnKeys + j] - output) * slope;
      if (share !== 0) for (let at = 0; at < d; at += 1) sum[at] += share * key[j * LARGEST_DIM + at];
    }
    return Math.abs(factor) * Math.sqrt(settings.key_variance * dot(sum, 0, sum, 0, d));
  }

  // All statistics at one d_k, of every row; a step of the work for each set, so that a page stays awake between them.
  function* measured(settings, factor, d, keepLogits = false) {
    const found = { max: [], std: [], entropy: [], peak: [], effective: [], jacobian: [], gradient: [], logits: [] };
    for (let set = 0; set < SETS; set += 1) {
      for (let row = 0; row < QUERIES; row += 1) {
        const z = logits(settings, factor, d, set, row);
        const { weights, ...told } = statistics(z);
        for (const [name, value] of Object.entries(told)) found[name].push(value);
        if (keepLogits) found.logits.push(z);
        found.gradient.push(gradient(settings, factor, d, set, row, z, weights));
      }
      yield null;
    }
    return found;
  }

  const mean = (values) => values.reduce((sum, one) => sum + one, 0) / values.length;
  function quantile(values, share) {
    const ordered = Float64Array.from(values).sort();
    const position = share * (ordered.length - 1);
    const below = Math.floor(position);
    const above = ordered[Math.min(below + 1, ordered.length - 1)];
    return ordered[below] + (above - ordered[below]) * (position - below);
  }

  // Counts in equal bins between the smallest and the largest logit.
  function histogram(all) {
    let [low, high] = [Infinity, -Infinity];
    for (const z of all) for (const one of z) { low = Math.min(low, one); high = Math.max(high, one); }
    const counts = new Array(BINS).fill(0);
    const spread = high > low ? BINS / (high - low) : 0;
    for (const z of all) for (const one of z) counts[Math.min(BINS - 1, Math.floor((one - low) * spread))] += 1;
    return { low, high, counts };
  }

  return { COMPONENTS, vectors, drawn, statistics, measured, mean, quantile, histogram };
})();
