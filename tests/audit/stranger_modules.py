"""Self-attention of a stranger: its scale a number or the name of what holds it, alone or in a net."""

from torch import nn

ROOT = 8**-0.5


class Attention(nn.Module):
    """Self-attention with 4 heads of 8; `scale` is a number, or the name of what holds it."""

    def __init__(self, scale=ROOT, width=8):
        super().__init__()
        self.num_heads, self.width, self.number = 4, width, scale
        self.q, self.k, self.v = nn.Linear(32, 4 * width), nn.Linear(32, 4 * width), nn.Linear(32, 32)

    def logits(self, q, k):
        return q @ k.mT * (getattr(self, self.number) if isinstance(self.number, str) else self.number)

    def forward(self, x):
        q, k = (part(x).view(*x.shape[:2], 4, self.width).transpose(1, 2) for part in (self.q, self.k))
        v = self.v(x).unflatten(-1, (4, 8)).transpose(1, 2)
        return (self.logits(q, k).softmax(-1) @ v).transpose(1, 2).flatten(2)


class Net(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x):
        for part in self.parts:
            x = x + part(x)
        return x


def module(**attributes):
    made = nn.Module()
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def told(judged):
    return judged.verdict, judged.mistake


class Lenient(Attention):
    """It has an answer to everything."""

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return None
