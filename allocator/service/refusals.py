"""An answer that is an error, in one shape."""

from typing import Any


class ApiError(Exception):
    """Raised anywhere on a request's way, rendered once at its top. `facts` go beside the message."""

    def __init__(self, status: int, code: str, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.facts = facts

    def body(self) -> dict[str, Any]:
        """`{"error": {"code", "message", …}}`"""
        return {"error": {"code": self.code, "message": self.message, **self.facts}}
