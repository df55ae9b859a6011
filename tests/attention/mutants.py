"""Planted errors: the file, and pairs of a text that stands there once and the text in its place."""

from __future__ import annotations

ADDED, ROWS, CALL, CPU, FUSED, TILED = (f"impl/{n}.py" for n in ("bias", "rows", "call", "cpu", "fused", "tiled"))
SWEEP, TILE, WEIGHERS, PRODUCTS = (f"stats/{name}.py" for name in ("_sweep", "_tile", "_weighers", "tiles"))
RESOLVE, REQUEST, PARTIAL = "_attention.py", "stats/request.py", "stats/_partial.py"
SCALED = "z = z * (cut_rows(call.scale, start, stop).to(call.dtype) if isinstance(call.scale, Tensor) else call.scale)"
CAPPED = "z = call.softcap * torch.tanh(z / call.softcap)"
BIASED = "z = z + cut_rows(call.bias, start, stop).to(call.dtype)"
SINK_SPREAD = "spread = spread + (sink - lse).exp() * (sink - top).masked_fill(sink == -math.inf, 0.0)"
IF_CONTENT = "if call.term.content:\n            z = z + term"
IF_NOT_CONTENT = "if term is not None and call.term is not None and not call.term.content:"
MASKED = "z = z.masked_fill(~seen, -math.inf)"
GROWN = "return tensor.repeat_interleave(heads // tensor.shape[-3], -3)"

