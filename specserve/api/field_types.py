"""Types of fields that bodies share, with the bounds that no other limit sets.

Knows no bodies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, FailFast, Field, StrictInt, ValidationInfo
from pydantic_core import PydanticCustomError
from typing_extensions import TypeAliasType

from specserve.errors import BadValue
from specserve.grammar.request import MAX_DEPTH, is_too_deep

MAX_LABEL = 512  # characters of a name, or of what is taken and not used


def max_entries(most: int) -> BeforeValidator:
    """Return a validator that counts entries before they are checked.

    Pydantic would report every single one, in a hundred times the memory of the body.
    """

    def check(given: Any, info: ValidationInfo) -> Any:
        if isinstance(given, Mapping) and len(given) > most:
            raise BadValue(
                f"{info.field_name} has {len(given)} entries; {most} is the most",
                param=info.field_name,
            )
        return given

    return BeforeValidator(check)


def check_depth(given: Any) -> Any:
    """Refuse what is nested too deeply, before anything recurses into it."""
    if is_too_deep(given):
        raise PydanticCustomError("too_deep", f"it is nested more than {MAX_DEPTH} levels deep")
    return given


# A faulty list is refused at its first fault, since a body of megabytes may hold a million.
# Strict by themselves: FastAPI shares their schema outside of the strict models.
Ids = TypeAliasType("Ids", Annotated[list[StrictInt], FailFast()])
Texts = TypeAliasType("Texts", Annotated[list[str], FailFast()])
Label = Annotated[str, Field(max_length=MAX_LABEL)]
Prompts = TypeAliasType("Prompts", Annotated[list[str | Ids], FailFast()])
JsonSchema = Annotated[dict[str, Any], BeforeValidator(check_depth)]
