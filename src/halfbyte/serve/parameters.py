"""What a request's body may hold. Anything that would change the answer and is not done here is refused, by name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from halfbyte.serve.problem import Problem

__all__ = ["ChatBody", "CompletionBody", "SamplingBody", "StreamOptions", "parse", "read_object"]

#: Most likely tokens that may be asked for beside each one drawn.
MOST_ALTERNATIVES = 20

#: Parameters that do not touch the answer, whatever their value.
HARMLESS = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
) | {"prediction"}

#: Parameters that this server does not have, and the values at which they change nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "skip_special_tokens": (True,),
    "add_special_tokens": (),
    "min_tokens": (0,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
}

Text = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(_Strict):
    """``include_usage``: a last chunk with the usage."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class SamplingBody(_Strict):
    """What both endpoints take. ``top_k``, ``min_p``, ``ignore_eos``, ``stop_token_ids`` and ``return_token_ids`` are ours
    (and vLLM's), not OpenAI's."""

    model: str
    n: Annotated[int, Field(ge=1)] = 1
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Annotated[list[Text], BeforeValidator(_listed), Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    ignore_eos: bool = False
    return_token_ids: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class ChatBody(SamplingBody):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(SamplingBody):
    """The body of ``/v1/completions``."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    logprobs: Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    echo: bool = False


Body = TypeVar("Body", bound=SamplingBody)


def read_object(raw: bytes) -> dict[str, Any]:
    """The JSON object of a body.

    Raises:
        Problem: 400, it is none, or holds text that UTF-8 cannot write.
    """
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_no_constant)
        if b"\\u" in raw:
            json.dumps(value, ensure_ascii=False).encode("utf-8")  # an escaped half of a surrogate pair is valid JSON
    except UnicodeEncodeError:
        raise Problem(400, "The body holds half of a surrogate pair, which is no text.") from None
    except (ValueError, RecursionError) as error:
        raise Problem(400, f"The body is not JSON: {str(error)[:200]}.") from None
    if not isinstance(value, dict):
        raise Problem(400, "The body is JSON, but not an object.")
    return value


def parse(kind: type[Body], body: Mapping[str, Any]) -> Body:
    """A checked body.

    Raises:
        Problem: 400, naming the first parameter that cannot be used.
    """
    wanted = {}
    for name, value in body.items():
        if name in HARMLESS:
            continue
        if name in kind.model_fields and name not in NEUTRAL:
            wanted[name] = value
        elif name in NEUTRAL:
            _check_neutral(name, value)
            if name in kind.model_fields:
                wanted[name] = value
        else:
            shown = name if re.fullmatch(r"[\w.-]{1,64}", name) else "(a name that is none)"
            raise Problem(400, f"Unknown parameter: '{shown}'.", param=shown, code="unknown_parameter")
    defaulted = {key: value for key, value in wanted.items() if value is not None}
    try:
        return kind.model_validate(defaulted)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = str(first["loc"][0]) if first["loc"] else None
        place = ".".join(str(part) for part in first["loc"] if "[" not in str(part))
        missing = first["type"] == "missing"
        message = f"Missing parameter: '{place}'." if missing else f"Invalid '{place}': {first['msg']}."
        raise Problem(400, message, param=param, code="missing_required_parameter" if missing else None) from None


def _check_neutral(name: str, value: object) -> None:
    if value is None or any(type(value) is not bool and value == v and type(v) is not bool for v in NEUTRAL[name]):
        return
    if any(value is v for v in NEUTRAL[name] if type(v) is bool):
        return
    raise Problem(
        400,
        f"'{name}' would change the answer and is not supported by this server.",
        param=name,
        code="unsupported_parameter",
    )


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
