"""Field types with their bounds, used by the schema and by strategies' options."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field


def _reject_bool(value: Any) -> Any:
    """Reject booleans, which Python treats as 0 and 1."""
    if isinstance(value, bool):
        raise ValueError("a number is needed, not true or false")
    return value


def lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


NotBool = BeforeValidator(_reject_bool)
Lower = BeforeValidator(lower)
Upper = BeforeValidator(lambda value: value.upper() if isinstance(value, str) else value)

Count = Annotated[int, Field(ge=1), NotBool]
Natural = Annotated[int, Field(ge=0), NotBool]
Port = Annotated[int, Field(ge=0, le=65535), NotBool]
Seed = Annotated[int, Field(ge=0, lt=2**63), NotBool]
Positive = Annotated[float, Field(gt=0.0), NotBool]
NonNegative = Annotated[float, Field(ge=0.0), NotBool]
Fraction = Annotated[float, Field(ge=0.0, le=1.0), NotBool]
BelowOne = Annotated[float, Field(ge=0.0, lt=1.0), NotBool]
Auto = Annotated[Literal["auto"], Lower]
Precision = Literal["fp32", "bf16", "fp16"]
