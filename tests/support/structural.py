"""What an API server does with a custom resource before it stores it, as far as rules need it: defaults and CEL."""

import cel


def admit(schema, data):
    """`data` as rules see it: nulls dropped, defaults filled in, whole numbers fractional where the schema says so."""
    if isinstance(data, dict):
        return _object(schema, data)
    if isinstance(data, list):
        return [admit(schema.get("items", {}), item) for item in data]
    return float(data) if schema.get("type") == "number" and isinstance(data, int) else data


def _object(schema, data):
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", {})
    kept = {k: v for k, v in data.items() if v is not None or properties.get(k, {}).get("nullable")}
    kept |= {k: p["default"] for k, p in properties.items() if k not in kept and "default" in p}
    return {key: admit(properties.get(key, others), value) for key, value in kept.items()}


def violations(schema, new, old=None, path=""):
    """(path, message) of every rule that does not hold; `new` and `old` as `admit` gives them."""
    for rule in schema.get("x-kubernetes-validations", ()):
        if "oldSelf" in rule["rule"] and old is None:
            continue
        variables = {"self": new, "oldSelf": old}
        if not _evaluate(rule["rule"], variables):
            told = _evaluate(rule["messageExpression"], variables) if "messageExpression" in rule else rule["message"]
            yield path, told
    for name, inner in schema.get("properties", {}).items():
        if isinstance(new.get(name), dict):
            yield from violations(inner, new[name], (old or {}).get(name), f"{path}.{name}")


def _evaluate(expression, variables):
    return cel.evaluate(expression, cel.Context(variables, {"format": lambda text, values: text % tuple(values)}))
