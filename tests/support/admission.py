"""A ValidatingAdmissionPolicy as an API server applies it: its expressions, evaluated by Google's CEL.

Not the API server itself: the functions that Kubernetes adds to CEL are missing here, and an expression that uses one
does not compile. As with `failurePolicy: Fail`, an expression that fails is a refusal.
"""

from dataclasses import dataclass
from typing import Any

from cel_expr_python import cel

Object = dict[str, Any]
_NODE = "authentication.kubernetes.io/node-name"
_CEL = cel.NewEnv(
    variables=dict.fromkeys(("object", "oldObject", "request", "variables"), cel.Type.DYN)
)


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod's token: the account of a namespace, and the node, if the API server has put it in."""

    node: str | None = "node-1"
    account: str = "crust-node"
    namespace: str = "crust-system"

    def user_info(self) -> Object:
        """As AdmissionRequest has it (authentication/v1)."""
        extra = {} if self.node is None else {_NODE: [self.node]}
        username = f"system:serviceaccount:{self.namespace}:{self.account}"
        return {"username": username, "extra": extra}


def refusals(policy: Object, pod: Pod, new: Object | None, old: Object | None) -> list[str]:
    """The messages of the refusals to make an object (`old` is None), change it, or delete it (`new` is None)."""
    assert policy["spec"]["failurePolicy"] == "Fail"
    operation = "CREATE" if old is None else "DELETE" if new is None else "UPDATE"
    request = {"operation": operation, "userInfo": pod.user_info()}
    known: Object = {"object": new, "oldObject": old, "request": request, "variables": {}}
    if not all(_value(each, known) for each in policy["spec"]["matchConditions"]):
        return []
    for variable in policy["spec"]["variables"]:
        known["variables"][variable["name"]] = _value(variable, known)
    return [
        validation["message"]
        for validation in policy["spec"]["validations"]
        if _value(validation, known) is not True
    ]


def _value(item: Object, known: Object) -> Any:
    """A refusal by an error has the message of the validation; one of a variable or a condition fails the test."""
    expression = _CEL.compile(item["expression"])
    value = expression.eval(data=known)
    if value.type() == cel.Type.ERROR and "message" in item:
        return None
    assert value.type() != cel.Type.ERROR, (item, value.plain_value())
    return value.plain_value()
