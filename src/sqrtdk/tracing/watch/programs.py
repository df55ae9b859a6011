"""Programs: what torch.export gives is no module, and is run by one."""

from __future__ import annotations

from torch.export import ExportedProgram


def hint_for(model: object, otherwise: str) -> str:
    """What to pass in the place of something that is no module."""
    if isinstance(model, ExportedProgram):
        return "An ExportedProgram runs by its module: pass program.module()."
    return otherwise
