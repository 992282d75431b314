"""The JSON Schema of a file of profiles, for editors that complete and check TOML."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import PydanticOmit

from budgetguard_core.budget import Budget
from budgetguard_core.profiles.profile import LIFTED

_IN_CODE = ("profile", "stop_when")


class _WithoutCode(GenerateJsonSchema):
    """Leaves out what cannot stand in a file, such as a function of the user's."""

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> JsonSchemaValue:
        del schema, error_info
        raise PydanticOmit


def json_schema() -> dict[str, Any]:
    """Return the schema of `budgetguard.toml`; `budgetguard.schema.json` is what it returns."""
    definitions: dict[str, Any] = {}
    caps = {name: _field(name, definitions) for name in Budget.model_fields if name not in _IN_CODE}
    overlay = {"type": "object", "additionalProperties": False, "properties": caps}
    overlays = {"type": "object", "additionalProperties": {"$ref": "#/$defs/overlay"}}
    version = {
        "description": "Raise it with each change: it is in every record.",
        "anyOf": [{"type": "integer"}, {"type": "string", "minLength": 1}],
    }
    profile = {
        "type": "object",
        "additionalProperties": False,
        "required": ["version"],
        "properties": {"version": version, "overlays": overlays, **caps},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "BudgetGuard profiles",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "profiles": {"type": "object", "additionalProperties": {"$ref": "#/$defs/profile"}},
            "overlays": overlays,
        },
        "$defs": {"profile": profile, "overlay": overlay, **definitions},
    }


def _field(name: str, definitions: dict[str, Any]) -> dict[str, Any]:
    info = Budget.model_fields[name]
    schema = TypeAdapter(info.rebuild_annotation()).json_schema(
        ref_template="#/$defs/{model}", schema_generator=_WithoutCode
    )
    definitions.update(schema.pop("$defs", {}))
    if "$ref" not in schema and "anyOf" in schema:
        # TOML has no null; the text says it.
        schema["anyOf"] = [
            {**one, "exclusiveMinimum": 0} if one.get("type") in ("integer", "number") else one
            for one in schema["anyOf"]
            if one != {"type": "null"}
        ] + [{"const": LIFTED}]
    return schema
