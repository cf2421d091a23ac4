"""The list of models: the one that is trained."""

from datetime import UTC, datetime

from forgeasync.environments.sessions.fields import Json
from forgeasync.environments.sessions.problems import RequestError
from forgeasync.environments.sessions.session import Session


def models(session: Session, path: str, *, of_anthropic: bool) -> Json:
    """Return what ``GET /v1/models`` or ``GET /v1/models/<name>`` says, in OpenAI's form or in Anthropic's.

    Raises:
        RequestError: there is no model of this name.
    """
    name = path.removeprefix("/v1/models").removeprefix("/")
    if name not in ("", session.name):
        raise RequestError(
            f"there is no model {name[:80]!r}; must be {session.name!r}", status=404, code="model_not_found"
        )
    if of_anthropic:
        created = datetime.fromtimestamp(session.created_s, UTC).isoformat()
        model = {
            "type": "model",
            "id": session.name,
            "display_name": session.name,
            "created_at": created,
            "lifecycle": "active",
        }
        listed = {"has_more": False, "first_id": session.name, "last_id": session.name}
    else:
        model = {
            "id": session.name,
            "object": "model",
            "created": session.created_s,
            "owned_by": "forgeasync",
        }
        listed = {"object": "list"}
    return model if name else {**listed, "data": [model]}
