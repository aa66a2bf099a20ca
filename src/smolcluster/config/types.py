"""Field types with their bounds, used by the schema and by strategies' options."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field


def _not_a_flag(value: Any) -> Any:
    """Reject booleans, which Python treats as 0 and 1."""
    if isinstance(value, bool):
        raise ValueError("a number is needed, not true or false")
    return value


def lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


Number = BeforeValidator(_not_a_flag)
Lower = BeforeValidator(lower)
Upper = BeforeValidator(lambda value: value.upper() if isinstance(value, str) else value)

Count = Annotated[int, Field(ge=1), Number]
Natural = Annotated[int, Field(ge=0), Number]
Port = Annotated[int, Field(ge=0, le=65535), Number]
Seed = Annotated[int, Field(ge=0, lt=2**63), Number]
Positive = Annotated[float, Field(gt=0.0), Number]
NonNegative = Annotated[float, Field(ge=0.0), Number]
Fraction = Annotated[float, Field(ge=0.0, le=1.0), Number]
BelowOne = Annotated[float, Field(ge=0.0, lt=1.0), Number]
Auto = Annotated[Literal["auto"], Lower]
Precision = Literal["fp32", "bf16", "fp16"]
