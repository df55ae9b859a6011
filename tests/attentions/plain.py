"""The plainest self-attention: one module, its scale as a number or an attribute, its mask as a test wants it."""

from torch import nn
from torch.nn import functional as F


class Plain(nn.Module):
    """Self-attention whose scale is `number`, or the attribute of that name; `visible` masks it as `way` says."""

    def __init__(self, number, visible=None, way="sdpa", **attributes):
        super().__init__()
        self.qkv, self.number, self.visible, self.way = nn.Linear(64, 192), number, visible, way
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        scale = getattr(self, self.number) if isinstance(self.number, str) else self.number
        logits, mask = q @ k.mT * scale, self.visible
        if self.way == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        elif self.way == "eager":
            y = logits.masked_fill(~mask, -1e9).softmax(-1) @ v
        elif self.way == "added":
            y = (logits + mask).softmax(-1) @ v
        else:
            y = getattr(self, "normalise", lambda weights: weights)(logits.softmax(-1) * mask) @ v
        return x + y.transpose(1, 2).flatten(2)
