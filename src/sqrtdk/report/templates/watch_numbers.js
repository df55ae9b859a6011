"use strict";
// What the drawings of a run are made of: numbers out of the page's block, scales, ticks and colours.
const numbersOf = async (block) => {
  // Numbers are a block of 16 bits each, its high bytes before its low ones; a value is float16 * 2 ** exponent.
  const packed = Uint8Array.from(atob(block), (letter) => letter.charCodeAt(0));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(unpacked).arrayBuffer());
  const HALF = Float64Array.from({ length: 65536 }, (_, bits) => {
    const [power, rest] = [(bits >> 10) & 31, bits & 1023];
    const size = power === 31 ? (rest ? NaN : Infinity) : power ? (1 + rest / 1024) * 2 ** (power - 15) : rest * 2 ** -24;
    return bits >> 15 ? -size : size;
  });
  function wholes([start, length], count) {
    const half = bytes.length / 2;
    const bits = (at) => (bytes[at] << 8) | bytes[half + at];
    return length === 1 ? new Array(count).fill(bits(start)) : Array.from({ length: count }, (_, i) => bits(start + i));
  }
  function numbers([start, length, exponent], count, from = 0) {
    const factor = 2 ** exponent;
    return wholes([length === 1 ? start : start + from, length], count).map((bits) => HALF[bits] * factor);
  }
  return { wholes, numbers };
};

const drawing = (() => {
  // Viridis in nine steps: even in lightness, readable with every common colour blindness and in grey.
  const COLOURS = ["440154", "472d7b", "3b528b", "2c728e", "21918c", "28ae80", "5ec962", "addc30", "fde725"]
    .map((hex) => [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16)));
  function rgb(share) {
    const place = Math.max(0, Math.min(1, share)) * (COLOURS.length - 1);
    const low = Math.min(Math.floor(place), COLOURS.length - 2);
    return `rgb(${COLOURS[low].map((from, i) => Math.round(from + (COLOURS[low + 1][i] - from) * (place - low))).join(",")})`;
  }
  const LUT = Uint32Array.from({ length: 256 }, (_, i) => colour(rgb(i / 255)));
  function colour(text) {
    const [red, green, blue] = text.startsWith("#") ? [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16)) : text.match(/\d+/g).map(Number);
    return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
  }

  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // From a value to its place between 0 and 1: the same for all runs; logarithmic where positive values span much, with
  // zeros below all others, and where values of both signs do, linear near 0.
  function scaleOf(values, unit = "") {
    let [low, high, least] = [Infinity, -Infinity, Infinity];
    for (const value of values) if (Number.isFinite(value)) {
      low = Math.min(low, value);
      high = Math.max(high, value);
      if (value > 0) least = Math.min(least, value);
    }
    if (low > high) [low, high] = [0, 1];
    const log = (unit === "%" ? low > 0 : low >= 0) && high > 30 * least;
    const zero = log && low === 0;
    if (zero) low = least / 3;
    const both = unit !== "%" && low < 0 && Math.max(-low, high) > 30;
    const end = Math.asinh(high) - Math.asinh(low);
    const at = (value) => {
      if (!Number.isFinite(value)) return value > 0 ? 1 : 0;
      if (high === low) return 0.5;
      if (both) return (Math.asinh(value) - Math.asinh(low)) / end;
      return log ? Math.max(0, Math.log(value / low) / Math.log(high / low)) : (value - low) / (high - low);
    };
    return { low, high, log: log || both, both, zero, at };
  }

  // The scale of a map's colours leaves out the few values that lie farther from the middle 80% than 1.5 times their
  // span: one spike would leave one colour to all others. `beyond` says which are above it (1) or below it (-1).
  function colourScale(values, unit = "") {
    const finite = values.filter(Number.isFinite);
    const whole = scaleOf(finite, unit);
    const places = finite.map(whole.at).sort((a, b) => a - b);
    const [from, to] = [places[Math.ceil(0.1 * (places.length - 1))], places[Math.floor(0.9 * (places.length - 1))]];
    const far = 1.5 * (to - from);
    const beyond = (value) => (far > 0 ? (whole.at(value) > to + far) - (whole.at(value) < from - far) : 0);
    const sides = finite.map(beyond);
    const scale = sides.some(Boolean) ? scaleOf(finite.filter((_, at) => !sides[at]), unit) : whole;
    return { ...scale, beyond, below: sides.includes(-1), above: sides.includes(1) };
  }

  function ticks(from, to, most, least = 0) {
    const rough = (to - from) / Math.max(most, 1) || 1;
    const size = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((unit) => unit * size).find((unit) => unit >= Math.max(rough * 0.999, least)) ?? Math.max(10 * size, least);
    const every = [];
    for (let i = Math.ceil(from / step); i * step <= to && every.length < 40; i += 1) every.push(+(i * step).toPrecision(8));
    return every;
  }
  function yTicks(scale, most = 5) {
    if (scale.high === scale.low) return [scale.low];
    if (!scale.log) return ticks(scale.low, scale.high, most);
    const powers = [];
    if (scale.both) {
      for (let p = 6; p >= 0; p -= 1) powers.push(-(10 ** p));
      powers.push(0);
      for (let p = 0; p <= 6; p += 1) powers.push(10 ** p);
      return powers.filter((one) => scale.low <= one && one <= scale.high && (one === 0 || Math.abs(one) >= Math.max(-scale.low, scale.high) / 300));
    }
    for (let p = Math.ceil(Math.log10(scale.low)); p <= Math.log10(scale.high); p += 1) powers.push(10 ** p);
    const every = Math.ceil(powers.length / (most - 1)) || 1;
    const some = powers.filter((_, i) => i % every === 0);
    return some.length > 1 ? some : [scale.low, scale.high];
  }

  return { rgb, colour, LUT, style, scaleOf, colourScale, ticks, yTicks };
})();