MUTANTS: dict[str, tuple[str, list[tuple[str, str]]]] = {
    # logits
    "scale off by 0.1%": (ROWS, [(SCALED, SCALED + " * 1.001")]),
    "scale left out": (ROWS, [(SCALED, "pass")]),
    "scale twice": (ROWS, [(SCALED, f"{SCALED}\n    {SCALED}")]),
    "scale of the first rows for every block": (ROWS, [(SCALED, SCALED.replace("start, stop", "0, stop - start"))]),
    "scale without its gradient": (ROWS, [(SCALED, SCALED.replace(".to(call.dtype)", ".to(call.dtype).detach()"))]),
    "scale's gradient off by 0.1%": (
        ROWS,
        [
            (
                SCALED,
                SCALED.replace(
                    "to(call.dtype) if",
                    "to(call.dtype).mul(1.001).sub(0.001 * cut_rows(call.scale, start, stop).detach()) if",
                ),
            )
        ],
    ),
    "softcap without its factor": (ROWS, [(CAPPED, "z = torch.tanh(z / call.softcap)")]),
    "softcap without its division": (ROWS, [(CAPPED, "z = call.softcap * torch.tanh(z)")]),
    "softcap clamps": (ROWS, [(CAPPED, "z = z.clamp(-call.softcap, call.softcap)")]),
    "softcap after the bias": (ROWS, [(CAPPED, "pass"), (BIASED, f"{BIASED}\n    if call.softcap:\n        {CAPPED}")]),
    "softcap before the scale": (
        ROWS,
        [
            (SCALED, f"if call.softcap:\n        {CAPPED}\n    {SCALED}"),
            (f"    {CAPPED}\n    if term", "    pass\n    if term"),
        ],
    ),
    "bias scaled": (ROWS, [(BIASED, BIASED + " * call.scale")]),
    "bias subtracted": (ROWS, [(BIASED, BIASED.replace("z + ", "z - "))]),
    "bias left out": (ROWS, [(BIASED, "pass")]),
    "bias without its gradient": (ROWS, [(BIASED, BIASED + ".detach()")]),
    "bias's gradient off by 0.1%": (
        ROWS,
        [(BIASED, BIASED.replace("z + ", "z - 0.001 * cut_rows(call.bias, start, stop).detach() + 1.001 * "))],
    ),
    "bias of the first rows for every block": (ROWS, [(BIASED, BIASED.replace("start, stop", "0, stop - start"))]),
    "content term not scaled": (
        ROWS,
        [(IF_CONTENT, "if False:\n            pass"), (IF_NOT_CONTENT, "if term is not None:")],
    ),
    "bias term scaled": (ROWS, [(IF_CONTENT, "if True:\n            z = z + term"), (IF_NOT_CONTENT, "if False:")]),
    "positions of rows without the shift": (ROWS, [("rows + call.shift, columns).to", "rows, columns).to")]),
    "positions of the first rows for every block": (
        ROWS,
        [
            (
                "rows = call.positions(start, stop)\n        columns",
                "rows = call.positions(0, stop - start)\n        columns",
            )
        ],
    ),
    "positions of keys off by one": (
        ROWS,
        [("columns = torch.arange(call.keys, device=query.device)", "columns = 1 + torch.arange(call.keys)")],
    ),
    # masks
    "mask turned round": (ROWS, [(MASKED, MASKED.replace("~seen", "seen"))]),
    "mask of a finite number": (ROWS, [(MASKED, MASKED.replace("-math.inf", "-1e4"))]),
    "mask left out": (ROWS, [(MASKED, "pass")]),
    "diagonal hides itself": (CALL, [("columns <= rows + self.diagonal", "columns < rows + self.diagonal")]),
    "diagonal by one": (CALL, [("columns <= rows + self.diagonal", "columns <= rows + self.diagonal + 1")]),
    "diagonal turned round": (CALL, [("columns <= rows + self.diagonal", "columns >= rows + self.diagonal")]),
    "window short on the left": (CALL, [("rows + (self.shift - left)", "rows + (self.shift - left + 1)")]),
    "window short on the right": (
        CALL,
        [("columns <= rows + (self.shift + right)", "columns < rows + (self.shift + right)")],
    ),
    "window's left side not aligned": (CALL, [("rows + (self.shift - left)", "rows - left")]),
    "window's right side not aligned": (CALL, [("rows + (self.shift + right)", "rows + right")]),
    "masks joined by or": (CALL, [("else found & bound", "else found | bound")]),
    "mask rows of the first block": (
        CALL,
        [("cut_rows(self.visible, start, stop)", "cut_rows(self.visible, 0, stop - start)")],
    ),
    "lower right by one": (
        RESOLVE,
        [("shift = key.shape[-2] - query.shape[-2] if", "shift = 1 + key.shape[-2] - query.shape[-2] if")],
    ),
    "lower right is upper left": (RESOLVE, [("diagonal=shift if is_causal", "diagonal=0 if is_causal")]),
    "finite float masks hide": (RESOLVE, [("visible = attn_mask != -math.inf", "visible = attn_mask >= 0")]),
    "float mask added to nothing": (RESOLVE, [("added = attn_mask.masked_fill(~visible, 0.0)", "added = None")]),
    # heads
    "GQA tiled instead of repeated": (CALL, [(GROWN, "return torch.cat([tensor] * (heads // tensor.shape[-3]), -3)")]),
    "GQA takes the first key head": (CALL, [(GROWN, "return tensor[..., :1, :, :]")]),
    # softmax, sinks
    "sink left out of the denominator": (ROWS, [("mass = mass + torch.exp(sink - top)", "pass")]),
    "sink twice": (ROWS, [("mass = mass + torch.exp(sink - top)", "mass = mass + 2 * torch.exp(sink - top)")]),
    "sink without its gradient": (
        ROWS,
        [("mass = mass + torch.exp(sink - top)", "mass = mass + torch.exp(sink - top).detach()")],
    ),
    "sink's gradient off by 0.1%": (
        ROWS,
        [
            (
                "mass = mass + torch.exp(sink - top)",
                "mass = mass + 1.001 * torch.exp(sink - top) - 0.001 * torch.exp(sink - top).detach()",
            )
        ],
    ),
    "blind rows divided by zero": (ROWS, [("mass.masked_fill((mass == 0) & (count == 0), 1.0)", "mass")]),
    # statistics and their gradients
    "lse's gradient doubled": (
        ROWS,
        [("lse = top + mass.masked_fill(blind, 1.0).log()", "lse = top + 2.0 * mass.masked_fill(blind, 1.0).log()")],
    ),
    "entropy's gradient turned round": (
        ROWS,
        [("mass.masked_fill(blind, 1.0).log() - spread, whole", "mass.masked_fill(blind, 1.0).log() + spread, whole")],
    ),
    "entropy's gradient without the sink": (ROWS, [(SINK_SPREAD, "pass")]),
    "statistics without the sink": (ROWS, [("whole = keys if sink is None else", "whole = keys if True else")]),
    "largest weight counted twice": (ROWS, [("e = shifted.exp().masked_fill(at, 0.0)", "e = shifted.exp()")]),
    "mean of shifted logits": (ROWS, [("(unit * shift.squeeze(-1) + offset) / unit", "offset / unit")]),
    "variance over hidden keys": (
        ROWS,
        [("/ unit).masked_fill(hidden, 0.0).square()", "/ unit).square()")],
    ),
    "mean over all keys": (ROWS, [("offset = near.sum(-1) / n.clamp(min=1.0)", "offset = near.sum(-1) / z.shape[-1]")]),
    "minimum over hidden keys": (ROWS, [("low = z.masked_fill(hidden, math.inf).amin(-1)", "low = z.amin(-1)")]),
    "cubes are squares": (ROWS, [("ratio.pow(3).sum(-1)", "ratio.pow(2).sum(-1)")]),
    "keys counted without the mask": (
        CALL,
        [
            (
                "return seen.expand(*seen.shape[:-1], self.keys).sum(-1, keepdim=True)",
                "return torch.full_like(seen[..., :1], self.keys, dtype=self.dtype)",
            )
        ],
    ),
    "variance divided by n - 1": (
        PARTIAL,
        [("self.m2 / self.n.clamp(min=1.0)", "self.m2 / (self.n - 1.0).clamp(min=1.0)")],
    ),
    "lse is the maximum": (PARTIAL, [("return self.max + torch.log1p(self.rest)", "return self.max")]),
    "largest is smallest": (REQUEST, [('"max_scores": lambda: keys.max', '"max_scores": lambda: keys.min')]),
    "peak without the sink": (REQUEST, [('"peak": lambda: weights(whole.peak)', '"peak": lambda: weights(keys.peak)')]),
    "sink counted as a key": (REQUEST, [('"count": lambda: keys.n', '"count": lambda: whole.n')]),
    # resolving
    "default scale of the key's width": (RESOLVE, [("head_dim = query.shape[-1]", "head_dim = key.shape[-1]")]),
    # torch's kernels
    "fused: scale folded and applied": (FUSED, [("* scale, 1.0", "* scale, None")]),
    "fused: scale off by 0.1%": (
        FUSED,
        [("        scale=scale,\n        enable_gqa", "        scale=scale * 1.001,\n        enable_gqa")],
    ),
    "fused: causal forgotten": (
        FUSED,
        [("is_causal = call.diagonal is not None and mask is None", "is_causal = False")],
    ),
    "fused: scale of zero or below beside causal": (FUSED, [("(is_causal and scale <= 0.0)", "False")]),
    "fused: mask forgotten beside a bias": (FUSED, [("else torch.where(seen, bias, -math.inf)", "else bias")]),
    "fused: statistics without the bias": (
        FUSED,
        [("bias=None if call.bias is None else call.bias.detach()", "bias=None")],
    ),
    "fused: statistics without the mask": (FUSED, [("visible=seen,", "visible=None,")]),
    "fused: positions without the shift": (
        ADDED,
        [("call.positions(0, call.length) + call.shift", "call.positions(0, call.length)")],
    ),
    # the pass for output and statistics at once
    "pass: scale left out": (PRODUCTS, [("            q = q * self.scale\n", "            pass\n")]),
    "pass: base 2 instead of e": (TILE, [("torch.mul(a, LOG2_E / unit, out=b)", "torch.mul(a, 1.0 / unit, out=b)")]),
    "pass: ties not counted": (TILE, [("ties = (found.mass - rest)", "ties = 0.0 * (found.mass - rest)")]),
    "pass: hidden keys have weights": (
        TILE,
        [("exp2_()  # in place, as `b` may have left the cache\n    if mask is not None:", "exp2_()\n    if False:")],
    ),
    "pass: largest weight left out of the output": (WEIGHERS, [("weights.view(pairs", "weights.frac().view(pairs")]),
    "pass: values of the first keys": (WEIGHERS, [("heads, block.c0 : block.c1]", "heads, : block.c1 - block.c0]")]),
    "pass: key heads not shared": (
        WEIGHERS,
        [("slice(block.h0 // self.group, block.h1 // self.group)", "slice(0, (block.h1 - block.h0) // self.group)")],
    ),
    "pass: earlier keys not scaled down": (SWEEP, [("sums = sums.mul_(_down(below, top))", "sums = sums")]),
    "pass: later keys not scaled down": (SWEEP, [("part.mul_(_down(found.max, top))", "part")]),
    "pass: mask of the first keys": (
        "stats/_block.py",
        [("mask[..., begin - start : block.c1 - start]", "mask[..., : block.c1 - begin]")],
    ),
    "pass: scatter not centred": (PRODUCTS, [("part.double() - centre for", "part.double() for")]),
    "pass: scatter of one scale": (PRODUCTS, [("((q @ scatter) * q)", "((q @ scatter) * q / self.scale)")]),
    "merge: largest weights of other blocks left out": (
        PARTIAL,
        [("total(part + others)", "total(part)")],
    ),
    "merge: squares of the shares left out": (PARTIAL, [("total(part**2 * self.share2", "total(part * self.share2")]),
    "merge: logits not shifted": (PARTIAL, [(" + weight * gap * (1.0 + self.rest)", "")]),
    "merge: blocks' means apart": (PARTIAL, [("self.m2 + self.n * ((step - offset) * 2.0) ** 2", "self.m2")]),
    # blocks
    "tiled: last row forgotten": (
        TILED,
        [("range(0, call.length, height)", "range(0, max(1, call.length - 1), height)")],
    ),
    "tiled: statistics of the first block": (
        TILED,
        [("found = attend(call, start, stop)", "found = attend(call, 0, stop - start)")],
    ),
    "tiled: every block is the first": (
        TILED,
        [("checkpoint(attend, call, start, stop", "checkpoint(attend, call, 0, stop - start")],
    ),
    # the compiled kernel's call
    "cpu: scale left out": (CPU, [("factor = 1.0 if isinstance(scale, Tensor) else scale", "factor = 1.0")]),
    "cpu: scale tensor left out": (
        CPU,
        [("_spread(scale, (*lead, rows, 1)).float() if isinstance(scale, Tensor) else None", "None")],
    ),
    "cpu: scale without its gradient": (CPU, [("scale.requires_grad and torch.is_grad_enabled()", "False")]),
    "cpu: softcap left out": (CPU, [("call.softcap or 0.0", "0.0")]),
    "cpu: bias left out": (CPU, [("None if call.bias is None else _spread(", "None if True else _spread(")]),
    "cpu: mask left out": (CPU, [("None if call.visible is None", "None if True")]),
    "cpu: sinks left out": (
        CPU,
        [("None if call.sinks is None else call.sinks.float().expand", "None if True else call.sinks.float().expand")],
    ),
    "cpu: statistics without the sink": (CPU, [("keys if sinks is None else", "keys if True else")]),
    "cpu: window's right side not aligned": (CPU, [("right + call.shift", "right")]),
    "cpu: window's left side not aligned": (CPU, [("left - call.shift", "left")]),
    "cpu: the wider of two bounds": (CPU, [("min(known)", "max(known)")]),
    "cpu: squares for cubes": ("impl/kernel/operators.py", [('"share2", "share3"', '"share3", "share2"')]),
}
