"""The paths of the server."""

from __future__ import annotations

import time
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from halfbyte import __version__
from halfbyte.serve.completions import Completions
from halfbyte.serve.guard import App, BearerGuard
from halfbyte.serve.problem import Problem
from halfbyte.serve.service import Service

__all__ = ["make_app"]


def make_app(service: Service) -> App:
    """The ASGI application."""
    pages = _Pages(service)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", Completions(service, "chat"), methods=["POST"]),
            Route("/v1/completions", Completions(service, "completions"), methods=["POST"]),
            Route("/v1/models", pages.models),
            Route("/v1/models/{name:path}", pages.model),
            Route("/health", pages.health),
            Route("/version", pages.version),
            Route("/metrics", pages.metrics),
        ],
        exception_handlers={HTTPException: _http_error, Exception: _bug},
    )
    return BearerGuard(app, service.settings.api_key)


class _Pages:
    def __init__(self, service: Service) -> None:
        self.service = service
        self.created = int(time.time())

    async def models(self, request: Request) -> Response:
        """What is served."""
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        """One model."""
        name = request.path_params["name"]
        if name != self.service.settings.name:
            problem = Problem(404, "The model does not exist.", param="model", code="model_not_found")
            return _answer(problem)
        return JSONResponse(self._card())

    async def health(self, request: Request) -> Response:
        """200 while requests are taken."""
        draining = self.service.draining
        return JSONResponse({"status": "draining" if draining else "ok"}, status_code=503 if draining else 200)

    async def version(self, request: Request) -> Response:
        """Of the program and of the weights."""
        service = self.service
        return JSONResponse(
            {
                "version": __version__,
                "model": service.settings.name,
                "weight_version": service.version,
                "max_length": service.max_length,
                **service.opened.facts,
            }
        )

    async def metrics(self, request: Request) -> Response:
        """For Prometheus."""
        return Response(self.service.metrics.text(), media_type="text/plain; version=0.0.4")

    def _card(self) -> dict[str, Any]:
        service = self.service
        return {
            "id": service.settings.name,
            "object": "model",
            "created": self.created,
            "owned_by": "halfbyte",
            "max_model_len": service.max_length,
        }


def _answer(problem: Problem) -> Response:
    return Response(problem.encoded(), problem.status, problem.headers, media_type="application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _answer(Problem(error.status_code, str(error.detail), headers=dict(error.headers or {})))


async def _bug(request: Request, error: Exception) -> Response:
    return _answer(Problem(500, "The server failed on this request.", code="internal_error"))
