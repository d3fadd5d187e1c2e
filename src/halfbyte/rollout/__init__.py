"""Rollouts: the engine, its KV pages and scheduler, and generation from files."""

from halfbyte.rollout.engine import Engine, EngineOptions
from halfbyte.rollout.request import Request, request_key

__all__ = ["Engine", "EngineOptions", "Request", "request_key"]
