"""Turn a pydantic ValidationError into one readable UserError: field, what is wrong, got, remedy.

Field paths are camelCase as users write them; an unknown field names the closest known one. What machines write is
explained by its first fault alone.
"""

import difflib
import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from tba.contracts.base import Contract
from tba.contracts.errors import UserError

_MAX_GOT_CHARS = 80
_MAX_FAULT_CHARS = 300
_KEY = "[key]"
"""What pydantic adds to the place of a key that it refuses."""
# Messages without a comparison in `ctx`: what is wrong, in the words of whoever writes the file.
_WRONG = {
    "missing": "is required",
    "model_type": "must be a mapping of fields",
    "dict_type": "must be a mapping",
    "list_type": "must be a list",
    "string_type": "must be a string",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
}
_BOUNDS = (("gt", "> "), ("ge", ">= "), ("lt", "< "), ("le", "<= "))


def explain(error: ValidationError, source: str) -> UserError:
    """One line a field of `source` (a file name), each with what is wrong, what it got and the remedy."""
    root = _model_named(error.title)
    lines: dict[str, list[str]] = {}
    remedies: dict[str, str] = {}
    for item in error.errors(include_url=False):
        path, owner, field = _resolve(item["loc"], root)
        wrong, remedy = _describe(dict(item), owner, field)
        told = lines.setdefault(path, [])
        if wrong not in told:  # the branches of a union may say the same
            told.append(wrong)
        remedies.setdefault(path, remedy)
    body = "\n".join(f"  {path}: {' or '.join(wrong)}; {remedies[path]}" for path, wrong in lines.items())
    count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    return UserError(f"{source}: {count}\n{body}")


def first_fault(error: ValidationError) -> str:
    """What is wrong with a record that a machine wrote: its first wrong field, the reason and what it got; one line.

    Bytes of a bucket are anybody's: control characters go, and the line is cut.
    """
    item = error.errors(include_url=False)[0]
    path, owner, field = _resolve(item["loc"], _model_named(error.title))
    wrong, _ = _describe(dict(item), owner, field)
    told = f"{path}: {wrong}" if item["loc"] else wrong
    line = " ".join("".join(c if c.isprintable() else " " for c in told).split())
    more = error.error_count() - 1
    return _cut(line, _MAX_FAULT_CHARS) + (f" (and {more} more)" if more else "")


def closest(word: str, known: Sequence[str]) -> str | None:
    """The known word that `word` most likely meant, if any is close; letter case and underscores do not count."""
    plain = {k.replace("_", "").lower(): k for k in known}
    found = difflib.get_close_matches(word.replace("_", "").lower(), plain, n=1, cutoff=0.6)
    return plain[found[0]] if found else None


def field_names(model: type[BaseModel]) -> list[str]:
    """The camelCase names of a model's fields."""
    return [info.alias or name for name, info in model.model_fields.items()]


def models_within(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models that a field's annotation may hold: looks through Optional, unions, lists and Annotated."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) is Annotated:
        yield from models_within(get_args(annotation)[0])
    else:
        for inner in get_args(annotation):
            yield from models_within(inner)


def is_model(field: FieldInfo) -> bool:
    """Whether the field's value is a record with fields of its own."""
    return any(True for _ in models_within(field.annotation))


def field_of(model: type[BaseModel], name: str) -> tuple[str, FieldInfo] | None:
    """(camelCase name, field) for either spelling of a field."""
    for python_name, info in model.model_fields.items():
        alias = info.alias or python_name
        if name in (python_name, alias):
            return alias, info
    return None


def _resolve(
    loc: tuple[Any, ...], root: type[BaseModel] | None
) -> tuple[str, type[BaseModel] | None, FieldInfo | None]:
    """(camelCase path, model that owns its last part, that field), without the tags pydantic adds for unions."""
    path, owner, field, model = "", root, None, root
    annotation: Any = root
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
            continue
        found = field_of(model, part) if model else None
        if found:
            owner, (part, field) = model, found
            annotation = field.annotation
            model = next(models_within(annotation), None)
        elif model is None and (part == _KEY or _is_union(annotation)):
            continue  # names the branch of a union
        elif model is None:
            annotation = _value_type(annotation)
        else:
            owner, field = model, None  # an unknown field
        path += f".{part}" if path else part
    return path or "(the whole file)", owner, field


def _value_type(annotation: Any) -> Any:
    """Of a mapping's values; null: of anything else."""
    inner = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    return get_args(inner)[1] if get_origin(inner) is dict else None


def _is_union(annotation: Any) -> bool:
    inner = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    return get_origin(inner) in (Union, types.UnionType)


def _describe(item: dict[str, Any], owner: type[BaseModel] | None, field: FieldInfo | None) -> tuple[str, str]:
    """(what is wrong and what it got, the remedy)."""
    kind, context = item["type"], item.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown(str(item["loc"][-1]), item["input"], owner)
    if kind == "value_error":
        told = str(context["error"])
        got = "" if ", got " in told else f", got {_got(item['input'])}"
        return told + got, "change the value" if field and not is_model(field) else "change one of these fields"
    if kind == "missing":
        return f"is required, got nothing{_meaning(field)}", "add it"
    got = _got(item["input"])
    if kind == "json_invalid":
        return f"is no valid JSON ({context['error']}), got {got}", "correct it"
    bound = next((f"{sign}{context[name]:.12g}" for name, sign in _BOUNDS if name in context), None)
    if bound:
        return f"must be {bound}, got {got}", f"set a value {bound}{_default(field)}"
    if "pattern" in context:
        return f"must match {context['pattern']}, got {got}", f"correct it{_meaning(field)}"
    if "expected" in context:
        allowed = str(context["expected"]).replace("'", "")
        remedy = "use one of these" if " or " in allowed else f"write {allowed}"
        return f"must be {allowed}, got {got}", f"{remedy}{_default(field)}"
    wrong = _WRONG.get(kind) or item["msg"][:1].lower() + item["msg"][1:]
    return f"{wrong}, got {got}", f"correct the value{_default(field) or _meaning(field)}"


def _unknown(name: str, value: Any, owner: type[BaseModel] | None) -> tuple[str, str]:
    known = field_names(owner) if owner else []
    near = closest(name, known)
    remedy = f"did you mean {near}?" if near else f"remove it; known here: {', '.join(known) or 'no fields'}"
    return f"unknown field, got {_got(value)}", remedy


def _got(value: Any) -> str:
    return _cut(repr(value), _MAX_GOT_CHARS)


def _cut(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else f"{text[: max_chars - 1]}…"


def _default(field: FieldInfo | None) -> str:
    if field is None or field.is_required():
        return ""
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, BaseModel):
        return ""
    return f" (default {'null' if value is None else value})"


def _meaning(field: FieldInfo | None) -> str:
    return f" ({' '.join(field.description.split())})" if field and field.description else ""


def _model_named(title: str) -> type[BaseModel] | None:
    pending: list[type[BaseModel]] = [Contract]
    while pending:
        model = pending.pop()
        if model.__name__ == title:
            return model
        pending += model.__subclasses__()
    return None
