"""Calls of attention under the transforms of ``torch.func``, eager and compiled.

Imported at the first such call, because it imports PyTorch's compiler, which takes a second.
"""

from __future__ import annotations

from typing import Any

import torch

from .operators import TRANSFORMED


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def call_transformed(name: str, *inputs: Any) -> Any:
    """Call an operator in a form that the transforms can differentiate. The compiler does not look inside."""
    transformed = TRANSFORMED[name]
    # Export takes the operator alone, and vmap as the only transform.
    return transformed.forward(*inputs) if torch.compiler.is_exporting() else transformed.apply(*inputs)
